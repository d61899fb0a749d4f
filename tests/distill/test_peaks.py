from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvtc.distill import peaks as peaks_module
from sglang_kvtc.distill.peaks import raise_peaks


def plain_peaks(queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """One query and one head at a time, in fp64: f64[num_kv_heads, num_keys]."""
    num_heads, num_queries, _ = queries.shape
    num_kv_heads, num_keys, _ = keys.shape
    peaks = torch.zeros(num_kv_heads, num_keys, dtype=torch.float64)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        for query in range(num_queries):
            own = num_keys - num_queries + query
            logits = keys[kv_head, : own + 1].double() @ queries[head, query].double() * scaling
            probabilities = logits.softmax(dim=0)
            probabilities[own] = 0
            peaks[kv_head, : own + 1] = torch.maximum(peaks[kv_head, : own + 1], probabilities)
    return peaks


@given(
    num_kv_heads=st.integers(1, 3),
    group_size=st.integers(1, 4),
    num_queries=st.integers(1, 12),
    num_earlier=st.integers(0, 12),
    tile_bytes=st.sampled_from([1, 500, 1 << 20]),
    scaling=st.sampled_from([0.1, 1.0, 30.0]),
    data=st.data(),
)
def test_peaks_are_the_largest_probabilities_of_plain_attention(
    num_kv_heads: int,
    group_size: int,
    num_queries: int,
    num_earlier: int,
    tile_bytes: int,
    scaling: float,
    data: st.DataObject,
) -> None:
    generator = torch.Generator().manual_seed(num_queries * 100 + num_earlier)
    queries = torch.randn(num_kv_heads * group_size, num_queries, 8, generator=generator)
    keys = torch.randn(num_kv_heads, num_earlier + num_queries, 8, generator=generator)
    first = data.draw(st.integers(0, keys.shape[1]))
    num_wanted = data.draw(st.integers(0, keys.shape[1] - first))
    before = torch.rand(num_kv_heads, num_wanted, generator=generator) / 4
    peaks = before.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peaks_module, "_TILE_BYTES", tile_bytes)
        raise_peaks(peaks, queries, keys, scaling, first)
    expected = plain_peaks(queries, keys, scaling)[:, first : first + num_wanted]
    torch.testing.assert_close(peaks.double(), torch.maximum(before.double(), expected), rtol=1e-4, atol=1e-6)


def test_memory_is_that_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    softmax = torch.Tensor.softmax

    def observe(logits: torch.Tensor, dim: int) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, logits.numel() * 4)
        return softmax(logits, dim=dim)

    monkeypatch.setattr(torch.Tensor, "softmax", observe)
    raise_peaks(torch.zeros(1, 6000), torch.randn(3, 2000, 4), torch.randn(1, 8000, 4), 0.5)
    assert 0 < largest <= peaks_module._TILE_BYTES
