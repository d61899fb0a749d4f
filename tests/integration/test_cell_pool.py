"""SGLang's allocator and KV pool over cells: sizes in whole tokens of memory, whatever is evicted."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integration.gated_engine import HEAD_DIM, PER_TOKEN, H, L, cell_allocator, cell_pool
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_kvtc.errors import CellPoolError, UnsupportedError
from sglang_kvtc.eviction.cell_lists import IN_PLACE_CELLS
from sglang_kvtc.integration.cell_pool import CellKVPool, private_tokens


def random_mask(num_tokens: int, share: float, seed: int) -> torch.Tensor:
    return torch.rand(L, num_tokens, H, generator=torch.Generator().manual_seed(seed)) < share


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_a_leak_whatever_is_evicted_free_and_private_tokens_add_up(seed: int) -> None:
    """Slots are plenty here, as they are by default. The books beside it are a dict of pairs per request."""
    rng = random.Random(seed)
    allocator = cell_allocator(cell_pool(size := 30, slots_per_token=8))
    held: dict[int, torch.Tensor] = {}
    pairs: dict[int, int] = {}
    for step in range(40):
        match rng.choice(["begin", "grow", "evict", "evict", "finish"]):
            case "begin":
                before = allocator.available_size()
                slots = allocator.alloc(count := rng.randint(1, 9))
                assert (slots is not None) == (count <= before)
                if slots is not None:
                    held[step], pairs[step] = slots, count * PER_TOKEN
            case "grow" if held and allocator.available_size() >= len(held):
                slots = allocator.alloc(len(held))
                for index, request in enumerate(sorted(held)):
                    held[request] = torch.cat([held[request], slots[index : index + 1]])
                    pairs[request] += PER_TOKEN
            case "evict" if held:
                request = rng.choice(sorted(held))
                keep = random_mask(len(held[request]), rng.random(), step)
                pairs[request] -= allocator.pool.cells.evict(held[request], keep)
            case "finish" if held:
                request = rng.choice(sorted(held))
                allocator.free(held.pop(request).int())
                del pairs[request]
        allocator.pool.cells.check()
        used = sum(pairs.values())
        assert allocator.pool.cells.used_cells == used
        private = private_tokens(allocator, [slots.int() for slots in held.values()])
        assert private == -(-used // PER_TOKEN)
        assert allocator.available_size() + private == size
        assert len(allocator.free_pages.unique()) == size * 8 - sum(map(len, held.values()))


def test_what_is_available_is_the_lesser_of_free_slots_and_whole_tokens() -> None:
    allocator = cell_allocator(cell_pool(10, slots_per_token=2))
    first, second = allocator.alloc(8), allocator.alloc(2)
    assert allocator.available_size() == 0 and allocator.alloc(1) is None
    nothing = torch.zeros(L, 8, H, dtype=torch.bool)
    one_pair = nothing.clone()
    one_pair[1, 3, 0] = True
    allocator.pool.cells.evict(first, one_pair)
    assert allocator.available_size() == 7
    third = allocator.alloc(7)
    assert allocator.alloc(1) is None
    allocator.pool.cells.evict(third, nothing[:, :7])
    assert len(allocator.free_pages) == 3 and allocator.available_size() == 3
    allocator.free(second)
    assert allocator.available_size() == 5
    assert allocator.alloc(6) is None and len(allocator.free_pages) == 5
    allocator.free(torch.cat([first, third]))
    assert allocator.available_size() == 10
    allocator.pool.cells.check()


def test_frees_wait_for_the_end_of_their_group_and_the_padding_slot_is_never_given() -> None:
    allocator = cell_allocator(cell_pool(6))
    slots = allocator.alloc(6)
    assert 0 not in slots.tolist()
    allocator.free_group_begin()
    part = slots[:2].clone()
    allocator.free(part)
    part.zero_()
    allocator.free_segments([(slots[2:4].int(), 2)])
    allocator.free(slots[:0])
    assert allocator.available_size() == 0
    allocator.free_group_end()
    assert allocator.available_size() == 4
    with pytest.raises(CellPoolError, match="freed twice"):
        allocator.free(slots[:1])
    assert allocator.available_size() == 4


def test_a_flush_gives_everything_back_and_tells_what_evicts() -> None:
    allocator = cell_allocator(cell_pool(6, slots_per_token=3))
    calls: list[str] = []
    allocator.gating = SimpleNamespace(reset=lambda: calls.append("reset"))
    slots = allocator.alloc(5)
    allocator.pool.cells.evict(slots, random_mask(5, 0.5, 0))
    allocator.free_group_begin()
    allocator.clear()
    assert calls == ["reset"]
    assert (allocator.available_size(), allocator.pool.cells.used_cells) == (6, 0)
    assert sorted(allocator.free_pages.tolist()) == list(range(1, 19))
    allocator.free(allocator.alloc(6))
    assert allocator.available_size() == 6


def test_long_prompts_get_runs() -> None:
    allocator = cell_allocator(cell_pool(size := IN_PLACE_CELLS // H))
    slots = allocator.alloc(size)
    assert bool((allocator.pool.cells.run_starts(slots) >= 0).all())


def test_what_is_stored_is_found_in_the_cells_of_its_slots_and_nowhere_else() -> None:
    pool = cell_pool(12, v_head_dim=3)
    allocator = cell_allocator(pool)
    noise = torch.Generator().manual_seed(0)
    other, slots = allocator.alloc(4), allocator.alloc(5)
    keys = torch.randn(L, 5, H, HEAD_DIM, generator=noise)
    values = torch.randn(L, 5, H, 3, generator=noise)
    for layer in range(L):
        pool.store(pool.cells_of(slots)[layer], keys[layer], values[layer])
    for layer in range(L):
        for index, slot in enumerate(slots.tolist()):
            for head in range(H):
                cell = int(pool.cells.table[layer, slot, head])
                assert torch.equal(pool.k_cells[cell], keys[layer, index, head])
                assert torch.equal(pool.v_cells[cell], values[layer, index, head])
    assert torch.equal(pool.cells_of(slots, range(1, 2)), pool.cells_of(slots)[1:])
    untouched = torch.cat([pool.cells_of(other).flatten(), torch.arange(PER_TOKEN)])
    assert not pool.k_cells[untouched].any() and not pool.v_cells[untouched].any()
    assert int((pool.k_cells != 0).any(dim=1).sum()) == 5 * PER_TOKEN


def test_sglangs_way_to_write_a_layer_is_ours() -> None:
    pool = cell_pool(4)
    slots = cell_allocator(pool).alloc(3)
    keys, values = torch.randn(2, 3, H, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    layer = SimpleNamespace(layer_id=1, k_scale=None, v_scale=None)
    pool.set_kv_buffer(layer, slots, keys, values)
    assert torch.equal(pool.k_cells[pool.cells_of(slots)[1]].view(3, H, HEAD_DIM), keys)
    assert torch.equal(pool.v_cells[pool.cells_of(slots)[1]].view(3, H, HEAD_DIM), values)


@pytest.mark.parametrize(
    "read",
    [
        lambda pool: pool.get_key_buffer(0),
        lambda pool: pool.get_value_buffer(1),
        lambda pool: pool.get_kv_buffer(0),
        lambda pool: pool.get_contiguous_buf_infos(),
        lambda pool: pool.get_cpu_copy(torch.tensor([1])),
        lambda pool: pool.load_cpu_copy(None, torch.tensor([1])),
        lambda pool: pool.move_kv_cache(torch.tensor([1]), torch.tensor([2])),
        lambda pool: cell_allocator(pool).get_cpu_copy(torch.tensor([1])),
        lambda pool: cell_allocator(pool).load_cpu_copy(None, torch.tensor([1])),
    ],
)
def test_what_addresses_the_pool_by_slot_is_refused(read: Callable[[CellKVPool], object]) -> None:
    with pytest.raises(UnsupportedError, match="by slot"):
        read(cell_pool(4))


def test_sizes_are_stated_as_they_are() -> None:
    pool = cell_pool(10, slots_per_token=3, v_head_dim=3)
    assert pool.num_slots == 31
    assert pool.get_kv_size_bytes() == (11 * PER_TOKEN * HEAD_DIM * 4, 11 * PER_TOKEN * 3 * 4)
    free_list = pool.cells._ring
    assert free_list.nbytes == 4 * (pool.cells.num_cells - PER_TOKEN)
    of_slots = pool.cells._is_owned.nbytes + pool.cells._scratch.nbytes
    assert pool.overhead_bytes == pool.cells.table.nbytes + pool.scores.nbytes + free_list.nbytes + of_slots


def test_admission_asks_for_a_budget_over_this_allocator() -> None:
    allocator = cell_allocator(cell_pool(4))
    tree = SimpleNamespace(supports_mamba=lambda: False, evictable_size=lambda: 3)
    budget = allocator.create_prefill_budget(tree, num_mixed_decode_tokens=2)
    assert isinstance(budget, PrefillBudget)
    assert (budget.remaining_total, budget.remaining_current) == (5, 5)
