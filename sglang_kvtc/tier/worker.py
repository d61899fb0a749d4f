"""One thread that codes staged chunks and restores requested ones; restores go first.

The scheduler thread only copies slots out, verifies checksums and hands work over. Torch and zlib release the GIL in
their kernels, so the scheduler keeps running.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.codec.decode import OpenFrame, RawFrame, join_frames
from sglang_kvtc.errors import RestoreError
from sglang_kvtc.tier.port import EnginePort, LayerDone
from sglang_kvtc.tier.state import ChunkState
from sglang_kvtc.tier.store import FrameStore, StoredChunk
from sglang_kvtc.types import KVChunk, TokenRange

logger = logging.getLogger(__name__)

MAX_JOINED_TOKENS = 1024
"""Most tokens whose coded frames are rebuilt by one product. Beyond, a product gains nothing and memory grows."""


@dataclass(frozen=True, slots=True)
class RestorePiece:
    """Tokens of one verified frame (or of a raw copy not yet coded) and the slots they go to.

    Holds the bytes themselves, so freeing the chunk meanwhile cannot pull them away.
    """

    source: bytes | KVChunk
    start_position: int
    num_tokens: int
    tokens: TokenRange
    slots: torch.Tensor


@dataclass(slots=True, eq=False)
class RestoreJob:
    """One load-back. `layer_done` is called per block of layers, `finished` exactly once with the error, if any."""

    pieces: list[RestorePiece]
    layer_done: LayerDone
    finished: Callable[[RestoreError | None], None]


@dataclass(slots=True)
class WorkerStats:
    """Totals since start. Times are seconds of the worker, by stage of a restore (`open_s` is entropy decoding,
    unpacking and dequantisation; `reconstruct_s` projection and rotation; `scatter_s` the write into the pool).
    """

    encoded_tokens: int = 0
    encoded_frames: int = 0
    raw_fallback_frames: int = 0
    discarded_frames: int = 0
    failed_frames: int = 0
    encode_s: float = 0.0
    restored_tokens: int = 0
    restores: int = 0
    failed_restores: int = 0
    restore_s: float = 0.0
    open_s: float = 0.0
    reconstruct_s: float = 0.0
    scatter_s: float = 0.0


@dataclass(slots=True, eq=False)
class TierWorker:
    """Runs jobs until `close`. `threads` caps torch's threads in this thread; 0 leaves torch's default."""

    codec: KVCodec
    port: EnginePort
    store: FrameStore
    num_layers: int
    layers_per_step: int
    threads: int = 0
    stats: WorkerStats = field(default_factory=WorkerStats)
    _restores: deque[RestoreJob] = field(default_factory=deque)
    _encodes: deque[StoredChunk] = field(default_factory=deque)
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _closing: bool = False
    _busy: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvtc-worker", daemon=True)
        self._thread.start()

    def submit_encode(self, chunk: StoredChunk) -> None:
        with self._wake:
            self._encodes.append(chunk)
            self._wake.notify_all()

    def submit_restore(self, job: RestoreJob) -> None:
        with self._wake:
            self._restores.append(job)
            self._wake.notify_all()

    def drain(self) -> None:
        """Wait until every job handed over so far is done."""
        with self._wake:
            self._wake.wait_for(lambda: self._closing or not (self._busy or self._restores or self._encodes))

    def close(self) -> None:
        """Stop after the current job. Queued restores fail with RestoreError, queued chunks are dropped."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for job in self._restores:
            job.finished(RestoreError("the server is shutting down"))
        for chunk in self._encodes:
            self.store.invalidate(chunk)
        self._restores.clear()
        self._encodes.clear()

    def _run(self) -> None:
        if self.threads:
            torch.set_num_threads(self.threads)
        with torch.inference_mode():
            while (job := self._next_job()) is not None:
                try:
                    if isinstance(job, RestoreJob):
                        self._restore(job)
                    else:
                        self._encode(job)
                finally:
                    # A waiting loop must not keep the last job's tensors alive.
                    del job

    def _next_job(self) -> RestoreJob | StoredChunk | None:
        with self._wake:
            self._busy = False
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._closing or self._restores or self._encodes)
            if self._closing:
                return None
            self._busy = True
            return self._restores.popleft() if self._restores else self._encodes.popleft()

    def _encode(self, chunk: StoredChunk) -> None:
        staged = chunk.staged
        if chunk.state is ChunkState.DEAD or staged is None:
            self.store.invalidate(chunk)
            return
        started = time.perf_counter()
        try:
            encoded = self.codec.encode(staged, chunk.kind, chunk.plan)
        except Exception:
            # The tokens become a miss; losing a cache entry must never lose a request.
            logger.exception("kvtc: encoding %d tokens failed; they are dropped from the cache", chunk.num_tokens)
            self.stats.failed_frames += 1
            self.store.invalidate(chunk)
            return
        self.stats.encode_s += time.perf_counter() - started
        fell_back = encoded.kind is not chunk.kind
        if not self.store.commit(chunk, encoded.frame):
            self.stats.discarded_frames += 1
            return
        self.stats.encoded_frames += 1
        self.stats.encoded_tokens += chunk.num_tokens
        self.stats.raw_fallback_frames += fell_back

    def _restore(self, job: RestoreJob) -> None:
        started = time.perf_counter()
        try:
            parts = self._open(job.pieces)
            self.stats.open_s += time.perf_counter() - started
            for first in range(0, self.num_layers, self.layers_per_step):
                layers = range(first, min(first + self.layers_per_step, self.num_layers))
                for part in parts:
                    self._restore_part(*part, layers)
                job.layer_done(layers)
        except Exception as error:
            # Its frames were verified on the scheduler thread: this is out of memory or a bug of ours.
            logger.exception("kvtc: a restore failed after verification")
            self.stats.failed_restores += 1
            failure = RestoreError(f"restoring a prefix failed: {error}")
            failure.__cause__ = error
            job.finished(failure)
            return
        self.stats.restore_s += time.perf_counter() - started
        self.stats.restores += 1
        self.stats.restored_tokens += sum(len(piece.tokens) for piece in job.pieces)
        job.finished(None)

    def _open(self, pieces: Sequence[RestorePiece]) -> list[tuple[OpenFrame, TokenRange, torch.Tensor]]:
        """Frames, the tokens wanted of them and their slots; small frames merged."""
        opened = [(self._open_piece(piece), piece.tokens) for piece in pieces]
        slots = iter(piece.slots for piece in pieces)
        return [
            (frame, tokens, torch.cat(list(itertools.islice(slots, num_pieces))))
            for frame, tokens, num_pieces in join_frames(opened, MAX_JOINED_TOKENS)
        ]

    def _open_piece(self, piece: RestorePiece) -> OpenFrame:
        if isinstance(piece.source, KVChunk):
            return RawFrame(piece.source.keys, piece.source.values)
        return self.codec.open(piece.source, piece.start_position, piece.num_tokens)

    def _restore_part(self, frame: OpenFrame, tokens: TokenRange, slots: torch.Tensor, layers: range) -> None:
        started = time.perf_counter()
        keys, values = frame.reconstruct(layers, tokens)
        rebuilt = time.perf_counter()
        self.port.scatter(layers, slots, keys, values)
        self.stats.reconstruct_s += rebuilt - started
        self.stats.scatter_s += time.perf_counter() - rebuilt
