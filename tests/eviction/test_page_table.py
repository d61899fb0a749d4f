from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from eviction.plain_cells import masked_dense_attention, plain_lists
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvtc.errors import CellPoolError, ConfigError, KVTCError
from sglang_kvtc.eviction.cells import CellPool
from sglang_kvtc.eviction.page_table import LEAST_ROOM, PageTables

L, H = 2, 3


def slots_of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def pool_for(num_tokens: int) -> CellPool:
    return CellPool(L, H, 2 * num_tokens + 1, (num_tokens + 1) * L * H)


def assert_batch(
    tables: PageTables,
    pool: CellPool,
    batch: list[int],
    slots: dict[int, list[int]],
    visible: dict[int, torch.Tensor] | None = None,
) -> None:
    """All arrays of a batch, in all layers, are those found by walking over the table."""
    together = tables.batches(batch)
    of_request = {r: plain_lists(pool, slots[r], (visible or {}).get(r)) for r in set(batch)}
    for layer in range(pool.num_layers):
        expected = [of_request[request][layer, head] for request in batch for head in range(pool.num_kv_heads)]
        extents = tables.extents(batch, layer)
        for table in (together[layer], tables.batch(batch, layer)):
            assert {table.kv_indptr.dtype, table.kv_indices.dtype, table.kv_last_page_len.dtype} == {torch.int32}
            assert table.kv_indptr.tolist() == [sum(map(len, expected[:entry])) for entry in range(len(expected) + 1)]
            assert torch.equal(table.kv_indptr, table.kv_indptr_host)
            assert table.kv_indices.tolist() == [cell for entry in expected for cell, _ in entry]
            assert table.kv_last_page_len.tolist() == [min(1, len(entry)) for entry in expected]
            assert table.positions is not None
            assert table.positions.tolist() == [position for entry in expected for _, position in entry]
        for entry, start, length in zip(expected, extents.starts.tolist(), extents.lengths.tolist(), strict=True):
            assert tables.arena[start : start + length].tolist() == [cell for cell, _ in entry]


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_any_sequence_of_steps_gives_the_lists_of_the_table(seed: int) -> None:
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    pool = pool_for(400)
    tables = PageTables(pool, 6, keep_positions=True)
    requests: dict[int, list[int]] = {}
    spare = list(range(1, pool.num_slots))
    rng.shuffle(spare)
    for _ in range(25):
        match rng.choice(["start", "decode", "decode", "extend", "evict", "finish"]):
            case "start" if len(requests) < 6:
                request = rng.choice(sorted(set(range(6)) - requests.keys()))
                slots = [spare.pop() for _ in range(rng.randint(0, 60))]
                if pool.allocate(slots_of(*slots)):
                    tables.set(request, slots_of(*slots))
                    requests[request] = slots
                else:
                    spare += slots
            case "decode" if requests:
                batch = rng.sample(sorted(requests), rng.randint(1, len(requests)))
                slots = [spare.pop() for _ in batch]
                if pool.allocate(slots_of(*slots), as_runs=False):
                    tables.append(torch.tensor(batch), slots_of(*slots))
                    for request, slot in zip(batch, slots, strict=True):
                        requests[request].append(slot)
                else:
                    spare += slots
            case "extend" if requests:
                batch = rng.sample(sorted(requests), rng.randint(1, len(requests)))
                counts = [rng.choice([0, 1, 5, 150]) for _ in batch]
                slots = [spare.pop() for _ in range(min(len(spare), sum(counts)))]
                if len(slots) == sum(counts) and pool.allocate(slots_of(*slots)):
                    tables.append(batch, slots_of(*slots), counts)
                    for request, count in zip(batch, counts, strict=True):
                        requests[request] += slots[:count]
                        slots = slots[count:]
                else:
                    spare += slots
            case "evict" if requests:
                request = rng.choice(sorted(requests))
                slots = requests[request]
                pool.evict(slots_of(*slots), torch.rand(L, len(slots), H, generator=noise) < rng.random())
                tables.set(request, slots_of(*slots))
            case "finish" if requests:
                request = rng.choice(sorted(requests))
                pool.free(slots_of(*requests[request]))
                tables.remove([request])
                spare += requests.pop(request)
        batch = rng.sample(sorted(requests), rng.randint(0, len(requests)))
        assert_batch(tables, pool, batch, requests)
        assert [tables.num_tokens(request) for request in batch] == [len(requests[request]) for request in batch]


def test_appending_seldom_moves_lists() -> None:
    pool = pool_for(3000)
    tables = PageTables(pool, 2, keep_positions=True)
    slots: dict[int, list[int]] = {0: [1], 1: [2]}
    pool.allocate(slots_of(1, 2))
    tables.set(0, slots_of(1))
    tables.set(1, slots_of(2))
    starts, moves = tables.extents([0, 1], 0).starts, 0
    for slot in range(3, 2403, 2):
        pool.allocate(slots_of(slot, slot + 1), as_runs=False)
        tables.append([0, 1], slots_of(slot, slot + 1))
        slots[0].append(slot)
        slots[1].append(slot + 1)
        new = tables.extents([0, 1], 0).starts
        moves += not torch.equal(new, starts)
        starts = new
    # Room is 128 tokens or more; what moves once more is everything, when the arena is full.
    assert moves <= 2 * (1200 // LEAST_ROOM)
    assert_batch(tables, pool, [1, 0], slots)


def test_the_arena_stays_in_proportion_to_what_is_listed() -> None:
    pool = pool_for(300)
    tables = PageTables(pool, 3, keep_positions=True)
    slots = list(range(1, 201))
    pool.allocate(slots_of(*slots))
    for _ in range(50):
        tables.set(1, slots_of(*slots))
    assert len(tables.arena) <= 4 * L * H * (200 + LEAST_ROOM)
    assert_batch(tables, pool, [1], {1: slots})


def test_b_ev_02_lengths_of_lists_are_physical_and_positions_logical() -> None:
    pool = pool_for(50)
    tables = PageTables(pool, 1, keep_positions=True)
    slots = list(range(1, 41))
    pool.allocate(slots_of(*slots))
    tables.set(0, slots_of(*slots))
    keep = torch.rand(L, 40, H, generator=torch.Generator().manual_seed(0)) < 0.5
    free = pool.free_cells
    freed = pool.evict(slots_of(*slots), keep)
    tables.set(0, slots_of(*slots))
    assert torch.equal(tables.lengths([0])[0], keep.sum(dim=1))
    assert pool.free_cells == free + freed
    assert tables.num_tokens(0) == 40
    pool.allocate(slots_of(41))
    tables.append([0], slots_of(41))
    assert tables.num_tokens(0) == 41
    for layer, table in enumerate(tables.batches([0])):
        assert table.kv_indptr.diff().tolist() == [int(count) + 1 for count in keep[layer].sum(dim=0)]
        assert table.positions is not None
        assert [int(table.positions[end - 1]) for end in table.kv_indptr[1:]] == [40] * H


@pytest.mark.parametrize("fill", [float("nan"), 1e30])
def test_b_ev_06_b_ev_17_heads_with_other_tokens_read_only_their_own_cells(fill: float) -> None:
    """Attention through the lists is masked dense attention, whatever lies in padding, free and evicted cells."""
    rng = torch.Generator().manual_seed(4)
    num_tokens, heads, dim = 24, 4, 8
    pool = CellPool(L, heads, 60, 40 * L * heads)
    tables = PageTables(pool, 3)
    pool.allocate(slots_of(50, 51, 52))
    slots = slots_of(*range(1, num_tokens + 1))
    pool.allocate(slots)
    keys, values = torch.randn(2, L, num_tokens, heads, dim, generator=rng, dtype=torch.float64)
    cells = pool.table[:, slots].long()
    buffers = torch.full((2, pool.num_cells, dim), fill, dtype=torch.float64)
    # Every fourth token in each head: no two heads keep the same one.
    keep = (torch.arange(num_tokens)[:, None] % heads == torch.arange(heads)).expand(L, -1, -1)
    buffers[0, cells[keep]], buffers[1, cells[keep]] = keys[keep], values[keep]
    assert pool.evict(slots, keep) == L * num_tokens * (heads - 1)
    assert pool.free_tokens == 40 - 1 - 3 - num_tokens // heads
    tables.set(0, slots)
    tables.set(2, slots_of(0))
    queries = torch.randn(L, heads, dim, generator=rng, dtype=torch.float64)
    for layer in range(L):
        table = tables.batch([2, 0, 2], layer)
        assert int(table.kv_indptr[-1]) == 2 * heads + num_tokens
        assert set(table.kv_indices[:heads].tolist()) <= set(pool.table[:, 0].flatten().tolist())
        for head in range(heads):
            listed = table.kv_indices[table.kv_indptr[heads + head] : table.kv_indptr[heads + head + 1]].long()
            logits = buffers[0, listed] @ queries[layer, head] / dim**0.5
            result = logits.softmax(0) @ buffers[1, listed]
            dense = masked_dense_attention(
                queries[layer, head], keys[layer, :, head], values[layer, :, head], keep[layer, :, head]
            )
            torch.testing.assert_close(result, dense)


def test_new_tokens_end_every_list_so_that_a_causal_mask_lines_up() -> None:
    pool = pool_for(60)
    tables = PageTables(pool, 1)
    old, new = slots_of(*range(1, 31)), slots_of(*range(31, 39))
    pool.allocate(old)
    pool.evict(old, torch.rand(L, 30, H, generator=torch.Generator().manual_seed(6)) < 0.2)
    tables.set(0, old)
    pool.allocate(new)
    tables.append([0], new, [8])
    for layer, table in enumerate(tables.batches([0])):
        assert table.positions is None
        for head, end in enumerate(table.kv_indptr[1:].tolist()):
            assert table.kv_indices[end - 8 : end].tolist() == pool.table[layer, new, head].tolist()


def test_pairs_that_exist_can_be_left_out() -> None:
    pool = pool_for(30)
    tables = PageTables(pool, 2, keep_positions=True)
    shared = list(range(1, 13))
    pool.allocate(slots_of(*shared))
    visible = torch.rand(L, 12, H, generator=torch.Generator().manual_seed(8)) < 0.4
    used = pool.used_cells
    tables.set(0, slots_of(*shared), visible)
    tables.set(1, slots_of(*shared))
    assert pool.used_cells == used
    assert_batch(tables, pool, [1, 0, 1], {0: shared, 1: shared}, {0: visible})


def test_an_entry_without_pages_has_an_empty_last_page() -> None:
    """FlashInfer's kernels look at kv_indptr first; its get_seq_lens adds kv_last_page_len to what may be 0 pages."""
    pool = pool_for(5)
    tables = PageTables(pool, 1, keep_positions=True)
    pool.allocate(slots_of(1, 2))
    keep = torch.ones(L, 2, H, dtype=torch.bool)
    keep[0, :, 1] = False
    pool.evict(slots_of(1, 2), keep)
    tables.set(0, slots_of(1, 2))
    table = tables.batch([0], 0)
    assert table.kv_indptr.tolist() == [0, 2, 2, 4]
    assert table.kv_last_page_len.tolist() == [1, 0, 1]
    # Written out from flashinfer.page.get_seq_lens, for page size 1.
    assert ((table.kv_indptr.diff() - 1).clamp(min=0) + table.kv_last_page_len).tolist() == [2, 0, 2]


def test_empty_batches_and_requests_have_empty_tables() -> None:
    pool = pool_for(5)
    tables = PageTables(pool, 2, keep_positions=True)
    assert_batch(tables, pool, [], {})
    tables.append([], slots_of())
    tables.remove([])
    tables.set(1, slots_of())
    assert_batch(tables, pool, [1], {1: []})


def test_wrong_calls_are_named_and_change_nothing() -> None:
    pool = pool_for(8)
    tables = PageTables(pool, 3, keep_positions=True)
    slots = {0: [1, 2], 2: [3]}
    pool.allocate(slots_of(1, 2, 3, 4, 5))
    tables.set(0, slots_of(1, 2))
    tables.set(2, slots_of(3))
    hole = torch.ones(L, 1, H, dtype=torch.bool)
    hole[1, 0, 1] = False
    pool.evict(slots_of(5), hole)
    calls: list[tuple[Any, tuple[Any, ...], str]] = [
        (tables.batch, ([1], 0), "request 1 has no page table: set it first"),
        (tables.batch, ([3], 0), "request 3 is not one of 0 to 2"),
        (tables.set, (-1, slots_of(4)), "request -1 is not one of"),
        (tables.remove, ([1],), "request 1 has no page table"),
        (tables.append, ([0, 0], slots_of(4, 4)), r"requests \[0, 0\] are not distinct"),
        (tables.append, ([0], slots_of(5)), "slots without all their cells are appended"),
        (tables.append, ([0], slots_of(6)), "slots without all their cells"),
        (tables.append, ([0, 2], slots_of(4)), r"1 slots appended to 2 requests with counts \[1, 1\]"),
        (tables.append, ([0, 2], slots_of(4), [2, -1]), r"counts \[2, -1\]"),
        (tables.append, ([0, 2], slots_of(4), [1]), r"counts \[1\]"),
        (tables.set, (0, slots_of(4), hole[:, :, :1]), r"visible is torch.bool\[2, 1, 1\]: expected bool\[2, 1, 3\]"),
    ]
    for call, arguments, message in calls:
        with pytest.raises(KVTCError, match=message):
            call(*arguments)
        assert_batch(tables, pool, [2, 0], slots)
    tables.remove([0])
    with pytest.raises(CellPoolError, match="request 0 has no page table"):
        tables.append([0], slots_of(4))
    with pytest.raises(ConfigError, match="page tables for 0 requests"):
        PageTables(pool, 0)


def test_rows_are_known_until_they_are_discarded_or_all_are_cleared() -> None:
    pool = pool_for(20)
    tables = PageTables(pool, 3, keep_positions=True)
    pool.allocate(slots_of(*range(1, 10)))
    assert tables.is_known([0, 1, 2, 1]) == [False] * 4
    tables.set(1, slots_of(1, 2, 3))
    tables.set(2, slots_of())
    assert tables.is_known([2, 0, 1]) == [True, False, True]
    tables.discard(1)
    tables.discard(0)
    assert tables.is_known([0, 1, 2]) == [False, False, True]
    with pytest.raises(CellPoolError, match="request 1 has no page table"):
        tables.append([1], slots_of(4))
    tables.set(1, slots_of(5, 6))
    assert_batch(tables, pool, [1, 2], {1: [5, 6], 2: []})
    tables.clear()
    assert tables.is_known([0, 1, 2]) == [False] * 3
    tables.set(0, slots_of(7, 8))
    tables.append([0], slots_of(9))
    assert_batch(tables, pool, [0], {0: [7, 8, 9]})
    for call in (tables.discard, lambda row: tables.is_known([row])):
        for row in (-1, 3):
            with pytest.raises(CellPoolError, match=f"request {row} is not one of 0 to 2"):
                call(row)


def test_rows_that_come_and_go_leave_no_room_behind() -> None:
    pool = pool_for(20)
    tables = PageTables(pool, 2)
    pool.allocate(slots_of(*range(1, 10)))
    sizes = set()
    for _ in range(300):
        tables.set(0, slots_of(*range(1, 10)))
        tables.discard(0)
        sizes.add(len(tables.arena))
    assert max(sizes) <= 4096
