"""Attention over kept tokens by the wrappers of FlashInfer (read in version 0.7.2), planned from the host.

Every KV head of every request is a request of FlashInfer's with one KV head, whose pages are single cells:
`BatchDecodeWithPagedKVCacheWrapper` and `BatchPrefillWithPagedKVCacheWrapper` with page_size 1, num_kv_heads 1 and
batch x num_kv_heads requests. Its queries are the query heads of that KV head. For decoding they lie so already; a
prompt's lie by token, so that they are gathered by head, and the output is scattered back: 2 of them beside all K and
V.

What is planned depends on lengths, which differ from layer to layer and grow with every step. So each layer is planned
when it is first called with the lists of a step, from arrays on the host: nothing is read from the device. The backend
fa2 is named to the wrappers, because `auto` may choose others that take no such pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.eviction.page_table import PageTable, PageTables
from sglang_kvtc.kernels.attention import AttentionBackend, checked_new_lens, known_new_lens

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
"""Head sizes of FlashInfer's kernels (DISPATCH_HEAD_DIM in utils.cuh) for both K and V."""
TENSOR_CORE_GROUP = 4
"""Query heads per KV head from which on tensor cores decode: the other kernel is made for 1, 2, 3, 4, 6, 8 and 16 only
(DISPATCH_GQA_GROUP_SIZE), and SGLang draws the line there too."""
WORKSPACE_BYTES = 384 << 20
"""Results of splits, shared by all wrappers, which run one after the other; SGLang's size."""
DECODE_PLAN_BYTES = 1 << 20
"""A plan of one layer's decoding: 12 bytes per list and split, 8 per list. FlashInfer's own size is 8 MiB, which for
each of many layers would be much, on the device and again in pinned memory."""


@dataclass(frozen=True, slots=True)
class PlannedLists:
    """Lists of one layer of `batch` requests, to be planned for.

    last_page_len: table.kv_last_page_len on the host. For `extend` only: q_indptr i32[batch * num_kv_heads + 1] on the
    host, the first query of each list, and rows i64[num_new_tokens * num_kv_heads] on the device, the place of each of
    these queries, by list and token, among those by token and KV head.
    """

    layer: int
    batch: int
    table: PageTable
    last_page_len: torch.Tensor
    q_indptr: torch.Tensor | None
    rows: torch.Tensor | None


@dataclass(slots=True)
class _Planned:
    """A wrapper and what it was last planned for."""

    wrapper: Any
    lists: PlannedLists | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None


class FlashInferBackend(AttentionBackend[PlannedLists]):
    """See the module. Not for CUDA graphs: plans cannot be captured."""

    name = "flashinfer"

    def __init__(self, device: torch.device, flashinfer: Any, workspace_bytes: int = WORKSPACE_BYTES) -> None:
        """flashinfer: the package. workspace_bytes: memory on `device` for results of splits, once for all layers."""
        self._device, self._flashinfer = device, flashinfer
        # FlashInfer wants it zeroed before its first use.
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        self._decoders: dict[tuple[int, bool], _Planned] = {}
        self._prefill: _Planned | None = None

    def lists(
        self, tables: PageTables, requests: Sequence[int] | torch.Tensor, new_lens: Sequence[int] | None = None
    ) -> list[PlannedLists]:
        """See the base class. Nothing is read from the device."""
        lens = checked_new_lens(requests, new_lens)
        of_layers = tables.batches(requests)
        q_indptr = rows = None
        if lens is not None:
            heads = len(of_layers[0].kv_last_page_len) // len(lens) if lens else 1
            counts = torch.tensor(lens, dtype=torch.int64)
            q_indptr = torch.zeros(len(lens) * heads + 1, dtype=torch.int32)
            torch.cumsum(counts.repeat_interleave(heads), 0, out=q_indptr[1:])
            tokens = torch.arange(int(counts.sum())).split(list(lens))
            by_list = [(of[None] * heads + torch.arange(heads)[:, None]).flatten() for of in tokens]
            rows = torch.cat([torch.empty(0, dtype=torch.int64), *by_list]).to(self._device, non_blocking=True)
        return [
            PlannedLists(layer, len(requests), table, table.kv_indptr_host.diff().clamp(max=1), q_indptr, rows)
            for layer, table in enumerate(of_layers)
        ]

    def decode(
        self,
        queries: torch.Tensor,
        k_cells: torch.Tensor,
        v_cells: torch.Tensor,
        lists: PlannedLists,
        scaling: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the base class. Queries and cells are fp16 or bf16, head sizes those of HEAD_DIMS."""
        group = _checked(queries, k_cells, v_cells, lists, out)
        if len(queries) != lists.batch:
            raise ConfigError(f"there are {len(queries)} queries for {lists.batch} requests: expected one of each")
        result = out if out is not None and out.is_contiguous() else queries.new_empty(queries.shape)
        if int(lists.table.kv_indptr_host[-1]) == 0:
            return _written(result.zero_(), out)
        uses_tensor_cores = group >= TENSOR_CORE_GROUP
        key = (lists.layer, uses_tensor_cores)
        if key not in self._decoders:
            wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_tensor_cores=uses_tensor_cores, backend="fa2"
            )
            plan = torch.empty(DECODE_PLAN_BYTES, dtype=torch.uint8, device=self._device)
            wrapper.reset_workspace_buffer(self._workspace, plan)
            self._decoders[key] = _Planned(wrapper)
        planned = self._decoders[key]
        self._plan(
            planned,
            lists,
            indptr=lists.table.kv_indptr_host,
            indices=lists.table.kv_indices,
            last_page_len=lists.last_page_len,
            num_qo_heads=group,
            num_kv_heads=1,
            head_dim=queries.shape[2],
            page_size=1,
            q_data_type=queries.dtype,
            kv_data_type=k_cells.dtype,
            sm_scale=scaling,
        )
        shape = (len(lists.last_page_len), group, queries.shape[2])
        planned.wrapper.run(queries.reshape(shape), _as_pages(k_cells, v_cells), out=result.view(shape))
        return _written(result, out)

    def extend(
        self,
        queries: torch.Tensor,
        k_cells: torch.Tensor,
        v_cells: torch.Tensor,
        lists: PlannedLists,
        scaling: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the base class. Queries and cells are fp16 or bf16, head sizes those of HEAD_DIMS."""
        q_indptr, rows = known_new_lens(lists.q_indptr), known_new_lens(lists.rows)
        group, num_rows = _checked(queries, k_cells, v_cells, lists, out), len(rows)
        if num_rows * group != len(queries) * queries.shape[1]:
            raise ConfigError(
                f"there are {len(queries)} queries of {queries.shape[1]} heads, but new tokens for {num_rows * group} "
                "heads of queries: expected as many queries as new_lens adds up to"
            )
        result = out if out is not None and out.is_contiguous() else queries.new_empty(queries.shape)
        if num_rows == 0:
            return _written(result, out)
        if self._prefill is None:
            wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")
            self._prefill = _Planned(wrapper)
        self._plan(
            self._prefill,
            lists,
            qo_indptr=q_indptr,
            paged_kv_indptr=lists.table.kv_indptr_host,
            paged_kv_indices=lists.table.kv_indices,
            paged_kv_last_page_len=lists.last_page_len,
            num_qo_heads=group,
            num_kv_heads=1,
            head_dim_qk=queries.shape[2],
            page_size=1,
            causal=True,
            q_data_type=queries.dtype,
            kv_data_type=k_cells.dtype,
            sm_scale=scaling,
        )
        by_token = (num_rows, group, queries.shape[2])
        of_lists = queries.reshape(by_token).index_select(0, rows)
        attended = torch.empty_like(of_lists)
        self._prefill.wrapper.run(of_lists, _as_pages(k_cells, v_cells), out=attended)
        result.view(by_token)[rows] = attended
        return _written(result, out)

    def _plan(self, planned: _Planned, lists: PlannedLists, **arguments: Any) -> None:
        """Plan, unless the last plan was for these very lists and arguments."""
        scalars = {name: value for name, value in arguments.items() if not isinstance(value, torch.Tensor)}
        if planned.lists is lists and planned.arguments == scalars:
            return
        # A plan is copied from pinned memory as the stream gets there: it must not be overwritten before.
        if planned.copied is not None:
            planned.copied.synchronize()
        planned.wrapper.plan(**arguments)
        planned.lists, planned.arguments = lists, scalars
        if self._device.type == "cuda":
            planned.copied = torch.cuda.Event()
            planned.copied.record(torch.cuda.current_stream(self._device))


def _checked(
    queries: torch.Tensor,
    k_cells: torch.Tensor,
    v_cells: torch.Tensor,
    lists: PlannedLists,
    out: torch.Tensor | None,
) -> int:
    """Query heads per KV head."""
    shapes = f"queries {list(queries.shape)}, k_cells {list(k_cells.shape)} and v_cells {list(v_cells.shape)}"
    if queries.dim() != 3 or k_cells.dim() != 2 or v_cells.dim() != 2 or queries.shape[2] != k_cells.shape[1]:
        raise ConfigError(f"{shapes} do not fit: expected 3, 2 and 2 dimensions and one head size")
    if not queries.dtype == k_cells.dtype == v_cells.dtype or queries.dtype not in DTYPES:
        raise ConfigError(
            f"queries, k_cells and v_cells are {queries.dtype}, {k_cells.dtype} and {v_cells.dtype}: flashinfer takes "
            "one of float16 and bfloat16 for all; use triton for others"
        )
    if k_cells.shape != v_cells.shape or k_cells.shape[1] not in HEAD_DIMS:
        raise ConfigError(f"{shapes}: flashinfer takes heads of {HEAD_DIMS}, of one size for K and V; use triton")
    if k_cells.stride() != v_cells.stride() or k_cells.stride(1) != 1:
        raise ConfigError(
            f"k_cells have strides {k_cells.stride()} and v_cells {v_cells.stride()}: flashinfer takes the same for "
            "both, the last one 1"
        )
    if out is not None and (out.shape != queries.shape or out.dtype != queries.dtype):
        raise ConfigError(
            f"out is {out.dtype}{list(out.shape)}: expected {queries.dtype}{list(queries.shape)} as the queries"
        )
    heads = len(lists.last_page_len) // lists.batch if lists.batch else 1
    if queries.shape[1] % heads:
        raise ConfigError(f"there are {queries.shape[1]} heads of queries for {heads} KV heads: expected a multiple")
    return queries.shape[1] // heads


def _as_pages(k_cells: torch.Tensor, v_cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views [num_pages, page_size, num_kv_heads, head_dim] of FlashInfer's layout NHD."""
    return k_cells[:, None, None], v_cells[:, None, None]


def _written(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return result if out is None or result is out else out.copy_(result)
