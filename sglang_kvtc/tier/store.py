"""Frames in host memory, addressed by virtual token ids, with exact byte accounting.

The engine's tree holds one id per stored token, as if they were slots of a host pool. Ids are never reused, so a split
of a tree node is a split of its ids and nothing here changes. A chunk lives until the last of its tokens is freed.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.tier.state import ChunkState, move
from sglang_kvtc.types import KVChunk, TokenRange

Ids = npt.NDArray[np.int64]


class Shortage(enum.Enum):
    """Why a reservation failed: the encoder is behind, or the arena is full of frames."""

    STAGING = "staging"
    ARENA = "arena"


@dataclass(slots=True, eq=False)
class StoredChunk:
    """Consecutive tokens of one sequence under consecutive ids [first_id, first_id + num_tokens).

    kind, plan: what the frame is to be (codec.segments). sidecar: what else is known of each token,
    u8[any, num_tokens, any], kept beside the frame and counted with it.
    """

    first_id: int
    num_tokens: int
    start_position: int
    kind: FrameKind
    plan: int
    staged: KVChunk | None
    staged_bytes: int
    state: ChunkState = ChunkState.STAGED
    frame: bytes | None = None
    sidecar: torch.Tensor | None = None
    live: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))

    @property
    def stored_bytes(self) -> int:
        """Of the frame and what is kept beside it; 0 without a frame."""
        if self.frame is None:
            return 0
        return len(self.frame) + (self.sidecar.nbytes if self.sidecar is not None else 0)


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `tokens` (relative to the chunk) that answer ids[offset : offset + len(tokens)] of a request."""

    chunk: StoredChunk
    tokens: TokenRange
    offset: int


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """A consistent snapshot. `frame_tokens` counts tokens of chunks that have a frame, so that
    frame_bytes / frame_tokens is the true cost of a token with every stored byte counted.
    """

    live_tokens: int
    frames: int
    frame_bytes: int
    frame_tokens: int
    staged_chunks: int
    staged_bytes: int


class FrameStore:
    """All stored chunks of one rank.

    arena_bytes bounds frames and raw copies together; staging_bytes bounds the raw copies alone. Thread-safe: the
    scheduler adds, frees and looks up, the worker commits.
    """

    def __init__(self, arena_bytes: int, staging_bytes: int) -> None:
        self.arena_bytes = arena_bytes
        self.staging_bytes = staging_bytes
        self._lock = threading.Lock()
        self._staging_freed = threading.Condition(self._lock)
        self._next_id = 0
        self._first_ids: list[int] = []
        self._chunks: list[StoredChunk] = []
        self._live_tokens = 0
        self._frame_bytes = 0
        self._frame_tokens = 0
        self._staged_bytes = 0
        self._staged_chunks = 0

    def usage(self) -> StoreUsage:
        with self._lock:
            return StoreUsage(
                live_tokens=self._live_tokens,
                frames=sum(chunk.frame is not None for chunk in self._chunks),
                frame_bytes=self._frame_bytes,
                frame_tokens=self._frame_tokens,
                staged_chunks=self._staged_chunks,
                staged_bytes=self._staged_bytes,
            )

    @property
    def live_tokens(self) -> int:
        with self._lock:
            return self._live_tokens

    def reserve(self, num_bytes: int, timeout_s: float) -> Shortage | None:
        """Take staging room for a raw copy, waiting up to `timeout_s` for the encoder.

        The arena must be able to take the copy even if coding does not shrink it, so frames plus staged copies never
        exceed `arena_bytes`. Returns None when the room is taken, else what is short.
        """
        deadline = time.monotonic() + timeout_s
        with self._staging_freed:
            while True:
                arena_short = self._frame_bytes + self._staged_bytes + num_bytes > self.arena_bytes
                if not arena_short and self._staged_bytes + num_bytes <= self.staging_bytes:
                    self._staged_bytes += num_bytes
                    return None
                if arena_short and not self._staged_bytes:
                    # Nothing is on its way to becoming smaller: only eviction helps.
                    return Shortage.ARENA
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._staging_freed.wait(remaining):
                    return Shortage.ARENA if arena_short else Shortage.STAGING

    def add(
        self,
        staged: KVChunk,
        kind: FrameKind,
        reserved_bytes: int,
        sidecar: torch.Tensor | None = None,
        *,
        plan: int = 0,
    ) -> StoredChunk:
        """Take a raw copy (whose staging room was reserved) under fresh ids. It can be restored at once.

        kind, plan: for KVCodec.encode.
        """
        with self._lock:
            chunk = StoredChunk(
                first_id=self._next_id,
                num_tokens=staged.num_tokens,
                start_position=staged.start_position,
                kind=kind,
                plan=plan,
                staged=staged,
                staged_bytes=reserved_bytes,
                sidecar=sidecar,
                live=np.ones(staged.num_tokens, np.bool_),
            )
            self._next_id += chunk.num_tokens
            self._first_ids.append(chunk.first_id)
            self._chunks.append(chunk)
            self._live_tokens += chunk.num_tokens
            self._staged_chunks += 1
            return chunk

    def commit(self, chunk: StoredChunk, frame: bytes) -> bool:
        """Replace the raw copy by its frame. False if the chunk was freed meanwhile."""
        with self._lock:
            self._release_staging(chunk)
            if chunk.state is ChunkState.DEAD:
                return False
            chunk.state = move(chunk.state, ChunkState.STORED)
            chunk.frame = frame
            self._frame_bytes += chunk.stored_bytes
            self._frame_tokens += chunk.num_tokens
            return True

    def invalidate(self, chunk: StoredChunk) -> None:
        """Make a chunk a miss (failed encode, damaged frame). Its ids stay valid to free."""
        with self._lock:
            self._release_staging(chunk)
            self._kill(chunk)

    def segments(self, ids: Ids) -> Iterator[Segment]:
        """Cut a request for ids into pieces of chunks, in order. Raises KeyError for an id that is not stored."""
        for first, length, offset in _runs(ids):
            while length:
                chunk = self._find(first)
                low = first - chunk.first_id
                take = min(length, chunk.num_tokens - low)
                yield Segment(chunk, TokenRange(low, low + take), offset)
                first, offset, length = first + take, offset + take, length - take

    def free(self, ids: Ids) -> int:
        """Give tokens back. Raises KeyError for ids that are not stored or were freed before."""
        pieces = list(self.segments(ids))
        with self._lock:
            for piece in pieces:
                window = piece.chunk.live[piece.tokens.start : piece.tokens.stop]
                if not window.all():
                    raise KeyError(f"ids of chunk {piece.chunk.first_id} freed twice")
                window[:] = False
                self._live_tokens -= len(piece.tokens)
                if not piece.chunk.live.any():
                    self._kill(piece.chunk)
                    index = bisect.bisect_left(self._first_ids, piece.chunk.first_id)
                    del self._first_ids[index], self._chunks[index]
        return len(ids)

    def clear(self) -> None:
        """Drop everything. Chunks still with the encoder are discarded when it finishes them."""
        with self._lock:
            for chunk in self._chunks:
                self._kill(chunk)
            self._first_ids.clear()
            self._chunks.clear()
            self._live_tokens = 0

    def _find(self, token_id: int) -> StoredChunk:
        with self._lock:
            index = bisect.bisect_right(self._first_ids, token_id) - 1
            if index >= 0:
                chunk = self._chunks[index]
                if token_id < chunk.first_id + chunk.num_tokens:
                    return chunk
        raise KeyError(f"id {token_id} is not stored")

    def _release_staging(self, chunk: StoredChunk) -> None:
        if chunk.staged_bytes:
            self._staged_bytes -= chunk.staged_bytes
            self._staged_chunks -= 1
            chunk.staged_bytes = 0
            self._staging_freed.notify_all()
        chunk.staged = None

    def _kill(self, chunk: StoredChunk) -> None:
        if chunk.state is ChunkState.DEAD:
            return
        chunk.state = move(chunk.state, ChunkState.DEAD)
        if chunk.frame is not None:
            self._frame_bytes -= chunk.stored_bytes
            self._frame_tokens -= chunk.num_tokens
            chunk.frame = None
        chunk.sidecar = None


def _runs(ids: Ids) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive ids as (first id, length, offset)."""
    if len(ids) == 0:
        return
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    bounds = [0, *cuts.tolist(), len(ids)]
    for start, stop in itertools.pairwise(bounds):
        yield int(ids[start]), stop - start, start
