"""The frame store: ids, byte accounting, and chunks that die while somebody still refers to them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.tier.state import ChunkState, move
from sglang_kvtc.tier.store import FrameStore, Shortage, StoredChunk
from sglang_kvtc.types import KVChunk


def kv(num_tokens: int, start_position: int = 0) -> KVChunk:
    return KVChunk(torch.zeros(2, num_tokens, 1, 4), torch.zeros(2, num_tokens, 1, 4), start_position)


def put(store: FrameStore, num_tokens: int, num_bytes: int = 100, start_position: int = 0) -> StoredChunk:
    assert store.reserve(num_bytes, timeout_s=0) is None
    return store.add(kv(num_tokens, start_position), FrameKind.CODED, num_bytes)


def ids_of(chunk: StoredChunk) -> np.ndarray:
    return np.arange(chunk.first_id, chunk.first_id + chunk.num_tokens)


def test_ids_are_never_reused() -> None:
    store = FrameStore(10_000, 1_000)
    first = put(store, 5)
    store.free(ids_of(first))
    assert put(store, 5).first_id == 5


def test_a_request_over_two_chunks_is_cut_at_their_border() -> None:
    store = FrameStore(10_000, 1_000)
    a, b = put(store, 5), put(store, 7)
    pieces = list(store.segments(np.concatenate([ids_of(a)[2:], ids_of(b)[:3]])))
    assert [(p.chunk, p.tokens.start, p.tokens.stop, p.offset) for p in pieces] == [(a, 2, 5, 0), (b, 0, 3, 3)]


def test_a_request_that_skips_ids_is_cut_at_the_hole() -> None:
    store = FrameStore(10_000, 1_000)
    a = put(store, 10)
    pieces = list(store.segments(np.array([0, 1, 5, 6])))
    assert [(p.chunk, p.tokens.start, p.tokens.stop, p.offset) for p in pieces] == [(a, 0, 2, 0), (a, 5, 7, 2)]


def test_bytes_of_a_chunk_are_returned_only_with_its_last_token() -> None:
    store = FrameStore(10_000, 1_000)
    chunk = put(store, 10)
    assert store.commit(chunk, b"x" * 60)
    store.free(ids_of(chunk)[:4])
    assert store.usage().frame_bytes == 60
    store.free(ids_of(chunk)[4:])
    usage = store.usage()
    assert (usage.frame_bytes, usage.frame_tokens, usage.live_tokens, usage.frames) == (0, 0, 0, 0)


def test_a_leak_01_freeing_ids_twice_raises_and_changes_nothing() -> None:
    store = FrameStore(10_000, 1_000)
    chunk = put(store, 10)
    store.free(ids_of(chunk)[:4])
    with pytest.raises(KeyError, match="freed twice"):
        store.free(ids_of(chunk)[3:6])
    assert store.usage().live_tokens == 6


def test_unknown_ids_raise() -> None:
    store = FrameStore(10_000, 1_000)
    put(store, 3)
    with pytest.raises(KeyError, match="id 3 is not stored"):
        store.free(np.array([3]))


def test_a_hit_02_a_freed_chunk_is_discarded_when_the_encoder_finishes_it() -> None:
    store = FrameStore(10_000, 1_000)
    chunk = put(store, 10)
    store.free(ids_of(chunk))
    assert not store.commit(chunk, b"frame")
    usage = store.usage()
    assert (usage.frame_bytes, usage.staged_bytes, usage.staged_chunks) == (0, 0, 0)


def test_a_failed_chunk_keeps_its_ids_and_gives_its_bytes_back() -> None:
    store = FrameStore(10_000, 1_000)
    chunk = put(store, 10)
    store.invalidate(chunk)
    assert chunk.state is ChunkState.DEAD and store.usage().staged_bytes == 0
    assert store.free(ids_of(chunk)) == 10


def test_staging_waits_for_the_encoder_and_then_goes_on() -> None:
    store = FrameStore(10_000, 150)
    chunk = put(store, 10)
    threading.Timer(0.1, store.commit, (chunk, b"small")).start()
    started = time.monotonic()
    assert store.reserve(100, timeout_s=30) is None
    assert time.monotonic() - started < 20


def test_staging_gives_up_when_the_encoder_does_not_come() -> None:
    store = FrameStore(10_000, 150)
    put(store, 10)
    assert store.reserve(100, timeout_s=0.01) is Shortage.STAGING
    assert store.usage().staged_bytes == 100


def test_frames_and_raw_copies_together_never_exceed_the_arena() -> None:
    store = FrameStore(250, 1_000)
    first = put(store, 10)
    put(store, 10)
    assert store.reserve(100, timeout_s=0) is Shortage.ARENA
    store.commit(first, b"x" * 40)
    assert store.reserve(100, timeout_s=0) is None


def test_a_full_arena_with_nothing_staged_fails_at_once() -> None:
    store = FrameStore(100, 1_000)
    chunk = put(store, 10)
    store.commit(chunk, b"x" * 100)
    assert store.reserve(1, timeout_s=60) is Shortage.ARENA


def test_a_flush_forgets_everything_and_late_frames_are_discarded() -> None:
    store = FrameStore(10_000, 1_000)
    staged, stored = put(store, 10), put(store, 10)
    store.commit(stored, b"frame")
    store.clear()
    assert not store.commit(staged, b"late")
    usage = store.usage()
    assert (usage.live_tokens, usage.frame_bytes, usage.staged_bytes, usage.frames) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("current", "to"),
    [
        (ChunkState.STORED, ChunkState.STAGED),
        (ChunkState.DEAD, ChunkState.STORED),
        (ChunkState.STORED, ChunkState.STORED),
    ],
)
def test_illegal_state_moves_raise(current: ChunkState, to: ChunkState) -> None:
    with pytest.raises(RuntimeError, match="illegal chunk state change"):
        move(current, to)


@given(st.lists(st.tuples(st.sampled_from(["put", "commit", "free", "fail"]), st.integers(0, 1 << 16)), max_size=60))
def test_accounting_is_exact_after_any_operations(steps: list[tuple[str, int]]) -> None:
    store = FrameStore(1 << 30, 1 << 30)
    staged: list[StoredChunk] = []
    live: dict[StoredChunk, set[int]] = {}
    sizes: dict[StoredChunk, int] = {}
    for action, pick in steps:
        if action == "put":
            chunk = put(store, 1 + pick % 9)
            staged.append(chunk)
            live[chunk] = set(ids_of(chunk).tolist())
        elif action in ("commit", "fail") and staged:
            chunk = staged.pop(pick % len(staged))
            if action == "commit":
                stored = store.commit(chunk, b"x" * (pick % 50))
                assert stored == bool(live[chunk])
                if stored:
                    sizes[chunk] = pick % 50
            else:
                store.invalidate(chunk)
        elif action == "free" and any(live.values()):
            chunk = [c for c, ids in live.items() if ids][pick % sum(bool(ids) for ids in live.values())]
            gone = sorted(live[chunk])[: 1 + pick % len(live[chunk])]
            store.free(np.array(gone))
            live[chunk] -= set(gone)
            if not live[chunk]:
                sizes.pop(chunk, None)
    usage = store.usage()
    assert usage.live_tokens == sum(map(len, live.values()))
    assert usage.frame_bytes == sum(sizes.values())
    assert usage.frame_tokens == sum(chunk.num_tokens for chunk in sizes)
    assert (usage.staged_chunks, usage.staged_bytes) == (len(staged), 100 * len(staged))


def test_a_sidecar_is_counted_with_its_frame_until_the_last_token_is_freed() -> None:
    store = FrameStore(10_000, 1_000)
    assert store.reserve(200, timeout_s=0) is None
    beside = torch.zeros(3, 10, 2, dtype=torch.uint8)
    chunk = store.add(kv(10), FrameKind.CODED, 200, beside)
    assert (chunk.stored_bytes, store.usage().frame_bytes) == (0, 0)
    assert store.commit(chunk, b"x" * 40)
    assert (chunk.stored_bytes, store.usage().frame_bytes) == (100, 100)
    assert store.usage().frame_tokens == 10
    store.free(ids_of(chunk)[:9])
    assert store.usage().frame_bytes == 100 and chunk.sidecar is beside
    store.free(ids_of(chunk)[9:])
    assert store.usage().frame_bytes == 0 and chunk.sidecar is None


@pytest.mark.parametrize("is_coded", [True, False])
@pytest.mark.parametrize("end", ["invalidate", "clear", "free"])
def test_a_sidecar_goes_with_its_chunk_however_that_ends(end: str, is_coded: bool) -> None:
    store = FrameStore(10_000, 1_000)
    assert store.reserve(200, timeout_s=0) is None
    chunk = store.add(kv(10), FrameKind.CODED, 200, torch.zeros(3, 10, 2, dtype=torch.uint8))
    if is_coded:
        store.commit(chunk, b"x" * 40)
    match end:
        case "invalidate":
            store.invalidate(chunk)
        case "clear":
            store.clear()
        case _:
            store.free(ids_of(chunk))
    assert store.commit(chunk, b"late") is False
    usage = store.usage()
    assert (usage.frame_bytes, usage.frame_tokens, usage.staged_bytes, usage.staged_chunks) == (0, 0, 0, 0)
    assert chunk.sidecar is None and chunk.stored_bytes == 0
