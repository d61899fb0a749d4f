"""The CPU patch's attention over a cached prefix, against the stock backend's and an fp64 reference."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_kvtc_cpu.attention import attend_new_queries

HEADS, KV_HEADS, DIM, SLOTS = 6, 2, 16, 200
STOCK = TorchNativeAttnBackend._run_sdpa_forward_extend
STOCK = getattr(STOCK, "__wrapped__", STOCK)


def inputs(lengths: list[tuple[int, int]], dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """lengths: (prefix, new) per request."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.zeros(len(lengths), SLOTS, dtype=torch.int64)
    slots = torch.randperm(SLOTS, generator=generator)
    for row, (prefix, new) in enumerate(lengths):
        rows[row, : prefix + new] = slots[: prefix + new].roll(row)
    num_new = sum(new for _, new in lengths)
    tensors = {
        "query": torch.randn(num_new, HEADS, DIM, generator=generator),
        "k_cache": torch.randn(SLOTS, KV_HEADS, DIM, generator=generator),
        "v_cache": torch.randn(SLOTS, KV_HEADS, DIM, generator=generator),
    }
    arguments = {name: tensor.to(dtype) for name, tensor in tensors.items()} | {
        "output": torch.full((num_new, HEADS, DIM), torch.nan, dtype=dtype),
        "req_to_token": rows,
        "req_pool_indices": torch.arange(len(lengths)),
        "seq_lens": torch.tensor([prefix + new for prefix, new in lengths]),
        "extend_prefix_lens": torch.tensor([prefix for prefix, _ in lengths]),
        "extend_seq_lens": torch.tensor([new for _, new in lengths]),
    }
    return arguments, plain_attention(arguments, lengths)


def plain_attention(arguments: dict[str, torch.Tensor], lengths: list[tuple[int, int]]) -> torch.Tensor:
    query, keys, values = (arguments[name].double() for name in ("query", "k_cache", "v_cache"))
    out, start = torch.empty_like(query), 0
    for row, (prefix, new) in enumerate(lengths):
        for index in range(new):
            slots = arguments["req_to_token"][row, : prefix + index + 1]
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                weights = torch.softmax(keys[slots, kv_head] @ query[start + index, head] * DIM**-0.5, 0)
                out[start + index, head] = weights @ values[slots, kv_head]
        start += new
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[(50, 1)], [(50, 7)], [(0, 9)], [(30, 1), (0, 5), (17, 12)]], ids=str)
def test_only_new_queries_are_computed_and_as_exactly_as_by_the_stock_backend(
    lengths: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    arguments, expected = inputs(lengths, dtype)
    options = {"scaling": DIM**-0.5, "enable_gqa": True, "causal": True}
    stock = STOCK(TorchNativeAttnBackend, **{**arguments, "output": arguments["output"].clone()}, **options)
    stock_error = (stock.double() - expected).abs().max()

    def never(*_args: object, **_options: object) -> torch.Tensor:
        raise AssertionError("the stock method was called")

    ours = attend_new_queries(never, None, **arguments, **options)
    assert (ours.double() - expected).abs().max() <= 2 * stock_error


def test_other_kinds_of_attention_are_left_to_the_stock_backend() -> None:
    arguments, _ = inputs([(5, 3)], torch.float32)
    answer = torch.zeros(1)
    for options in (
        {"causal": False},
        {"causal": True, "sliding_window_size": 4},
        {"causal": True, "is_cross_attn": True},
    ):
        assert attend_new_queries(lambda *_args, **_options: answer, None, **arguments, **options) is answer
