"""Life of one stored chunk. Only the moves below exist; anything else is a bug of ours and raises."""

from __future__ import annotations

import enum


class ChunkState(enum.Enum):
    """STAGED: a raw copy waits for the encoder and can already be restored. STORED: coded into a frame.
    DEAD: freed, failed or found damaged; whoever still refers to it sees a miss.
    """

    STAGED = "staged"
    STORED = "stored"
    DEAD = "dead"


_LEGAL = {
    ChunkState.STAGED: {ChunkState.STORED, ChunkState.DEAD},
    ChunkState.STORED: {ChunkState.DEAD},
    ChunkState.DEAD: set(),
}


def move(current: ChunkState, to: ChunkState) -> ChunkState:
    """Check a state change. Raises RuntimeError on a move that does not exist."""
    if to not in _LEGAL[current]:
        raise RuntimeError(f"illegal chunk state change {current.value} -> {to.value}")
    return to
