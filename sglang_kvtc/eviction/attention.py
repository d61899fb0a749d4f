"""Attention over a cache in which every KV head of every request keeps tokens of its own: the torch backend for CPUs.

Layout. K and V lie in cells: `k_cells` [num_cells, head_dim] and `v_cells` [num_cells, v_head_dim], where one cell is
one token of one KV head of one layer. Lists of cells are FlashInfer's for page size 1 and one KV head per request: list
`request * num_kv_heads + head` is `kv_indices[kv_indptr[list] : kv_indptr[list + 1]]`, in the order of positions.
Keys were rotated at their original positions, so that lists need no positions: only their order counts.

How. Lists of about the same length are copied into one small dense block and attended to in one call of torch's SDPA,
which accumulates in fp32; the query heads of one KV head are rows of one product, so that its K and V are read once. A
block is filled up with cells of the same list behind a mask: no cell outside the lists is ever read. Where the cells
of a request lie at even distances, as those of a chunk without holes do, they are read in place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.eviction.cell_lists import CellLists, Scratch

BLOCK_QUERIES = 256
"""New tokens of a request that attend at once: those after them are skipped, and their mask stays small."""


def decode_attention(
    queries: torch.Tensor,
    k_cells: torch.Tensor,
    v_cells: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    scaling: float,
    out: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """Attention of one token per request to all tokens of its lists, its own among them.

    queries: dtype[batch, num_heads, head_dim], one of cell_lists.DTYPES. Heads that share a KV head are
        neighbours.
    k_cells: [num_cells, head_dim] and v_cells: [num_cells, v_head_dim] of any float dtype, converted to the queries'
        after they are copied.
    kv_indptr: i32 or i64[batch * num_kv_heads + 1]; num_kv_heads follows from it. kv_indices: i32 or
        i64[kv_indptr[-1]] or longer.
    scaling: factor of the logits, usually head_dim ** -0.5.
    out: dtype[batch, num_heads, v_head_dim] of any strides, to be written and returned.
    scratch: memory to copy cells into, kept from call to call by whoever calls, for speed alone.

    Returns the same. Heads of an empty list are 0. All tensors lie on the CPU. Raises ConfigError for other shapes,
    dtypes and devices; a cell number outside the buffers is an IndexError of torch's.
    """
    with torch.no_grad():
        lists = CellLists(queries, k_cells, v_cells, kv_indptr, kv_indices, len(queries), scratch)
        result = _output(out, queries, v_cells)
        if len(queries):
            # Written at once, since an output of other strides has no view with a dimension of lists.
            result.copy_(_attend_last(lists, range(len(queries)), queries, scaling))
    return result


def extend_attention(
    queries: torch.Tensor,
    k_cells: torch.Tensor,
    v_cells: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    new_lens: Sequence[int] | torch.Tensor,
    scaling: float,
    out: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """Causal attention of the new tokens of each request to themselves and to all earlier tokens of its lists.

    queries: dtype[num_new_tokens, num_heads, head_dim]: the new tokens of the first request, then of the second, ...
    new_lens: new tokens of each request, 0 or more, on the host. They are the last ones of every list of their request,
        in order: a new token has not been evicted from any head yet.
    Otherwise as in `decode_attention`; out: dtype[num_new_tokens, num_heads, v_head_dim]. The result of a request does
    not depend on the others, but for rounding where several requests have a single new token. Raises ConfigError also
    when `new_lens` does not fit queries or lists.
    """
    counts = [int(count) for count in (new_lens.tolist() if isinstance(new_lens, torch.Tensor) else new_lens)]
    with torch.no_grad():
        lists = CellLists(queries, k_cells, v_cells, kv_indptr, kv_indices, len(counts), scratch)
        if min(counts, default=0) < 0 or sum(counts) != len(queries):
            raise ConfigError(f"new_lens is {counts}: expected counts that add up to the {len(queries)} queries")
        result = _output(out, queries, v_cells)
        lists.check_ends(counts)
        ends = np.cumsum(counts).tolist()
        single = [request for request, count in enumerate(counts) if count == 1]
        if single:
            tokens = torch.tensor([ends[request] - 1 for request in single])
            result[tokens] = _attend_last(lists, single, queries[tokens], scaling)
        for request, (count, end) in enumerate(zip(counts, ends, strict=True)):
            if count > 1:
                new = slice(end - count, end)
                _extend_request(lists, request, queries[new], result[new], scaling)
    return result


def _attend_last(lists: CellLists, requests: Sequence[int], queries: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention of the last token of some requests.

    queries: dtype[len(requests), num_heads, head_dim]. Returns dtype[len(requests), num_heads, v_head_dim].
    """
    num_requests, num_heads, head_dim = queries.shape
    heads, v_head_dim = lists.num_kv_heads, lists.v_cells.shape[1]
    # One row per list, and the heads that share its KV head as if they were tokens.
    parts = _Parts(queries.reshape(num_requests * heads, 1, num_heads // heads, head_dim), v_head_dim, scaling)
    to_copy: dict[int, int] = {}
    for first, request in zip(range(0, num_requests * heads, heads), requests, strict=True):
        runs, is_all = lists.take_runs(request)
        for keys, values in runs:
            parts.add(slice(first, first + heads), keys, values, None, is_only=is_all and len(runs) == 1)
        if not is_all:
            to_copy.update(zip(lists.of(request), range(first, first + heads), strict=True))
    for block in lists.blocks(to_copy):
        rows = torch.tensor([to_copy[number] for number in block])
        if lists.lengths[block[0]] == 0:
            parts.attended[rows] = 0
            continue
        keys, values, exists = lists.copy(block)
        mask = None if exists is None else _additive(exists[:, None, None], queries.dtype)
        is_only = not any(lists.is_cut(number) for number in block)
        parts.add(rows, keys, values, mask, is_only=is_only)
    return parts.result().view(num_requests, num_heads, v_head_dim)


class _Parts:
    """Attention to lists of which some are given in several parts.

    attended: dtype[lists, 1, group, v_head_dim], of lists given in one part.
    """

    def __init__(self, queries: torch.Tensor, v_head_dim: int, scaling: float) -> None:
        """queries: dtype[lists, 1, group, head_dim]."""
        self._queries, self._scaling = queries, scaling
        self.attended = queries.new_empty(*queries.shape[:3], v_head_dim)
        self._is_joined = torch.zeros(len(queries), dtype=torch.bool)
        # In fp32: the weighted mean of the values so far, and the logarithm of the sum of their weights.
        self._mean = self._log = torch.empty(0)

    def add(
        self,
        rows: slice | torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        is_only: bool,
    ) -> None:
        """Attend to a part of some lists. is_only: none of them has another part.

        keys, values: dtype[rows, 1, length, head size], one head size unless `is_only`. mask: additive, of that dtype.
        """
        queries = self._queries[rows]
        if is_only:
            self.attended[rows] = scaled_dot_product_attention(queries, keys, values, mask, scale=self._scaling)
            return
        if not len(self._mean):
            self._mean = torch.zeros(self.attended.shape, dtype=torch.float32)
            self._log = torch.full(self.attended.shape[:3], -math.inf)
        # What scaled_dot_product_attention calls here: only in this form is the logarithm to be had.
        mean, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, attn_mask=mask, scale=self._scaling
        )
        total = torch.logaddexp(self._log[rows], log)
        before, now = (torch.exp(part - total)[..., None] for part in (self._log[rows], log))
        self._mean[rows] = self._mean[rows] * before + mean * now
        self._log[rows] = total
        self._is_joined[rows] = True

    def result(self) -> torch.Tensor:
        """Attention to all parts, dtype[lists, 1, group, v_head_dim]."""
        if len(self._mean):
            self.attended[self._is_joined] = self._mean[self._is_joined].to(self.attended.dtype)
        return self.attended


def _extend_request(lists: CellLists, request: int, queries: torch.Tensor, out: torch.Tensor, scaling: float) -> None:
    """Causal attention of several new tokens of one request: [num_new, num_heads, head size], `out` is written."""
    num_new, num_heads, _ = queries.shape
    heads = (lists.num_kv_heads, num_heads // lists.num_kv_heads)
    # [num_kv_heads, group, num_new, head size]
    by_head, attended = (tensor.unflatten(1, heads).permute(1, 2, 0, 3) for tensor in (queries, out))
    run, length = lists.leading_run(request)
    if run is not None and length == lists.lengths[lists.of(request).start]:
        _attend_causally(by_head, *run, None, attended, scaling)
        return
    numbers = lists.of(request)
    for block in lists.blocks(numbers, num_new):
        keys, values, exists = lists.copy(block, num_new)
        if len(block) == len(numbers):
            _attend_causally(by_head, keys, values, exists, attended, scaling)
            continue
        picked = torch.tensor([number - numbers.start for number in block])
        part = by_head[picked]
        of_part = part.new_empty(*part.shape[:3], values.shape[3])
        _attend_causally(part, keys, values, exists, of_part, scaling)
        attended[picked] = of_part


def _attend_causally(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    exists: torch.Tensor | None,
    attended: torch.Tensor,
    scaling: float,
) -> None:
    """Attention of new tokens to earlier ones and, causally, to themselves.

    queries: dtype[lists, group, num_new, head_dim]. keys, values: dtype[lists, 1, num_earlier + num_new, head size].
    exists: bool[lists, num_earlier], None for all. attended: dtype[lists, group, num_new, v_head_dim], written.
    """
    num_new = queries.shape[2]
    num_earlier = keys.shape[2] - num_new
    if num_earlier == 0:
        attended.copy_(
            scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
        )
        return
    for start in range(0, num_new, BLOCK_QUERIES):
        stop = min(start + BLOCK_QUERIES, num_new)
        visible = torch.ones(stop - start, num_earlier + stop, dtype=torch.bool).tril_(num_earlier + start)
        if exists is not None:
            visible = visible.repeat(len(exists), 1, 1, 1)
            visible[..., :num_earlier] = exists[:, None, None]
        attended[:, :, start:stop] = scaled_dot_product_attention(
            queries[:, :, start:stop],
            keys[:, :, : num_earlier + stop],
            values[:, :, : num_earlier + stop],
            _additive(visible, queries.dtype),
            scale=scaling,
            enable_gqa=True,
        )


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where `visible`, else minus infinity."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))


def _output(out: torch.Tensor | None, queries: torch.Tensor, v_cells: torch.Tensor) -> torch.Tensor:
    shape = (*queries.shape[:2], v_cells.shape[1])
    if out is None:
        return queries.new_empty(shape)
    if out.shape != shape or out.dtype != queries.dtype:
        raise ConfigError(
            f"out is {out.dtype}{list(out.shape)}: expected {queries.dtype}{list(shape)} for these queries and v_cells"
        )
    return out
