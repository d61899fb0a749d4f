"""Attention over lists of cells, one list per request and KV head, on a GPU.

The oracle of both operations is `sglang_kvtc.eviction.attention`. Layout: `k_cells` [num_cells, head_dim] and `v_cells`
[num_cells, v_head_dim], where one cell is one token of one KV head of one layer. List `request * num_kv_heads + head`
is `arena[starts[list] : starts[list] + lengths[list]]`, oldest token first. Lists are read in place on the device
(`PageTables.arena` and `PageTables.extents`): nothing is planned on the host, and nothing is read from the device.
FlashInfer's arrays are such lists too: kv_indices, kv_indptr[:-1] and kv_indptr.diff().

CUDA graphs: the grid of `decode_attention` follows from shapes and `num_splits` alone. Captured once, it is replayed
after `starts`, `lengths` and what the arena holds were overwritten in place. A new arena (PageTables.arena says when)
needs a new capture. Cell numbers are not checked: that would wait for the device.

Roofline. Per list of n cells in b bytes per element, with g query heads per KV head, decoding reads

    n * (b * (head_dim + v_head_dim) + 4) bytes    and does    2 * n * g * (head_dim + v_head_dim) operations,

so g operations per byte in 16 bits. An H200 (4.8 TB/s, 990 Tflop/s in bf16) would need 206: decoding is bound by memory
for any g, and its bound is the bytes above over the bandwidth. Splitting adds 8 * g * (v_head_dim + 1) bytes per split,
written and read in fp32. Extending reads the same per block of queries, and r query rows per block make r operations
per byte: with r = 64 it is still the bandwidth, of the L2 cache where blocks of one list run together, that bounds it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.kernels.triton_ops.cell_lists import checked_output
from sglang_kvtc.kernels.triton_ops.launch import (
    MAX_SPLITS,
    block_rows,
    device_of,
    kernel_constants,
    splits_for,
    written_output,
)

_LOG2_E = tl.constexpr(1.4426950408889634)


# Each row of `queries` is one query: the query heads of one KV head lie side by side, so that its cells are read once.
# Triton compiles annotations too, so that only constants can have one.
@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    queries,
    visible,
    arena,
    first,
    stop,
    k_cells,
    v_cells,
    k_strides,
    v_strides,
    scaling,
    head_dim: tl.constexpr,
    v_head_dim: tl.constexpr,
    head_block: tl.constexpr,
    v_head_block: tl.constexpr,
    rows: tl.constexpr,
    block_cells: tl.constexpr,
    operand: tl.constexpr,
):
    """softmax(scaling x queries @ keys.T) @ values over the cells arena[first:stop], by the online softmax.

    queries: operand[rows, head_block]. visible: i32[rows], the first place of the list that a row does not see.
    Returns f32[rows, v_head_block], 0 for rows that see nothing, and the binary logarithm f32[rows] of the sum of
    2 ** (logit x log2(e)), minus infinity for them.
    """
    dims = tl.arange(0, head_block)
    v_dims = tl.arange(0, v_head_block)
    largest = tl.full((rows,), -float("inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    mean = tl.zeros((rows, v_head_block), tl.float32)
    for begin in range(first, stop, block_cells):
        places = begin + tl.arange(0, block_cells)
        exists = places < stop
        # Masked loads read nothing: neither a cell nor an entry of the arena beyond the list is touched.
        cells = tl.load(arena + places, mask=exists, other=0).to(tl.int64)
        keys = tl.load(
            k_cells + cells[:, None] * k_strides[0] + dims[None, :] * k_strides[1],
            mask=exists[:, None] & (dims < head_dim)[None, :],
            other=0.0,
        ).to(operand)
        # Without "ieee" fp32 would be rounded to tf32.
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (scaling * _LOG2_E)
        logits = tl.where((places[None, :] < visible[:, None]) & exists[None, :], logits, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        # Rows that have seen nothing yet must not subtract infinity from infinity.
        shift = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        weights = tl.exp2(logits - shift[:, None])
        decay = tl.exp2(largest - shift)
        total = total * decay + tl.sum(weights, 1)
        values = tl.load(
            v_cells + cells[:, None] * v_strides[0] + v_dims[None, :] * v_strides[1],
            mask=exists[:, None] & (v_dims < v_head_dim)[None, :],
            other=0.0,
        ).to(operand)
        mean = mean * decay[:, None] + tl.dot(weights.to(operand), values, input_precision="ieee")
        largest = new_largest
    sees = total > 0.0
    mean = tl.where(sees[:, None], mean / tl.where(sees, total, 1.0)[:, None], 0.0)
    return mean, tl.where(sees, largest + tl.log2(tl.where(sees, total, 1.0)), -float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _cells_per_split(length, splits: tl.constexpr, block_cells: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cells of a list that one split attends to, whole blocks; the last splits of a short list have none."""
    return tl.cdiv(tl.cdiv(length, splits), block_cells) * block_cells


@triton.jit  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    queries,
    out,
    partial,
    partial_log,
    arena,
    starts,
    lengths,
    k_cells,
    v_cells,
    q_strides,
    out_strides,
    k_strides,
    v_strides,
    scaling,
    num_kv_heads,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    v_head_dim: tl.constexpr,
    head_block: tl.constexpr,
    v_head_block: tl.constexpr,
    rows: tl.constexpr,
    block_cells: tl.constexpr,
    operand: tl.constexpr,
    splits: tl.constexpr,
):
    """Program (list, split): attention of one token's `group` query heads to a part of their list.

    With one split `out` is written, else partial f32[lists, splits, group, v_head_dim] and partial_log f32[lists,
    splits, group], which splits without cells leave as they are.
    """
    number = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    length = tl.load(lengths + number)
    per_split = _cells_per_split(length, splits, block_cells)
    first = split * per_split
    stop = tl.minimum(first + per_split, length)
    if splits > 1:  # noqa: SIM102 (a constant, which decides what is compiled)
        if first >= length:
            return
    row = tl.arange(0, rows)
    dims = tl.arange(0, head_block)
    v_dims = tl.arange(0, v_head_block)
    request = number // num_kv_heads
    heads = (number % num_kv_heads) * group + row
    query = tl.load(
        queries + request * q_strides[0] + heads[:, None] * q_strides[1] + dims[None, :] * q_strides[2],
        mask=(row < group)[:, None] & (dims < head_dim)[None, :],
        other=0.0,
    ).to(operand)
    mean, log = _attend(
        query, tl.zeros((rows,), tl.int32) + length, arena + tl.load(starts + number), first, stop, k_cells, v_cells,
        k_strides, v_strides, scaling, head_dim, v_head_dim, head_block, v_head_block, rows,
        block_cells, operand,
    )  # fmt: skip
    is_output = (row < group)[:, None] & (v_dims < v_head_dim)[None, :]
    if splits == 1:
        tl.store(
            out + request * out_strides[0] + heads[:, None] * out_strides[1] + v_dims[None, :] * out_strides[2],
            mean.to(out.dtype.element_ty),
            mask=is_output,
        )
    else:
        places = (number * splits + split) * group + row
        tl.store(partial + places[:, None] * v_head_dim + v_dims[None, :], mean, mask=is_output)
        tl.store(partial_log + places, log, mask=row < group)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    out,
    partial,
    partial_log,
    lengths,
    out_strides,
    num_kv_heads,
    group: tl.constexpr,
    v_head_dim: tl.constexpr,
    v_head_block: tl.constexpr,
    block_cells: tl.constexpr,
    splits: tl.constexpr,
    splits_block: tl.constexpr,
):
    """Program (list, head of its group): the mean of the splits that have cells, by the sums of their weights."""
    number = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths + number)
    per_split = _cells_per_split(length, splits, block_cells)
    split = tl.arange(0, splits_block)
    v_dims = tl.arange(0, v_head_block)
    has_cells = (split < splits) & (split * per_split < length)
    places = (number * splits + split) * group + head
    logs = tl.load(partial_log + places, mask=has_cells, other=-float("inf"))
    largest = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(largest == -float("inf"), 0.0, largest))
    means = tl.load(
        partial + places[:, None] * v_head_dim + v_dims[None, :],
        mask=has_cells[:, None] & (v_dims < v_head_dim)[None, :],
        other=0.0,
    )
    total = tl.sum(weights, 0)
    mean = tl.sum(weights[:, None] * means, 0) / tl.where(total > 0.0, total, 1.0)
    request = number // num_kv_heads
    heads = (number % num_kv_heads) * group + head
    tl.store(
        out + request * out_strides[0] + heads * out_strides[1] + v_dims * out_strides[2],
        mean.to(out.dtype.element_ty),
        mask=v_dims < v_head_dim,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _extend(  # type: ignore[no-untyped-def]
    queries,
    out,
    arena,
    starts,
    lengths,
    q_indptr,
    k_cells,
    v_cells,
    q_strides,
    out_strides,
    k_strides,
    v_strides,
    scaling,
    num_kv_heads,
    num_blocks,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    v_head_dim: tl.constexpr,
    head_block: tl.constexpr,
    v_head_block: tl.constexpr,
    rows: tl.constexpr,
    block_cells: tl.constexpr,
    operand: tl.constexpr,
):
    """Program list x num_blocks + i: the i-th last block of the new tokens of a list, each with `group` query heads."""
    number = (tl.program_id(0) // num_blocks).to(tl.int64)
    # The last tokens see most, so they come first.
    block = num_blocks - 1 - tl.program_id(0) % num_blocks
    request = number // num_kv_heads
    token_begin = tl.load(q_indptr + request)
    num_new = tl.load(q_indptr + request + 1) - token_begin
    tokens_per_block: tl.constexpr = rows // group
    first_new = block * tokens_per_block
    if first_new >= num_new:
        return
    length = tl.load(lengths + number)
    row = tl.arange(0, rows)
    new = first_new + row // group
    is_row = (row < tokens_per_block * group) & (new < num_new)
    dims = tl.arange(0, head_block)
    v_dims = tl.arange(0, v_head_block)
    tokens = (token_begin + new).to(tl.int64)
    heads = (number % num_kv_heads) * group + row % group
    query = tl.load(
        queries + tokens[:, None] * q_strides[0] + heads[:, None] * q_strides[1] + dims[None, :] * q_strides[2],
        mask=is_row[:, None] & (dims < head_dim)[None, :],
        other=0.0,
    ).to(operand)
    # Causal among the new tokens, which end the list, whatever is missing before them.
    visible = length - num_new + new + 1
    stop = tl.minimum(length, length - num_new + first_new + tokens_per_block)
    mean, _ = _attend(
        query, visible, arena + tl.load(starts + number), 0, stop, k_cells, v_cells, k_strides, v_strides,
        scaling, head_dim, v_head_dim, head_block, v_head_block, rows, block_cells, operand,
    )  # fmt: skip
    tl.store(
        out + tokens[:, None] * out_strides[0] + heads[:, None] * out_strides[1] + v_dims[None, :] * out_strides[2],
        mean.to(out.dtype.element_ty),
        mask=is_row[:, None] & (v_dims < v_head_dim)[None, :],
    )


def decode_attention(
    queries: torch.Tensor,
    k_cells: torch.Tensor,
    v_cells: torch.Tensor,
    arena: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    out: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attention of one token per request to all tokens of its lists, its own among them.

    queries: dtype[batch, num_heads, head_dim], one of cell_lists.DTYPES, of any strides. Heads that share a KV head are
        neighbours.
    k_cells: [num_cells, head_dim] and v_cells: [num_cells, v_head_dim] of any float dtype and strides.
    arena: i32[size]. starts: i64[batch * num_kv_heads]; num_kv_heads follows from it. lengths: i32 of the same shape.
    scaling: factor of the logits, usually head_dim ** -0.5.
    out: dtype[batch, num_heads, v_head_dim] of any strides, to be written and returned.
    num_splits: pieces that a list is attended to in, 1 to MAX_SPLITS; None for as many as fill the device. Graphs
        captured with it serve lists of any length.

    Returns the same. Heads of an empty list are 0. Products and sums are in fp32. All tensors lie on one device, a GPU
    or, under Triton's interpreter, the CPU. Raises ConfigError for other shapes, dtypes and devices.
    """
    out, num_kv_heads = checked_output(queries, k_cells, v_cells, arena, starts, lengths, len(queries), out)
    batch, num_heads, _ = queries.shape
    num_lists, v_head_dim = len(starts), v_cells.shape[1]
    splits = splits_for(num_lists, queries.device) if num_splits is None else num_splits
    if not 1 <= splits <= MAX_SPLITS:
        raise ConfigError(f"num_splits is {splits}: expected 1 to {MAX_SPLITS}")
    if batch == 0:
        return out
    group = num_heads // num_kv_heads
    constants = kernel_constants(queries, v_cells, max(16, triton.next_power_of_2(group)))
    partial = torch.empty(
        (num_lists, splits, group, v_head_dim) if splits > 1 else 1, dtype=torch.float32, device=queries.device
    )
    partial_log = torch.empty(partial.shape[:-1], dtype=torch.float32, device=queries.device)
    result = written_output(out)
    with device_of(queries):
        _decode[(num_lists, splits)](
            queries, result, partial, partial_log, arena, starts, lengths, k_cells, v_cells, queries.stride(),
            result.stride(), k_cells.stride(), v_cells.stride(), scaling, num_kv_heads, group=group, splits=splits,
            **constants,
        )  # fmt: skip
        if splits > 1:
            _combine[(num_lists, group)](
                result, partial, partial_log, lengths, result.stride(), num_kv_heads, group=group, splits=splits,
                splits_block=triton.next_power_of_2(splits), v_head_dim=v_head_dim,
                v_head_block=constants["v_head_block"], block_cells=constants["block_cells"],
            )  # fmt: skip
    return out if result is out else out.copy_(result)


def extend_attention(
    queries: torch.Tensor,
    k_cells: torch.Tensor,
    v_cells: torch.Tensor,
    arena: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    q_indptr: torch.Tensor,
    max_new: int,
    scaling: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the new tokens of each request to themselves and to all earlier tokens of its lists.

    queries: dtype[num_new_tokens, num_heads, head_dim]: the new tokens of the first request, then of the second, ...
    q_indptr: i32[batch + 1] on the device, the first token of each request; q_indptr[-1] is num_new_tokens.
    max_new: the largest number of new tokens of a request, on the host, for the grid: with more
        the result is the same, with less the last tokens are not written.
    The new tokens are the last ones of every list of their request, in order: none was evicted yet.

    Otherwise as in `decode_attention`; out: dtype[num_new_tokens, num_heads, v_head_dim]. The result of a request does
    not depend on the others. Lists are not split: requests with one new token and long lists are better decoded.
    """
    batch = len(q_indptr) - 1
    if q_indptr.dim() != 1 or q_indptr.dtype != torch.int32 or q_indptr.device != queries.device or batch < 0:
        raise ConfigError(
            f"q_indptr is {q_indptr.dtype}{list(q_indptr.shape)} on {q_indptr.device}: expected torch.int32 of [batch "
            f"+ 1] on {queries.device}"
        )
    out, num_kv_heads = checked_output(queries, k_cells, v_cells, arena, starts, lengths, batch, out)
    if len(queries) and max_new < 1:
        raise ConfigError(f"max_new is {max_new} for {len(queries)} new tokens: expected the most of any request")
    if batch == 0 or len(queries) == 0:
        return out
    group = queries.shape[1] // num_kv_heads
    constants = kernel_constants(queries, v_cells, block_rows(queries, group))
    num_blocks = triton.cdiv(max_new, constants["rows"] // group)
    result = written_output(out)
    with device_of(queries):
        _extend[(len(starts) * num_blocks,)](
            queries, result, arena, starts, lengths, q_indptr, k_cells, v_cells, queries.stride(), result.stride(),
            k_cells.stride(), v_cells.stride(), scaling, num_kv_heads, num_blocks, group=group, **constants,
        )  # fmt: skip
    return out if result is out else out.copy_(result)
