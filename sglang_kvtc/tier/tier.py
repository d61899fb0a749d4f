"""The compressed tier as the engine sees it: slots in, ids out; ids in, slots filled."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import TierConfig
from sglang_kvtc.errors import BitstreamError, RestoreError
from sglang_kvtc.tier.policy import StorageCost
from sglang_kvtc.tier.port import EnginePort, LayerDone
from sglang_kvtc.tier.state import ChunkState
from sglang_kvtc.tier.store import FrameStore, Ids, Shortage, StoredChunk
from sglang_kvtc.tier.worker import RestoreJob, RestorePiece, TierWorker
from sglang_kvtc.types import KVChunk

logger = logging.getLogger(__name__)

STAGING_WAIT_S = 5.0
"""How long an eviction waits for the encoder before its node is dropped instead. An encoder that frees no staging
room in this time is not keeping up with anything."""


MAX_FRAME_OVERHEAD = 1024
"""Most bytes that a frame can exceed the raw copy of its tokens by (header, section table, scales)."""

MakeRoom = Callable[[int], bool]


@dataclass(slots=True)
class TierCounters:
    """Events on the scheduler thread since start."""

    compressed_nodes: int = 0
    dropped_nodes: int = 0
    restored_prefixes: int = 0
    missed_prefixes: int = 0
    rejected_frames: int = 0


class CompressedTier:
    """Stores prefix nodes as frames and restores them.

    `compress`, `prepare_restore`, `free` and `clear` are called on the scheduler thread only. Positions are absolute:
    a node's first token has the position the engine gave it.
    """

    def __init__(self, codec: KVCodec, port: EnginePort, config: TierConfig, arena_bytes: int) -> None:
        self.codec = codec
        self.config = config
        self.port = port
        self.store = FrameStore(arena_bytes, config.staging_bytes)
        self.cost = StorageCost(codec, config)
        self.counters = TierCounters()
        self.worker = TierWorker(
            codec=codec,
            port=port,
            store=self.store,
            num_layers=codec.geometry.num_layers,
            layers_per_step=config.layers_per_step,
            threads=config.codec_threads,
        )
        self.worker.start()

    def compress(
        self,
        slots: torch.Tensor,
        start_position: int,
        make_room: MakeRoom,
        wait_s: float = STAGING_WAIT_S,
        sidecar: torch.Tensor | None = None,
    ) -> Ids | None:
        """Copy a node out and queue it for coding. Its slots may be reused as soon as this returns.

        slots: i64[num_tokens], in order of position. sidecar: u8[any, num_tokens, any], kept as it is until the tokens
        are freed. make_room: evicts at least that many stored tokens and says whether any went. Returns i64[num_tokens]
        ids, or None if there is no room; then nothing is kept.
        """
        chunks: list[StoredChunk] = []
        for tokens, kind, plan in self.cost.segments(start_position, len(slots)):
            part = slice(tokens.start - start_position, tokens.stop - start_position)
            beside = None if sidecar is None else sidecar[:, part].clone()
            num_bytes = len(tokens) * self.codec.geometry.bytes_per_token + MAX_FRAME_OVERHEAD
            num_bytes += 0 if beside is None else beside.nbytes
            if not self._reserve(num_bytes, make_room, wait_s):
                for chunk in chunks:
                    self.store.free(_ids(chunk))
                self.counters.dropped_nodes += 1
                return None
            keys, values = self.port.gather(slots[part])
            chunk = self.store.add(KVChunk(keys, values, tokens.start), kind, num_bytes, beside, plan=plan)
            self.worker.submit_encode(chunk)
            chunks.append(chunk)
        self.counters.compressed_nodes += 1
        return np.concatenate([_ids(chunk) for chunk in chunks])

    def _reserve(self, num_bytes: int, make_room: MakeRoom, wait_s: float) -> bool:
        while (shortage := self.store.reserve(num_bytes, wait_s)) is not None:
            per_token = self.cost.bytes_per_token(self.store.usage())
            if shortage is Shortage.STAGING or not make_room(math.ceil(num_bytes / per_token)):
                return False
        return True

    def can_stage(self, num_tokens: int) -> bool:
        """Whether a node of this size could be copied out without waiting for the encoder."""
        usage = self.store.usage()
        return usage.staged_bytes + num_tokens * self.codec.geometry.bytes_per_token <= self.store.staging_bytes

    def available_tokens(self) -> int:
        """Tokens the arena can still take, by the cost measured so far (at first: the plan's)."""
        usage = self.store.usage()
        free_bytes = self.store.arena_bytes - usage.frame_bytes - usage.staged_bytes
        return max(0, int(free_bytes / self.cost.bytes_per_token(usage)))

    def capacity_tokens(self) -> int:
        return int(self.store.arena_bytes / self.cost.bytes_per_token(self.store.usage()))

    def prepare_restore(self, ids: Ids, slots_of: Callable[[int], torch.Tensor | None]) -> list[RestorePiece] | None:
        """Verify everything a hit would read, then allocate its slots; None is a miss and leaves nothing behind.

        slots_of: allocates that many slots, or returns None. Checksums are verified here, on the scheduler thread,
        because after the hit is promised there is no way back to a miss.
        """
        sources: list[tuple[StoredChunk, bytes | KVChunk]] = []
        segments = list(self.store.segments(ids))
        for segment in segments:
            source = self._verified_source(segment.chunk)
            if source is None:
                self.counters.missed_prefixes += 1
                return None
            sources.append((segment.chunk, source))
        slots = slots_of(len(ids))
        if slots is None:
            self.counters.missed_prefixes += 1
            return None
        self.counters.restored_prefixes += 1
        return [
            RestorePiece(
                source=source,
                start_position=chunk.start_position,
                num_tokens=chunk.num_tokens,
                tokens=segment.tokens,
                slots=slots[segment.offset : segment.offset + len(segment.tokens)],
            )
            for segment, (chunk, source) in zip(segments, sources, strict=True)
        ]

    def start_restore(
        self, pieces: list[RestorePiece], layer_done: LayerDone, finished: Callable[[RestoreError | None], None]
    ) -> None:
        self.worker.submit_restore(RestoreJob(pieces, layer_done, finished))

    def restorable_prefix(self, ids: Ids) -> int:
        """How many leading ids are not known to be damaged. Cheap: looks at states, not at bytes."""
        for segment in self.store.segments(ids):
            if segment.chunk.state is ChunkState.DEAD:
                return segment.offset
        return len(ids)

    def sidecars(self, ids: Ids) -> torch.Tensor | None:
        """What `compress` was given beside these tokens, u8[any, len(ids), any]; None if any of them has nothing."""
        parts = []
        for segment in self.store.segments(ids):
            # Read once: the worker may drop it meanwhile.
            sidecar = segment.chunk.sidecar
            if sidecar is None:
                return None
            parts.append(sidecar[:, segment.tokens.start : segment.tokens.stop])
        return torch.cat(parts, dim=1) if parts else None

    def free(self, ids: Ids) -> int:
        return self.store.free(ids)

    def clear(self) -> None:
        """Empty every tier (a flush). The encoder's current chunk is discarded when it finishes."""
        self.store.clear()

    def close(self) -> None:
        self.worker.close()
        self.store.clear()

    def stats(self) -> dict[str, float]:
        """Flat numbers for logs, the server's state page and benchmarks; bytes, tokens, seconds as named."""
        usage = self.store.usage()
        worker = self.worker.stats
        return {
            "arena_bytes": self.store.arena_bytes,
            "raw_bytes_per_token": self.codec.geometry.bytes_per_token,
            **{name: getattr(usage, name) for name in usage.__dataclass_fields__},
            **{name: getattr(self.counters, name) for name in self.counters.__dataclass_fields__},
            **{name: getattr(worker, name) for name in worker.__dataclass_fields__},
        }

    def _verified_source(self, chunk: StoredChunk) -> bytes | KVChunk | None:
        # The worker may commit between these reads: the raw copy stays valid either way.
        staged, frame = chunk.staged, chunk.frame
        if chunk.state is ChunkState.DEAD:
            return None
        if frame is None:
            return staged if staged is not None else chunk.frame
        try:
            self.codec.verify(frame, chunk.start_position, chunk.num_tokens)
        except BitstreamError as error:
            logger.warning("kvtc: a stored frame was damaged and is dropped: %s", error)
            self.counters.rejected_frames += 1
            self.store.invalidate(chunk)
            return None
        return frame


def _ids(chunk: StoredChunk) -> Ids:
    return np.arange(chunk.first_id, chunk.first_id + chunk.num_tokens, dtype=np.int64)
