"""What gated requests hand to a publisher, what they own of it, and prefixes that come back from there."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from integration.gated_engine import PER_TOKEN, Engine, H, L, Recorder, request
from integration.test_gating import BUDGETS, by_budget, small_window

from sglang_kvtc.eviction.score_codes import decode_scores, encode_scores


def publishing(budget: dict[str, object], **options: int) -> tuple[Engine, Recorder]:
    engine = Engine(budget, **options)
    small_window(engine)
    recorder = Recorder(engine)
    engine.gating.publisher = recorder
    return engine, recorder


def begun(engine: Engine, shared: torch.Tensor | None = None) -> object:
    req = request(shared)
    engine.gating.enter(req, publishes=True)
    engine.begin(req)
    return req


@by_budget
@pytest.mark.parametrize("seed", range(3))
def test_every_own_token_is_published_once_in_order_with_its_scores(budget: dict[str, object], seed: int) -> None:
    """That each is whole when it is published, the recorder checks."""
    rng = random.Random(seed)
    engine, recorder = publishing(budget, interval=6, seed=seed)
    shared = engine.allocator.alloc(11)
    req = begun(engine, shared if seed else None)
    first = req.kv.cache_protected_len
    for _ in range(rng.randint(1, 3)):
        engine.forward([req], [rng.randint(1, 30)])
    for _ in range(rng.randint(0, 40)):
        engine.forward([req])
    own = engine.own(req)
    end = first + len(own) - rng.randint(0, 1)
    start, ids = engine.gating.take_ids(req, end)
    assert (start, len(ids)) == (first, end - first)
    assert bool((np.diff(ids) >= 1).all())
    position = first
    for slots, at, _ in recorder.calls:
        assert at == position
        position += len(slots)
    # An eviction that came before may have needed the token past the end.
    assert position in (end, first + len(own))
    assert torch.equal(torch.cat([slots for slots, _, _ in recorder.calls]), own[: position - first])
    codes = torch.cat([scores for _, _, scores in recorder.calls], dim=1)
    assert codes.dtype == torch.uint8
    assert torch.equal(codes, encode_scores(engine.pool.scores[:, own[: position - first]]))
    assert bool(engine.pool.scores[:, own[: position - first]].all()), "a token was published before it was scored"
    engine.gating.counters.published_tokens = 0
    engine.finish(req)
    # The caller owns what it took; all else was given back.
    assert recorder.live == set(ids.tolist())


def test_ids_past_the_end_are_given_back() -> None:
    engine, recorder = publishing(BUDGETS[0])
    req = begun(engine)
    engine.forward([req], [40])
    assert len(recorder.live) == 40
    start, ids = engine.gating.take_ids(req, 25)
    assert (start, len(ids)) == (0, 25)
    assert recorder.live == set(ids.tolist())
    start, ids = engine.gating.take_ids(req, 25)
    assert len(ids) == 0
    engine.finish(req)
    assert len(recorder.live) == 25


@pytest.mark.parametrize("end", [0, 7, 11])
def test_nothing_of_its_own_before_the_end_means_no_ids(end: int) -> None:
    engine, recorder = publishing(BUDGETS[0])
    req = begun(engine, engine.allocator.alloc(11))
    engine.forward([req], [30])
    _, ids = engine.gating.take_ids(req, end)
    assert len(ids) == 0 and not recorder.live


def test_a_request_that_was_never_evicted_from_is_published_when_it_ends() -> None:
    engine, recorder = publishing({"keep_fraction": 1.0})
    req = begun(engine)
    engine.forward([req], [12])
    for _ in range(3):
        engine.forward([req])
    assert not recorder.calls
    start, ids = engine.gating.take_ids(req, 15)
    assert (start, len(ids), len(recorder.calls)) == (0, 15, 1)
    codes = recorder.calls[0][2]
    assert torch.equal(codes, encode_scores(engine.pool.scores[:, engine.own(req)])) and bool((codes > 0).any())


def test_without_room_it_goes_on_evicting_and_publishes_what_it_has() -> None:
    engine, recorder = publishing(BUDGETS[0])
    recorder.room = 35
    req = begun(engine)
    engine.forward([req], [30])
    engine.forward([req], [20])
    engine.forward([req], [4])
    assert [at for _, at, _ in recorder.calls] == [0]
    assert engine.gating.counters.unpublished_requests == 1
    assert engine.gating.counters.evictions == 3
    start, ids = engine.gating.take_ids(req, 54)
    assert (start, len(ids)) == (0, 30)
    assert recorder.live == set(ids.tolist())


def test_without_room_from_the_start_there_is_nothing_to_own() -> None:
    engine, recorder = publishing(BUDGETS[0])
    recorder.room = 0
    req = begun(engine)
    engine.forward([req], [30])
    _, ids = engine.gating.take_ids(req, 30)
    assert len(ids) == 0 and not recorder.calls


def test_without_a_publisher_there_is_nothing_to_own() -> None:
    engine = Engine(BUDGETS[0])
    req = begun(engine)
    engine.forward([req], [30])
    start, ids = engine.gating.take_ids(req, 30)
    assert (start, len(ids)) == (30, 0)


def test_a_leak_a_retracted_request_gives_back_what_it_published_and_starts_again() -> None:
    engine, recorder = publishing(BUDGETS[0])
    req = begun(engine)
    engine.forward([req], [30])
    assert len(recorder.live) == 30
    engine.finish(req)
    assert not recorder.live
    engine.begin(req)
    engine.forward([req], [21])
    assert [(at, len(slots)) for slots, at, _ in recorder.calls] == [(0, 30), (0, 21)]
    start, ids = engine.gating.take_ids(req, 21)
    assert (start, len(ids)) == (0, 21)
    assert recorder.live == set(ids.tolist())


@pytest.mark.parametrize("has_scores", [True, False])
@pytest.mark.parametrize("num_shared", [0, 9])
def test_a_restored_prefix_is_its_own_scored_and_not_published_again(has_scores: bool, num_shared: int) -> None:
    engine, recorder = publishing(BUDGETS[0])
    shared = engine.allocator.alloc(num_shared) if num_shared else None
    req = request(shared)
    engine.gating.enter(req, publishes=True)
    slots = engine.allocator.alloc(30)
    codes = torch.randint(0, 256, (L, 30, H), generator=torch.Generator().manual_seed(0)).byte()
    engine.gating.restore_into(req, slots, codes if has_scores else None)
    expected = decode_scores(codes, torch.float16) if has_scores else torch.ones(L, 30, H).half()
    assert torch.equal(engine.pool.scores[:, slots], expected)
    assert engine.gating.counters.restored_tokens == 30
    engine.begin(req)
    engine.forward([req], [10])
    assert torch.equal(engine.own(req)[:30], slots)
    assert torch.equal(engine.pool.scores[:, slots], expected)
    # 40 tokens of its own, restored ones among them, are brought under the budget of 40.
    assert int(engine.pool.cells.alive(engine.own(req)).sum()) == 16 * PER_TOKEN
    for _ in range(8):
        engine.forward([req])
    assert [(at, len(new)) for new, at, _ in recorder.calls] == [(num_shared + 30, 10), (num_shared + 40, 8)]
    start, ids = engine.gating.take_ids(req, num_shared + 48)
    assert (start, len(ids)) == (num_shared + 30, 18)
    engine.finish(req)
    assert engine.allocator.available_size() == 200 - num_shared
    assert recorder.live == set(ids.tolist())


def test_tokens_restored_without_scores_outlive_others() -> None:
    engine, _ = publishing({"keep_fraction": 0.5, "sink_tokens": 0, "window_tokens": 0, "min_tokens": 0})
    req = request()
    engine.gating.enter(req, publishes=True)
    slots = engine.allocator.alloc(10)
    engine.gating.restore_into(req, slots, None)
    engine.begin(req)
    engine.forward([req], [10])
    assert bool((engine.pool.scores[:, engine.own(req)[10:]] < 1).all())
    assert torch.equal(
        engine.pool.cells.alive(engine.own(req)), (torch.arange(20) < 10)[None, :, None].expand(L, 20, H)
    )


def test_a_restored_request_that_is_retracted_computes_its_prefix_itself() -> None:
    engine, recorder = publishing(BUDGETS[0])
    req = request()
    engine.gating.enter(req, publishes=True)
    engine.gating.restore_into(req, engine.allocator.alloc(30), None)
    engine.begin(req)
    engine.forward([req], [10])
    engine.finish(req)
    assert engine.allocator.available_size() == 200 and not recorder.live
    engine.begin(req)
    assert req.kv.kv_allocated_len == 0
    engine.forward([req], [42])
    start, ids = engine.gating.take_ids(req, 42)
    assert (start, len(ids)) == (0, 42)
    assert recorder.calls[-1][1] == 0
