"""What admission believes against what simulated requests really hold."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integration.gated_engine import PER_TOKEN, Engine, cell_allocator, cell_pool, request
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_kvtc.integration.admission import CellPrefillBudget, check_prefill, running_growth

SIZE = 200


def random_budget(rng: random.Random, window: int) -> dict[str, Any]:
    size = rng.choice([{"keep_fraction": rng.randint(15, 100) / 100}, {"keep_tokens": rng.randint(5, 60)}])
    return {
        **size,
        "scope": rng.choice(["global", "layer", "head"]),
        "sink_tokens": rng.randint(0, 6),
        "window_tokens": window,
        "min_tokens": rng.randint(0, 9),
    }


def peak_of_a_life(engine: Engine, num_prompt: int, num_new: int, chunk: int) -> float:
    """Most tokens of memory held at any time; growth estimates are checked on the way."""
    req = request()
    gating = engine.gating
    gating.enter(req, publishes=False)
    engine.begin(req)
    assert gating.growth_tokens(req, num_new) == num_new
    left = num_prompt
    while left:
        engine.forward([req], [min(chunk, left)])
        left -= min(chunk, left)
    for step in range(num_new):
        growth = gating.growth_tokens(req, num_new - step)
        assert 0 <= growth <= num_new - step
        engine.forward([req])
    assert gating.growth_tokens(req, 0) == 0
    return engine.peak_used / PER_TOKEN


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_peak_tokens_is_never_less_than_a_request_holds(seed: int) -> None:
    """Both windows are alike, as the usual ones are for most contexts, and a chunk is at least an interval."""
    rng = random.Random(seed)
    window = rng.randint(0, 20)
    interval = rng.randint(1, 12)
    engine = Engine(random_budget(rng, window), size=SIZE, interval=interval, seed=seed)
    engine.gating.decode_budget = msgspec.structs.replace(engine.gating.decode_budget, window_tokens=window)
    num_prompt, num_new = rng.randint(1, 120), rng.randint(0, 40)
    chunk = rng.randint(interval, 140)
    estimate = engine.gating.peak_tokens(num_prompt, num_new, chunk)
    assert math.ceil(peak_of_a_life(engine, num_prompt, num_new, chunk)) <= estimate <= num_prompt + num_new


@pytest.mark.parametrize(
    ("num_prompt", "num_new", "chunk"),
    [(100, 8, 100), (100, 8, 4), (40, 20, 100)],
    ids=["one chunk", "chunks below an interval", "a prompt inside its window"],
)
def test_peak_tokens_knows_of_a_prompt_window_wider_than_that_of_generation(
    num_prompt: int, num_new: int, chunk: int
) -> None:
    """Window "auto" is 4,096 tokens from 16,384 on, and 128 while a request generates."""
    engine = Engine(
        {"keep_fraction": 0.2, "sink_tokens": 0, "window_tokens": 40, "min_tokens": 0}, size=SIZE, interval=16
    )
    engine.gating.decode_budget = msgspec.structs.replace(engine.gating.decode_budget, window_tokens=4)
    estimate = engine.gating.peak_tokens(num_prompt, num_new, chunk)
    assert peak_of_a_life(engine, num_prompt, num_new, chunk) <= estimate <= num_prompt + num_new


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(0, 50_000), st.integers(0, 50_000), st.integers(1, 20_000))
def test_peak_tokens_never_exceeds_all_tokens(seed: int, num_prompt: int, num_new: int, chunk: int) -> None:
    engine = Engine(random_budget(random.Random(seed), 128), size=4)
    assert 0 <= engine.gating.peak_tokens(num_prompt, num_new, chunk) <= num_prompt + num_new


def test_growth_is_what_a_request_comes_to_hold() -> None:
    """The estimate reaches the true growth and exceeds it by no more than lengths are rounded up."""
    engine = Engine(
        {"keep_fraction": 0.5, "sink_tokens": 2, "window_tokens": 4, "min_tokens": 0}, size=SIZE, interval=8
    )
    engine.gating.decode_budget = msgspec.structs.replace(engine.gating.decode_budget, window_tokens=4)
    req = request()
    engine.gating.enter(req, publishes=False)
    engine.begin(req)
    engine.forward([req], [100])
    held = engine.pool.cells.used_cells
    estimate = engine.gating.growth_tokens(req, 64)
    engine.peak_used = 0
    for _ in range(64):
        engine.forward([req])
    growth = (engine.peak_used - held) / PER_TOKEN
    assert growth <= estimate <= growth + 16


def test_growth_is_not_understated_after_an_eviction_that_found_nothing_to_evict() -> None:
    """The window of generation, 128, spans all 48 tokens, of which 20 are held."""
    engine = Engine(
        {"keep_fraction": 0.3, "sink_tokens": 0, "window_tokens": 4, "min_tokens": 0}, size=SIZE, interval=8
    )
    req = request()
    engine.gating.enter(req, publishes=False)
    engine.begin(req)
    engine.forward([req], [40])
    for _ in range(8):
        engine.forward([req])
    held = engine.pool.cells.used_cells
    estimate = engine.gating.growth_tokens(req, 100)
    for _ in range(100):
        engine.forward([req])
    assert (engine.peak_used - held) / PER_TOKEN <= estimate


def tree(evictable: int = 0) -> Any:
    return SimpleNamespace(supports_mamba=lambda: False, evictable_size=lambda: evictable)


@pytest.mark.parametrize(
    ("taken", "evictable", "promised", "limit", "expected"),
    [
        (0, 0, 0, 16, 16),
        (30, 0, 0, 16, 10),
        (30, 3, 0, 16, 13),
        (30, 0, 6, 16, 4),
        (30, 0, 10, 16, 10),
        (30, 0, 500, 16, 10),
        (39, 0, 500, 16, 1),
        (40, 0, 0, 16, None),
        (40, 0, 500, 16, None),
        (40, 5, 500, 16, 5),
        (0, 0, 500, 16, 16),
        (0, 0, 0, 0, None),
    ],
)
def test_the_chunk_of_a_prompt_takes_what_is_there_and_waits_where_nothing_is(
    taken: int, evictable: int, promised: int, limit: int, expected: int | None
) -> None:
    """promised: to running requests. SGLang's own budget hands out the limit where nothing is left."""
    allocator = cell_allocator(cell_pool(40))
    if taken:
        assert allocator.alloc(taken) is not None
    budget = CellPrefillBudget(allocator, tree(evictable))
    budget.total_offset += promised
    assert budget.available_chunk_tokens(limit) == expected


def test_a_chunk_leaves_room_for_the_decode_tokens_of_its_own_pass() -> None:
    """Of --enable-mixed-chunk: they are allocated after it."""
    allocator = cell_allocator(cell_pool(40))
    allocator.alloc(30)
    budget = CellPrefillBudget(allocator, tree(), num_mixed_decode_tokens=4)
    budget.total_offset += 500
    assert budget.available_chunk_tokens(16) == 6


class Adder:
    """SGLang's PrefillAdder as far as the hook looks at it, over SGLang's own budget."""

    def __init__(self, engine: Engine, chunk: int | None) -> None:
        self.token_to_kv_pool_allocator = engine.allocator
        self.memory_budget = engine.allocator.create_prefill_budget(tree())
        self.rem_chunk_tokens = chunk

    def _check_prefill_budget(self, req: Any, **demand: int | None) -> tuple[bool, int | None]:
        assert isinstance(self.memory_budget, PrefillBudget)
        return self.memory_budget.check_prefill(
            extend_input_len=demand["extend_input_len"],
            total_tokens=demand["total_tokens"],
            max_new_tokens=0,
            input_tokens=len(req.full_untruncated_fill_ids),
            swa_host_hit_length=0,
            chunk_limit=demand["chunk_limit"],
        )

    def admits(self, req: Any, num_new: int, host_hit: int = 0) -> bool:
        """As `add_one_req` asks, a token on top for the page."""
        whole = len(req.full_untruncated_fill_ids) - req.prefix_len
        admitted, limit = check_prefill(
            Adder._check_prefill_budget,
            self,
            req,
            extend_input_len=whole - host_hit,
            total_tokens=whole + num_new + 1,
            swa_host_hit_length=0,
            chunk_limit=self.rem_chunk_tokens,
        )
        assert limit == (self.rem_chunk_tokens if admitted else None)
        return admitted


def waiting(engine: Engine, num_tokens: int, prefix: int = 0, *, is_gated: bool = True) -> Any:
    req = request(custom=None if is_gated else {"kvtc_gated": False})
    req.full_untruncated_fill_ids = list(range(num_tokens))
    req.prefix_len = prefix
    engine.gating.enter(req, publishes=True)
    return req


def admitting_engine(free: int) -> Engine:
    """A quarter stays, in whole numbers of 16 tokens; `free` tokens of memory are left."""
    engine = Engine(
        {"keep_fraction": 0.25, "sink_tokens": 0, "window_tokens": 0, "min_tokens": 0}, size=300, interval=8
    )
    engine.gating.decode_budget = msgspec.structs.replace(engine.gating.decode_budget, window_tokens=0)
    if free < 300:
        engine.allocator.alloc(300 - free)
    return engine


def admits(free: int, *, is_gated: bool, chunk: int | None = 32, host_hit: int = 0, prefix: int = 0) -> bool:
    engine = admitting_engine(free)
    engine.gating.chunk_tokens = chunk
    req = waiting(engine, 160, prefix, is_gated=is_gated)
    return Adder(engine, chunk).admits(req, num_new=31, host_hit=host_hit)


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        # 160 tokens, 31 new ones and one for the page; SGLang admits what is strictly less than what is left.
        ({"is_gated": False}, 192),
        ({"is_gated": False, "host_hit": 64}, 192),
        ({"is_gated": False, "prefix": 64}, 128),
        # A quarter of 160 and a chunk of 32; more than a quarter of 192 and an interval.
        ({"is_gated": True}, 72),
        # Without chunks the whole prompt is there at once.
        ({"is_gated": True, "chunk": None}, 160),
        # A prefix on the device is no part of it.
        ({"is_gated": True, "prefix": 64}, 24 + 32),
        # One to be restored stays whole beside a quarter of the rest.
        ({"is_gated": True, "host_hit": 64}, 64 + 24 + 32),
    ],
)
def test_a_request_is_admitted_if_its_peak_fits(options: dict[str, Any], needed: int) -> None:
    assert not admits(needed, **options)
    assert admits(needed + 1, **options)


def test_what_chunks_follow_is_not_read_off_the_rest_of_this_pass() -> None:
    """Another prompt left 2 tokens of this pass's chunk of 32; the chunks that follow are whole ones."""
    engine = admitting_engine(free=60)
    engine.gating.chunk_tokens = 32
    adder = Adder(engine, chunk=2)
    assert not adder.admits(waiting(engine, 160), num_new=31)


def test_without_gating_the_hooks_change_nothing() -> None:
    engine = admitting_engine(free=100)
    engine.allocator.gating = None
    adder = SimpleNamespace(token_to_kv_pool_allocator=engine.allocator)
    seen: list[Any] = []
    check_prefill(lambda _adder, req, **demand: seen.append((req, demand)), adder, "req", total_tokens=5)
    assert seen == [("req", {"total_tokens": 5})]
    assert running_growth(lambda _adder, _req: 7.5, adder, request()) == 7.5
    stock = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace())
    assert running_growth(lambda _adder, _req: 7.5, stock, request()) == 7.5


def test_running_requests_are_charged_by_their_growth() -> None:
    engine = admitting_engine(free=300)
    req, whole = waiting(engine, 100), waiting(engine, 100, is_gated=False)
    adder = SimpleNamespace(token_to_kv_pool_allocator=engine.allocator)
    for each in (req, whole):
        engine.begin(each)
        engine.forward([each], [100])
    assert running_growth(lambda _adder, _req: 80.0, adder, whole) == 80.0
    # A quarter of 192 and an interval, of which a quarter of 100 is there.
    assert running_growth(lambda _adder, _req: 80.0, adder, req) == 48 + 8 - 25
