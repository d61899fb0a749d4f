"""Masked dense attention with original positions, in plain loops and fp64: the oracle of paged per-head attention.

`Request` also lays its tokens out in cells, and `in_cells` joins requests to the arguments of the functions under test:
every cell that no list names holds NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention


@dataclass
class Request:
    """One layer of a request: its last `len(queries)` tokens are new.

    queries: [num_new, num_heads, head_dim]. keys: [num_tokens, num_kv_heads, head_dim]; values likewise. kept:
    bool[num_tokens, num_kv_heads].
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    kept: torch.Tensor

    @property
    def first_new(self) -> int:
        return len(self.keys) - len(self.queries)

    def attention(self, scaling: float) -> torch.Tensor:
        """f64[num_new, num_heads, v_head_dim], 0 where nothing is visible."""
        queries, keys, values = (part.double().numpy() for part in (self.queries, self.keys, self.values))
        kept = self.kept.numpy()
        num_new, num_heads, _ = queries.shape
        group = num_heads // keys.shape[1]
        result = np.zeros((num_new, num_heads, values.shape[2]))
        for new in range(num_new):
            position = self.first_new + new
            for head in range(num_heads):
                kv_head = head // group
                visible = [token for token in range(position + 1) if kept[token, kv_head]]
                if not visible:
                    continue
                logits = [math.fsum(queries[new, head] * keys[token, kv_head]) * scaling for token in visible]
                weights = [math.exp(logit - max(logits)) for logit in logits]
                for weight, token in zip(weights, visible, strict=True):
                    result[new, head] += weight / math.fsum(weights) * values[token, kv_head]
        return torch.from_numpy(result)

    def torch_attention(self, scaling: float) -> torch.Tensor:
        """The same by torch's SDPA in the dtype of the queries, on masked dense K and V."""
        group = self.queries.shape[1] // self.keys.shape[1]
        causal = torch.arange(len(self.keys)) <= torch.arange(self.first_new, len(self.keys))[:, None]
        visible = causal[None] & self.kept.T[:, None]
        keys, values = (part.transpose(0, 1).repeat_interleave(group, 0) for part in (self.keys, self.values))
        mask = visible.repeat_interleave(group, 0)
        result = scaled_dot_product_attention(
            self.queries.transpose(0, 1)[None], keys[None], values[None], mask[None], scale=scaling
        )[0].transpose(0, 1)
        nothing = ~mask.any(dim=-1).T
        return result.masked_fill(nothing[..., None], 0)


@dataclass
class Cells:
    """Arguments of the functions under test, in their order; `new_lens` is for extend_attention."""

    queries: torch.Tensor
    k_cells: torch.Tensor
    v_cells: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    new_lens: list[int]

    @property
    def for_decode(self) -> tuple[torch.Tensor, ...]:
        return self.queries, self.k_cells, self.v_cells, self.kv_indptr, self.kv_indices


def in_cells(
    requests: Sequence[Request], *, seed: int | None, chunk_tokens: int | None = None, unused: float = math.nan
) -> Cells:
    """Lay requests out in cells: anywhere in a buffer, by `seed`, or, with None, in order of requests, tokens, heads.

    chunk_tokens: whole chunks of that many tokens have cells in order of heads and tokens instead; what is left of each
    request lies as `seed` says.
    """
    heads = requests[0].keys.shape[1]
    total = sum(request.kept.numel() for request in requests)
    num_cells = 3 * total + 7
    next_chunk = num_cells - total
    places = 3 + np.arange(total)
    if seed is not None:
        places = np.random.default_rng(seed).permutation(next_chunk)[:total]
    k_cells, v_cells = (
        torch.full((num_cells, part.shape[2]), unused).to(part.dtype) for part in (requests[0].keys, requests[0].values)
    )
    lists = []
    taken = 0
    for request in requests:
        table = places[taken : taken + request.kept.numel()].reshape(-1, heads)
        taken += request.kept.numel()
        for start in range(0, len(table) - (chunk_tokens or len(table) + 1) + 1, chunk_tokens or 1):
            chunk = table[start : start + (chunk_tokens or 0)]
            chunk[:] = next_chunk + np.arange(chunk.size).reshape(heads, -1).T
            next_chunk += chunk.size
        for head in range(heads):
            cells = table[request.kept[:, head].numpy(), head]
            k_cells[cells] = request.keys[request.kept[:, head], head]
            v_cells[cells] = request.values[request.kept[:, head], head]
            lists.append(cells)
    indptr = np.cumsum([0, *map(len, lists)])
    return Cells(
        torch.cat([request.queries for request in requests]),
        k_cells,
        v_cells,
        torch.from_numpy(indptr).int(),
        torch.from_numpy(np.concatenate(lists)).int(),
        [len(request.queries) for request in requests],
    )


def random_request(
    rng: torch.Generator,
    *,
    num_tokens: int,
    num_new: int,
    kept_shares: Sequence[float],
    group: int = 2,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    evict_new: bool = False,
) -> Request:
    """A request with one KV head per share; new tokens are kept unless `evict_new`."""
    heads = len(kept_shares)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(dtype)

    kept = torch.rand(num_tokens, heads, generator=rng) < torch.tensor(kept_shares)
    if not evict_new:
        kept[num_tokens - num_new :] = True
    return Request(
        normal(num_new, heads * group, head_dim),
        normal(num_tokens, heads, head_dim),
        normal(num_tokens, heads, v_head_dim or head_dim),
        kept,
    )


def assert_within_twice_torch(result: torch.Tensor, requests: Sequence[Request], scaling: float) -> None:
    """No result is further from the oracle than twice the largest error of torch's SDPA in the same dtype.

    Where torch happens to be exact, as for single tokens, one rounding of the largest value stands for its error.
    """
    assert result.dtype == requests[0].queries.dtype
    expected = torch.cat([request.attention(scaling) for request in requests])
    assert result.shape == expected.shape
    assert result.isfinite().all()
    if not expected.numel():
        return
    of_torch = torch.cat([request.torch_attention(scaling) for request in requests]).double()
    largest = max(float(request.values.abs().max()) for request in requests if request.values.numel())
    rounding = torch.finfo(result.dtype).eps * largest
    allowed = 2 * max(float((of_torch - expected).abs().max()), rounding)
    assert float((result.double() - expected).abs().max()) <= allowed
