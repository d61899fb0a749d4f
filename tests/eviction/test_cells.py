from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from eviction.plain_cells import PlainPool
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_kvtc.errors import CellPoolError, ConfigError, KVTCError
from sglang_kvtc.eviction import cells
from sglang_kvtc.eviction.budget import Budget, Scope
from sglang_kvtc.eviction.cells import CellPool
from sglang_kvtc.eviction.select import keep_mask

L, H = 2, 3


def slots_of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def pool_for(num_tokens: int, **options: Any) -> CellPool:
    """Room for `num_tokens` whole tokens, and twice as many slots."""
    return CellPool(L, H, 2 * num_tokens + 1, (num_tokens + 1) * L * H, **options)


def state(pool: CellPool) -> tuple[torch.Tensor, int, int, int]:
    return pool.table.clone(), pool.free_cells, pool.used_cells, pool.pending_cells


def assert_unchanged(pool: CellPool, before: tuple[torch.Tensor, int, int, int]) -> None:
    assert torch.equal(pool.table, before[0])
    assert (pool.free_cells, pool.used_cells, pool.pending_cells) == before[1:]
    pool.check()


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([1, 7, 1 << 16]))
def test_any_sequence_of_calls_keeps_the_books_of_a_plain_pool(seed: int, overlap: bool, search_cells: int) -> None:
    rng = random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    pool, plain = pool_for(14, search_cells=search_cells), PlainPool(L, H, 15 * L * H)
    step = 0
    for _ in range(40):
        owned, spare = sorted(plain.slots), sorted(set(range(1, pool.num_slots)) - plain.slots)
        if overlap and rng.random() < 0.4:
            pool.launch(step)
            plain.launched = step
            step += 1
        match rng.choice(["prompt", "decode", "evict", "free", "advance", "defragment"]):
            case "prompt" | "decode" as kind:
                slots = rng.sample(spare, min(len(spare), rng.randint(0, 6)))
                assert pool.allocate(slots_of(*slots), as_runs=kind == "prompt") == plain.allocate(slots)
            case "evict":
                slots = rng.sample(owned, rng.randint(0, len(owned)))
                keep = torch.rand(L, len(slots), H, generator=noise) < rng.random()
                known = int((pool.alive(slots_of(*slots)) & ~keep).sum()) if rng.random() < 0.5 else None
                assert pool.evict(slots_of(*slots), keep, known) == plain.evict(slots, keep)
                assert not (pool.alive(slots_of(*slots)) & ~keep).any()
            case "free":
                slots = rng.sample(owned, rng.randint(0, min(3, len(owned))))
                known = int(pool.alive(slots_of(*slots)).sum()) if rng.random() < 0.5 else None
                assert pool.free(slots_of(*slots), known) == plain.free(slots)
            case "advance":
                done = rng.randint(-1, step)
                pool.advance(done)
                plain.advance(done)
            case _:
                pool.defragment()
        plain.check(pool)
    pool.fence()
    pool.free(slots_of(*plain.slots))
    pool.fence()
    pool.check()
    assert pool.free_tokens == 14
    assert pool.used_cells == pool.pending_cells == 0


def test_a_whole_prompt_lies_in_one_run_per_head() -> None:
    pool = pool_for(100)
    slots = slots_of(*random.Random(0).sample(range(1, 201), 40))
    assert pool.allocate(slots)
    starts = pool.run_starts(slots)
    for layer in range(L):
        for head in range(H):
            first = int(starts[layer, head])
            assert pool.table[layer, slots, head].tolist() == list(range(first, first + 40))
    keep = torch.ones(L, 40, H, dtype=torch.bool)
    keep[1, 5, 2] = False
    pool.evict(slots, keep)
    starts[1, 2] = -1
    assert torch.equal(pool.run_starts(slots), starts)


def fragmented(rng: random.Random, num_tokens: int) -> tuple[CellPool, list[int]]:
    """A pool with free runs of random lengths; and their lengths, found by walking over the cells."""
    pool = pool_for(num_tokens)
    every = slots_of(*range(1, num_tokens + 1))
    pool.allocate(every)
    is_free = [rng.random() < 0.3 for _ in range(pool.num_cells)]
    position = 0
    while position < pool.num_cells:
        length = rng.randint(1, 12)
        is_free[position : position + length] = [rng.random() < 0.5] * length
        position += length
    is_free = is_free[: pool.num_cells]
    pool.evict(every, ~torch.tensor(is_free)[pool.table[:, every].long()])
    in_use = set(pool.table[pool.table >= 0].tolist())
    lengths, length = [], 0
    for cell in range(pool.num_cells + 1):
        if cell < pool.num_cells and cell not in in_use:
            length += 1
        elif length:
            lengths.append(length)
            length = 0
    return pool, lengths


@pytest.mark.parametrize("seed", range(20))
def test_under_fragmentation_as_many_heads_as_fit_get_runs(seed: int) -> None:
    rng = random.Random(seed)
    pool, lengths = fragmented(rng, 60)
    num_tokens = rng.randint(4, 20)
    assert sum(lengths) == pool.free_cells >= num_tokens * L * H
    slots = slots_of(*rng.sample(range(61, 121), num_tokens))
    fitting = min(L * H, sum(length // num_tokens for length in lengths))
    assert pool.allocate(slots)
    assert int((pool.run_starts(slots) >= 0).sum()) == fitting
    for layer in range(L):
        for head in range(H):
            found = pool.table[layer, slots, head].tolist()
            assert found == sorted(found)
    pool.check()


def test_the_search_that_suits_a_gpu_finds_the_same_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never looks whether cells lie well as they are."""
    monkeypatch.setattr(cells, "_are_runs", lambda found: False)
    pool = pool_for(100)
    for first in range(1, 100, 20):
        slots = slots_of(*range(first, first + 20))
        assert pool.allocate(slots)
        assert bool((pool.run_starts(slots) >= 0).all())
        pool.check()


def test_runs_are_found_again_after_a_long_random_load() -> None:
    rng, noise = random.Random(5), torch.Generator().manual_seed(5)
    pool = pool_for(200)
    live: list[list[int]] = []
    spare = list(range(1, pool.num_slots))
    for _ in range(400):
        if rng.random() < 0.5:
            slots = [spare.pop() for _ in range(rng.randint(1, 30))]
            if pool.allocate(slots_of(*slots), as_runs=rng.random() < 0.7):
                live.append(slots)
            else:
                spare += slots
        elif live:
            slots = live.pop(rng.randrange(len(live)))
            pool.evict(slots_of(*slots), torch.rand(L, len(slots), H, generator=noise) < 0.4)
            pool.free(slots_of(*slots))
            spare += slots
        pool.check()
    for slots in live:
        pool.free(slots_of(*slots))
    prompt = slots_of(*range(1, 201))
    assert pool.allocate(prompt)
    assert bool((pool.run_starts(prompt) >= 0).all())


def test_b_ev_18_too_few_cells_change_nothing_and_eviction_works_in_a_full_pool() -> None:
    pool = pool_for(10)
    slots = slots_of(*range(1, 11))
    assert pool.allocate(slots)
    before = state(pool)
    assert pool.free_cells == 0
    assert not pool.allocate(slots_of(11))
    assert not pool.allocate(slots_of(11, 12), as_runs=False)
    assert_unchanged(pool, before)

    keep = torch.ones(L, 10, H, dtype=torch.bool)
    keep[0, :5] = False
    assert pool.evict(slots, keep) == 15
    assert (pool.free_cells, pool.free_tokens) == (15, 2)
    before = state(pool)
    assert not pool.allocate(slots_of(11, 12, 13))
    assert_unchanged(pool, before)
    assert pool.allocate(slots_of(11, 12))
    pool.check()


@pytest.mark.parametrize("scope", Scope)
def test_b_ev_07_evicted_pairs_become_tokens_that_fit(scope: Scope) -> None:
    pool = pool_for(200)
    slots = slots_of(*range(1, 201))
    pool.allocate(slots)
    scores = torch.rand(L, 200, H, generator=torch.Generator().manual_seed(1))
    budget = Budget(keep_fraction=0.3, scope=scope, window_tokens=20)
    keep = keep_mask(scores, budget, pool.alive(slots))
    freed = 200 * L * H - budget.target_pairs(L, 200, H)
    assert pool.evict(slots, keep, freed) == freed
    assert pool.free_tokens == 140
    assert pool.allocate(slots_of(*range(201, 341)))
    pool.check()


def test_evicted_pairs_neither_come_back_nor_count_twice() -> None:
    pool = pool_for(10)
    slots = slots_of(4, 2, 9)
    pool.allocate(slots)
    keep = torch.rand(L, 3, H, generator=torch.Generator().manual_seed(2)) < 0.5
    freed = int((~keep).sum())
    assert pool.evict(slots, keep) == freed
    table = pool.table.clone()
    assert pool.evict(slots, keep) == 0
    assert pool.evict(slots, torch.ones_like(keep)) == 0
    assert torch.equal(pool.table, table)
    assert torch.equal(pool.alive(slots), keep)
    assert pool.evict(slots, torch.zeros_like(keep)) == 3 * L * H - freed
    assert pool.free(slots) == 0
    assert pool.allocate(slots)
    assert bool(pool.alive(slots).all())


def test_cells_wait_for_the_last_step_that_may_read_them() -> None:
    pool = pool_for(4)
    first, second = slots_of(1, 2), slots_of(3, 4)
    pool.allocate(first)
    pool.allocate(second)
    pool.launch(7)
    held = pool.table[:, first].clone()
    assert pool.free(first) == 2 * L * H
    assert (pool.free_cells, pool.pending_cells, pool.used_cells) == (0, 2 * L * H, 2 * L * H)
    assert not pool.allocate(slots_of(5))
    pool.launch(8)
    assert pool.evict(second, torch.zeros(L, 2, H, dtype=torch.bool)) == 2 * L * H
    pool.check()
    pool.advance(6)
    assert pool.free_cells == 0
    pool.advance(7)
    assert (pool.free_cells, pool.pending_cells) == (2 * L * H, 2 * L * H)
    assert pool.allocate(slots_of(5, 6))
    assert set(pool.table[:, slots_of(5, 6)].flatten().tolist()) == set(held.flatten().tolist())
    pool.fence()
    assert pool.pending_cells == 0
    pool.free(slots_of(5, 6))
    assert pool.free_tokens == 4
    with pytest.raises(CellPoolError, match="step 8 was launched after step 8: number steps in rising order"):
        pool.launch(8)


@pytest.mark.parametrize("validate", [True, False])
def test_b_ev_17_the_padding_slot_shares_no_cell_with_live_pairs(validate: bool) -> None:
    pool = pool_for(20, validate=validate)
    padding = pool.table[:, 0].clone()
    assert bool(pool.alive(slots_of(0)).all())
    for _ in range(5):
        pool.allocate(slots_of(*range(1, 21)))
        assert not set(pool.table[:, 1:].flatten().tolist()) & set(padding.flatten().tolist())
        pool.evict(slots_of(*range(1, 21)), torch.zeros(L, 20, H, dtype=torch.bool))
        pool.free(slots_of(*range(1, 21)))
    assert torch.equal(pool.table[:, 0], padding)
    assert padding.flatten().unique().numel() == L * H


@pytest.mark.parametrize("call", ["allocate", "evict", "free"])
def test_b_ev_17_calls_for_the_padding_slot_are_refused(call: str) -> None:
    pool = pool_for(3)
    before = state(pool)
    arguments = (torch.zeros(L, 1, H, dtype=torch.bool),) if call == "evict" else ()
    with pytest.raises(CellPoolError, match=r"slot 0 is not one of 1 to 6: .* padding slot 0"):
        getattr(pool, call)(slots_of(0), *arguments)
    assert_unchanged(pool, before)


def test_wrong_slots_are_named_and_change_nothing() -> None:
    pool = pool_for(5)
    pool.allocate(slots_of(1, 2))
    pool.allocate(slots_of(3))
    pool.free(slots_of(3))
    before = state(pool)
    keep = torch.zeros(L, 2, H, dtype=torch.bool)
    calls: list[tuple[Any, tuple[Any, ...], str]] = [
        (pool.allocate, (slots_of(4, 2),), "slot 2 is allocated already: free it"),
        (pool.allocate, (slots_of(4, 4),), "slot 4 is given twice"),
        (pool.allocate, (slots_of(4, 11),), "slot 11 is not one of 1 to 10"),
        (pool.free, (slots_of(1, 3),), r"slot 3 is not allocated \(freed twice\?\)"),
        (pool.free, (slots_of(2, 2),), "slot 2 is given twice"),
        (pool.free, (slots_of(-1),), "slot -1 is not one of"),
        (pool.free, (slots_of(1, 2), 11), "num_freed is 11 but 12 cells would be freed"),
        (pool.evict, (slots_of(2, 3), keep), "slot 3 is not allocated"),
        (pool.evict, (slots_of(1, 1), keep), "slot 1 is given twice"),
        (pool.evict, (slots_of(1, 2), keep, 13), "num_freed is 13 but 12"),
        (pool.evict, (slots_of(1), keep), r"keep is torch.bool\[2, 2, 3\]: expected bool\[2, 1, 3\]"),
        (pool.evict, (slots_of(1, 2), keep.float()), "keep is torch.float32"),
        (pool.free, (slots_of(1).int(),), r"slots are torch.int32\[1\]: expected int64"),
    ]
    for call, arguments, message in calls:
        with pytest.raises(KVTCError, match=message):
            call(*arguments)
        assert_unchanged(pool, before)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 2, 10), "0 layers"),
        ((1, 1, 1, 10), "1 slots"),
        ((2, 3, 10, 11), "11 cells: expected at least 12"),
        ((1, 1, 2, 1 << 31), r"less than 2\*\*31"),
    ],
)
def test_sizes_that_make_no_pool_are_refused(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CellPool(*sizes)


@pytest.mark.parametrize("fault", ["shared", "lost", "padding", "orphan", "counter"])
def test_check_finds_corrupt_books(fault: str) -> None:
    pool = pool_for(5)
    pool.allocate(slots_of(1, 2))
    match fault:
        case "shared":
            pool.table[0, 1, 0] = pool.table[0, 2, 0]
        case "lost":
            pool.table[0, 1, 0] = -1
        case "padding":
            pool.table[0, 0, 0] = 9
        case "orphan":
            pool.table[:, [1, 5]] = pool.table[:, [5, 1]]
        case _:
            pool._used += 1
    with pytest.raises(CellPoolError, match="the cell pool is corrupt"):
        pool.check()


def elements_touched(pool: CellPool) -> Counter[str]:
    """Elements of all results of torch operations in one decode step, counted by a dispatch mode."""
    seen: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            is_view = any(view in str(func) for view in ("slice", "select", "view", "transpose", "index_put_", "alias"))
            if isinstance(result, torch.Tensor) and not is_view:
                seen["operations"] += 1
                seen["elements"] += result.numel()
            return result

    with Counting():
        assert pool.allocate(slots_of(1, 2, 3, 4), as_runs=False)
        pool.evict(slots_of(1, 2, 3, 4), torch.zeros(L, 4, H, dtype=torch.bool))
        pool.free(slots_of(1, 2, 3, 4))
    return seen


def test_a_decode_step_costs_the_same_in_a_pool_of_any_size_and_history() -> None:
    costs = []
    for num_tokens in (50, 5000):
        pool = pool_for(num_tokens)
        pool.allocate(slots_of(*range(5, num_tokens - 4)))
        keep = torch.rand(L, num_tokens - 9, H, generator=torch.Generator().manual_seed(3)) < 0.5
        pool.evict(slots_of(*range(5, num_tokens - 4)), keep)
        costs.append(elements_touched(pool))
    assert costs[0] == costs[1]
    assert costs[0]["elements"] < 40 * 4 * L * H


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_reset_pool_is_a_new_one(is_under_way: bool) -> None:
    pool, new = pool_for(10), pool_for(10)
    pool.allocate(slots_of(1, 2, 3, 9))
    pool.allocate(slots_of(4, 5), as_runs=False)
    if is_under_way:
        pool.launch(3)
    pool.evict(slots_of(2, 9), torch.zeros(L, 2, H, dtype=torch.bool))
    pool.free(slots_of(1))
    pool.reset()
    assert_unchanged(pool, state(new))
    for each in (pool, new):
        assert each.allocate(slots_of(*range(1, 11)))
    assert_unchanged(pool, state(new))
    pool.advance(3)
    assert_unchanged(pool, state(new))
