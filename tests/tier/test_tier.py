"""The tier over a plain pool: what goes in comes back, and everything that can go wrong is a miss."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sglang_kvtc.artifact.schema import Artifact, ModelFingerprint, RopeSpec
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import CodecConfig, TierConfig
from sglang_kvtc.errors import RestoreError
from sglang_kvtc.tier.tier import MAX_FRAME_OVERHEAD, CompressedTier
from sglang_kvtc.types import ModelGeometry

GEOMETRY = ModelGeometry(num_layers=4, num_kv_heads=2, head_dim=8, v_head_dim=8, dtype="bfloat16")
ARTIFACT = Artifact(
    geometry=GEOMETRY,
    rope=RopeSpec("default", 8, (1.0, 0.1, 0.01, 0.001)),
    fingerprint=ModelFingerprint("Toy", "toy", "0" * 32),
    k=None,
    v=None,
    plans=(),
    digest=bytes(16),
)


class PlainPool:
    """EnginePort over one tensor per side; `fail_scatter` makes writes raise."""

    def __init__(self, num_slots: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (GEOMETRY.num_layers, num_slots, GEOMETRY.num_kv_heads, GEOMETRY.head_dim)
        self.keys = torch.randn(shape, generator=generator).bfloat16()
        self.values = torch.randn(shape, generator=generator).bfloat16()
        self.fail_scatter = False

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[:, slots].clone(), self.values[:, slots].clone()

    def scatter(self, layers: range, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.fail_scatter:
            raise MemoryError("no memory for the scatter")
        self.keys[layers.start : layers.stop, slots] = keys
        self.values[layers.start : layers.stop, slots] = values


class Harness:
    def __init__(self, pool: PlainPool, tier: CompressedTier) -> None:
        self.pool, self.tier = pool, tier

    def compress(self, slots: torch.Tensor, start: int = 0) -> np.ndarray | None:
        return self.tier.compress(slots, start, make_room=lambda _tokens: False, wait_s=5)

    def restore(self, ids: np.ndarray, slots: torch.Tensor) -> RestoreError | str | None:
        """Restore into poisoned slots. Returns the error, None when it worked, "miss" for a miss."""
        self.pool.keys[:, slots] = torch.nan
        self.pool.values[:, slots] = torch.nan
        pieces = self.tier.prepare_restore(ids, lambda _tokens: slots)
        if pieces is None:
            return "miss"
        done = threading.Event()
        outcome: list[RestoreError | None] = []

        def finished(error: RestoreError | None) -> None:
            outcome.append(error)
            done.set()

        self.tier.start_restore(pieces, lambda layers: None, finished)
        assert done.wait(30)
        return outcome[0]


@pytest.fixture
def harness() -> Iterator[Harness]:
    pool = PlainPool(4000)
    config = TierConfig(arena_bytes=1 << 24, staging_bytes=1 << 20, layers_per_step=3)
    tier = CompressedTier(KVCodec(ARTIFACT, CodecConfig(chunk_tokens=64)), pool, config, config.arena_bytes)
    yield Harness(pool, tier)
    tier.close()


def test_a_hit_01_every_slot_of_a_hit_is_written(harness: Harness) -> None:
    source, target = torch.randperm(2000)[:200], 2000 + torch.randperm(2000)[:200]
    expected = harness.pool.gather(source)
    ids = harness.compress(source)
    harness.tier.worker.drain()
    assert harness.restore(ids, target) is None
    for restored, original in zip(harness.pool.gather(target), expected, strict=True):
        assert torch.equal(restored, original)


def test_tokens_are_restored_from_the_raw_copy_before_they_are_coded(harness: Harness) -> None:
    release = threading.Event()
    encode = harness.tier.worker.codec.encode
    harness.tier.worker.codec.encode = lambda *args: (release.wait(30), encode(*args))[1]  # type: ignore[method-assign]
    expected = harness.pool.gather(torch.arange(100))
    ids = harness.compress(torch.arange(100))
    pieces = harness.tier.prepare_restore(ids, lambda _tokens: torch.arange(3000, 3100))
    assert pieces is not None and not any(isinstance(piece.source, bytes) for piece in pieces)
    release.set()
    assert harness.restore(ids, torch.arange(3000, 3100)) is None
    for restored, original in zip(harness.pool.gather(torch.arange(3000, 3100)), expected, strict=True):
        assert torch.equal(restored, original)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 130, 199])
def test_a_split_04_both_halves_of_a_split_node_equal_the_whole(harness: Harness, cut: int) -> None:
    expected = harness.pool.gather(torch.arange(200))
    ids = harness.compress(torch.arange(200), start=37)
    harness.tier.worker.drain()
    for part in (slice(0, cut), slice(cut, 200)):
        target = torch.arange(2000, 2000 + len(ids[part]))
        assert harness.restore(ids[part], target) is None
        for restored, original in zip(harness.pool.gather(target), expected, strict=True):
            assert torch.equal(restored, original[:, part])


def test_a_life_01_freeing_a_node_does_not_disturb_its_running_restore(harness: Harness) -> None:
    expected = harness.pool.gather(torch.arange(100))
    ids = harness.compress(torch.arange(100))
    harness.tier.worker.drain()
    slots = torch.arange(3000, 3100)
    pieces = harness.tier.prepare_restore(ids, lambda _tokens: slots)
    harness.tier.free(ids)
    assert harness.tier.store.usage().frame_bytes == 0
    done = threading.Event()
    harness.tier.start_restore(pieces, lambda layers: None, lambda error: done.set())
    assert done.wait(30)
    for restored, original in zip(harness.pool.gather(slots), expected, strict=True):
        assert torch.equal(restored, original)


def test_a_bit_10_one_damaged_frame_makes_a_miss_of_its_hit_alone(harness: Harness) -> None:
    nodes = [harness.compress(torch.arange(100 * n, 100 * n + 100)) for n in range(5)]
    harness.tier.worker.drain()
    chunk = next(harness.tier.store.segments(nodes[2])).chunk
    chunk.frame = chunk.frame[:-20] + bytes([chunk.frame[-20] ^ 1]) + chunk.frame[-19:]
    outcomes = [harness.restore(ids, torch.arange(3000, 3100)) for ids in nodes]
    assert outcomes == [None, None, "miss", None, None]
    assert harness.tier.counters.rejected_frames == 1


def test_a_hit_04_a_hit_ends_where_a_chunk_was_lost(harness: Harness) -> None:
    ids = harness.compress(torch.arange(256))
    harness.tier.worker.drain()
    assert harness.tier.restorable_prefix(ids) == 256
    lost = list(harness.tier.store.segments(ids))[2]
    harness.tier.store.invalidate(lost.chunk)
    assert harness.tier.restorable_prefix(ids) == lost.offset
    assert harness.restore(ids[: lost.offset], torch.arange(3000, 3000 + lost.offset)) is None


def test_a_bit_09_frames_stored_under_each_others_ids_are_a_miss(harness: Harness) -> None:
    ids = harness.compress(torch.arange(128))
    harness.tier.worker.drain()
    first, second = (segment.chunk for segment in harness.tier.store.segments(ids))
    first.frame, second.frame = second.frame, first.frame
    assert harness.restore(ids, torch.arange(3000, 3128)) == "miss"


def test_a_leak_06_a_hit_that_gets_no_slots_changes_nothing(harness: Harness) -> None:
    ids = harness.compress(torch.arange(100))
    harness.tier.worker.drain()
    before = harness.tier.store.usage()
    assert harness.tier.prepare_restore(ids, lambda _tokens: None) is None
    assert harness.tier.store.usage() == before


def test_a_node_without_room_leaves_nothing_behind(harness: Harness) -> None:
    harness.tier.store.arena_bytes = 20_000
    assert harness.compress(torch.arange(2000)) is None
    harness.tier.worker.drain()
    usage = harness.tier.store.usage()
    assert (usage.live_tokens, usage.frame_bytes, usage.staged_bytes) == (0, 0, 0)
    assert harness.tier.counters.dropped_nodes == 1


def test_making_room_evicts_stored_tokens_until_the_node_fits(harness: Harness) -> None:
    stored = [harness.compress(torch.arange(100 * n, 100 * n + 100)) for n in range(4)]
    harness.tier.worker.drain()
    harness.tier.store.arena_bytes = harness.tier.store.usage().frame_bytes + 100

    def make_room(_tokens: int) -> bool:
        if not stored:
            return False
        harness.tier.free(stored.pop(0))
        return True

    assert harness.tier.compress(torch.arange(100), 0, make_room, wait_s=5) is not None
    harness.tier.worker.drain()
    assert len(stored) < 4
    assert harness.tier.store.usage().frame_bytes <= harness.tier.store.arena_bytes


def test_a_life_04_a_failed_encode_is_a_miss_and_is_counted(harness: Harness) -> None:
    def broken(*_args: object) -> None:
        raise MemoryError("no memory to encode")

    harness.tier.worker.codec.encode = broken  # type: ignore[method-assign]
    ids = harness.compress(torch.arange(100))
    harness.tier.worker.drain()
    assert harness.restore(ids, torch.arange(3000, 3100)) == "miss"
    assert harness.tier.worker.stats.failed_frames == 2
    assert harness.tier.free(ids) == 100
    assert harness.tier.store.usage().staged_bytes == 0


def test_a_restore_that_fails_reports_its_error_and_the_worker_goes_on(harness: Harness) -> None:
    ids = harness.compress(torch.arange(100))
    harness.tier.worker.drain()
    harness.pool.fail_scatter = True
    assert isinstance(harness.restore(ids, torch.arange(3000, 3100)), RestoreError)
    harness.pool.fail_scatter = False
    assert harness.restore(ids, torch.arange(3000, 3100)) is None


def test_layers_are_released_in_order_and_each_once(harness: Harness) -> None:
    ids = harness.compress(torch.arange(100))
    harness.tier.worker.drain()
    pieces = harness.tier.prepare_restore(ids, lambda _tokens: torch.arange(3000, 3100))
    released: list[int] = []
    done = threading.Event()
    harness.tier.start_restore(pieces, released.extend, lambda error: done.set())
    assert done.wait(30)
    assert released == list(range(GEOMETRY.num_layers))


def test_closing_fails_queued_restores_and_stops_the_thread(harness: Harness) -> None:
    ids = harness.compress(torch.arange(100))
    harness.tier.worker.drain()
    blocked, release = threading.Event(), threading.Event()

    def hold(_layers: range) -> None:
        blocked.set()
        release.wait(30)

    outcomes: list[RestoreError | None] = []
    for layer_done in (hold, lambda _layers: None):
        pieces = harness.tier.prepare_restore(ids, lambda _tokens: torch.arange(3000, 3100))
        harness.tier.start_restore(pieces, layer_done, outcomes.append)
    assert blocked.wait(30)
    closer = threading.Thread(target=harness.tier.close)
    closer.start()
    release.set()
    closer.join(30)
    assert not closer.is_alive()
    assert outcomes[0] is None and isinstance(outcomes[1], RestoreError)
    assert not any(thread.name == "kvtc-worker" for thread in threading.enumerate())


def test_a_leak_02_ten_thousand_nodes_leave_no_memory_behind(harness: Harness) -> None:
    stored = []
    for _ in range(10_000):
        stored.append(harness.compress(torch.arange(2)))
    harness.tier.worker.drain()
    for ids in stored:
        harness.tier.free(ids)
    usage = harness.tier.store.usage()
    assert (usage.live_tokens, usage.frames, usage.frame_bytes, usage.staged_bytes) == (0, 0, 0, 0)
    assert not harness.tier.store._chunks


def sidecar_of(num_tokens: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, num_tokens, 2), generator=torch.Generator().manual_seed(1)).byte()


def test_what_is_kept_beside_tokens_is_found_under_any_of_their_ids(harness: Harness) -> None:
    """Chunks hold 64 tokens, so a request for ids is cut at 64, 128 and 192."""
    beside = sidecar_of(200)
    given = beside.clone()
    ids = harness.tier.compress(torch.arange(200), 37, lambda _tokens: False, sidecar=given)
    given.zero_()
    for is_coded in (False, True):
        if is_coded:
            harness.tier.worker.drain()
        for first, end in ((0, 200), (0, 1), (60, 70), (27, 91), (63, 193), (199, 200)):
            assert torch.equal(harness.tier.sidecars(ids[first:end]), beside[:, first:end])
        picked = np.array([3, 4, 5, 100, 7, 199])
        assert torch.equal(harness.tier.sidecars(ids[picked]), beside[:, picked])
    assert len({id(piece.chunk) for piece in harness.tier.store.segments(ids)}) > 2
    assert harness.tier.sidecars(ids[:0]) is None


def test_tokens_without_anything_beside_them_have_none_and_neither_has_a_request_over_them(harness: Harness) -> None:
    plain = harness.compress(torch.arange(100))
    beside = sidecar_of(100)
    ids = harness.tier.compress(torch.arange(100), 0, lambda _tokens: False, sidecar=beside)
    assert harness.tier.sidecars(plain) is None
    assert harness.tier.sidecars(np.concatenate([ids, plain[:1]])) is None
    assert torch.equal(harness.tier.sidecars(ids), beside)
    lost = list(harness.tier.store.segments(ids))[-1]
    harness.tier.store.invalidate(lost.chunk)
    assert harness.tier.sidecars(ids) is None
    assert torch.equal(harness.tier.sidecars(ids[: lost.offset]), beside[:, : lost.offset])


def test_what_is_kept_beside_tokens_is_in_the_bytes_of_the_tier(harness: Harness) -> None:
    plain = harness.compress(torch.arange(200))
    harness.tier.worker.drain()
    without = harness.tier.store.usage().frame_bytes
    harness.tier.free(plain)
    beside = sidecar_of(200)
    ids = harness.tier.compress(torch.arange(200), 0, lambda _tokens: False, sidecar=beside)
    harness.tier.worker.drain()
    usage = harness.tier.store.usage()
    assert (usage.frame_bytes, usage.frame_tokens) == (without + beside.nbytes, 200)
    harness.tier.clear()
    assert harness.tier.store.usage().frame_bytes == 0
    with pytest.raises(KeyError):
        harness.tier.sidecars(ids)


@pytest.mark.parametrize("missing", [0, 1])
def test_staging_takes_what_is_kept_beside_tokens_into_account(harness: Harness, missing: int) -> None:
    beside = sidecar_of(1)
    one_token = GEOMETRY.bytes_per_token + MAX_FRAME_OVERHEAD + beside.nbytes
    harness.tier.store.staging_bytes = one_token - missing
    release = threading.Event()
    encode = harness.tier.worker.codec.encode
    harness.tier.worker.codec.encode = lambda *args: (release.wait(30), encode(*args))[1]  # type: ignore[method-assign]
    ids = harness.tier.compress(torch.arange(1), 0, lambda _tokens: False, wait_s=0, sidecar=beside)
    assert (ids is None) == bool(missing)
    assert harness.tier.store.usage().staged_bytes == (0 if missing else one_token)
    release.set()
