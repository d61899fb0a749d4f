from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_kvtc.integration.pool_port import PoolPort

NUM_LAYERS, NUM_SLOTS = 3, 32


@pytest.mark.parametrize("slots", [[5, 6, 7, 8], [8, 7, 6, 5], [5, 6, 8, 9], [3]], ids=str)
def test_what_is_scattered_is_gathered_again_and_nothing_else_changes(slots: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = SimpleNamespace(
        k_buffer=[torch.randn(NUM_SLOTS, 2, 8, generator=generator).bfloat16() for _ in range(NUM_LAYERS)],
        v_buffer=[torch.randn(NUM_SLOTS, 2, 4, generator=generator).bfloat16() for _ in range(NUM_LAYERS)],
    )
    before = [buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    port, indices = PoolPort(pool), torch.tensor(slots)
    keys = torch.randn(2, len(slots), 2, 8, generator=generator).bfloat16()
    values = torch.randn(2, len(slots), 2, 4, generator=generator).bfloat16()

    port.scatter(range(1, 3), indices, keys, values)

    found_keys, found_values = port.gather(indices)
    assert torch.equal(found_keys[1:], keys)
    assert torch.equal(found_values[1:], values)
    rest = torch.tensor([slot for slot in range(NUM_SLOTS) if slot not in slots])
    for layer, (old, new) in enumerate(zip(before, (*pool.k_buffer, *pool.v_buffer), strict=True)):
        kept = slice(None) if layer % NUM_LAYERS == 0 else rest
        assert torch.equal(old[kept], new[kept])
