"""One interface for attention over a cache in which every KV head of every request keeps tokens of its own.

The layout of cells and lists is that of `sglang_kvtc.eviction.attention`, which is the oracle of every backend:

| name | device | lists | per step on the host |
| --- | --- | --- | --- |
| torch | CPU | copied by `PageTables.batches` | everything |
| triton | GPU | read in place in `PageTables.arena` | nothing; fit for CUDA graphs |
| flashinfer | GPU | copied by `PageTables.batches` | a plan per layer |

A backend is resolved once, by name, and never replaced by another one.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.eviction import attention
from sglang_kvtc.eviction.cell_lists import Scratch
from sglang_kvtc.eviction.page_table import PageTable, PageTables

BACKEND_NAMES = ("auto", "torch", "triton", "flashinfer")

Lists = TypeVar("Lists")
logger = logging.getLogger(__name__)


class AttentionBackend(ABC, Generic[Lists]):
    """Attention of the tokens of a step to the cells that their requests have kept.

    name: what a user asks for, and what ran.
    """

    name: ClassVar[str]

    @abstractmethod
    def lists(
        self, tables: PageTables, requests: Sequence[int] | torch.Tensor, new_lens: Sequence[int] | None = None
    ) -> list[Lists]:
        """The lists of a batch as this backend reads them, one entry per layer, made once per step.

        requests: as in `PageTables.batch`. new_lens: new tokens of each request, 0 or more, for `extend`; their cells
        are appended already and end every list. None for `decode`: one new token per request.

        They hold until the next `append`, `set` or `remove` of `tables`. Raises ConfigError for another number of
        `new_lens` than of requests.
        """

    @abstractmethod
    def decode(
        self,
        queries: torch.Tensor,
        k_cells: torch.Tensor,
        v_cells: torch.Tensor,
        lists: Lists,
        scaling: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one token per request to all tokens of its lists, its own among them.

        queries: dtype[batch, num_heads, head_dim]; heads that share a KV head are neighbours. k_cells: [num_cells,
        head_dim] and v_cells: [num_cells, v_head_dim] of the layer of `lists`. scaling: factor of the logits. out:
        dtype[batch, num_heads, v_head_dim] of any strides, to be written and returned; None for a new one.

        Heads of an empty list are 0. Raises ConfigError for arguments that do not fit one another or the backend.
        """

    @abstractmethod
    def extend(
        self,
        queries: torch.Tensor,
        k_cells: torch.Tensor,
        v_cells: torch.Tensor,
        lists: Lists,
        scaling: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of the new tokens of each request to themselves and to all earlier tokens of its lists.

        queries: dtype[num_new_tokens, num_heads, head_dim], request after request. lists: made with `new_lens`.
        Otherwise as in `decode`; out: dtype[num_new_tokens, num_heads, v_head_dim].
        """


@dataclass(frozen=True, slots=True)
class CopiedLists:
    """Lists of one layer, one after the other; new_lens: see `AttentionBackend.lists`."""

    table: PageTable
    new_lens: tuple[int, ...] | None


class TorchBackend(AttentionBackend[CopiedLists]):
    """`sglang_kvtc.eviction.attention`, on the CPU."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError for any device but the CPU."""
        if device.type != "cpu":
            raise ConfigError(f"attention backend torch on {device}: it is for the CPU; use triton, flashinfer or auto")
        self._scratch = Scratch()

    def lists(
        self, tables: PageTables, requests: Sequence[int] | torch.Tensor, new_lens: Sequence[int] | None = None
    ) -> list[CopiedLists]:
        """See the base class."""
        lens = checked_new_lens(requests, new_lens)
        return [CopiedLists(table, lens) for table in tables.batches(requests)]

    def decode(
        self,
        queries: torch.Tensor,
        k_cells: torch.Tensor,
        v_cells: torch.Tensor,
        lists: CopiedLists,
        scaling: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the base class; dtypes are those of `sglang_kvtc.eviction.attention.decode_attention`."""
        table = lists.table
        return attention.decode_attention(
            queries, k_cells, v_cells, table.kv_indptr, table.kv_indices, scaling, out, self._scratch
        )

    def extend(
        self,
        queries: torch.Tensor,
        k_cells: torch.Tensor,
        v_cells: torch.Tensor,
        lists: CopiedLists,
        scaling: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the base class; dtypes are those of `sglang_kvtc.eviction.attention.extend_attention`."""
        table, new_lens = lists.table, known_new_lens(lists.new_lens)
        return attention.extend_attention(
            queries, k_cells, v_cells, table.kv_indptr, table.kv_indices, new_lens, scaling, out, self._scratch
        )


@dataclass(frozen=True, slots=True)
class ArenaLists:
    """Lists of one layer where they lie, all on the device.

    arena: i32[size]; starts: i64[batch * num_kv_heads]; lengths: i32 of the same shape. For `extend` only: q_indptr
    i32[batch + 1], the first new token of each request, and max_new, the most new tokens of any.
    A captured CUDA graph keeps these tensors: copy what later steps have into them.
    """

    arena: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    q_indptr: torch.Tensor | None = None
    max_new: int = 0


class TritonBackend(AttentionBackend[ArenaLists]):
    """`sglang_kvtc.kernels.triton_ops.paged_attention`."""

    name = "triton"

    def __init__(self, device: torch.device, num_splits: int | None = None) -> None:
        """num_splits: pieces in which a list is decoded; None for as many as fill the device.

        Raises ConfigError without Triton, and for the CPU unless Triton interprets its kernels.
        """
        self._device, self._num_splits = device, num_splits
        self._kernels = _imported("sglang_kvtc.kernels.triton_ops.paged_attention", "triton", self.name)
        is_interpreted = _imported("sglang_kvtc.kernels.triton_ops.launch", "triton", self.name).IS_INTERPRETED
        if device.type != "cuda" and not (device.type == "cpu" and is_interpreted):
            raise ConfigError(
                f"attention backend triton on {device}: it is for GPUs; use torch on a CPU (or, for tests, set "
                "TRITON_INTERPRET=1 before Triton is imported)"
            )

    def lists(
        self, tables: PageTables, requests: Sequence[int] | torch.Tensor, new_lens: Sequence[int] | None = None
    ) -> list[ArenaLists]:
        """See the base class. Nothing is read from the device."""
        lens = checked_new_lens(requests, new_lens)
        q_indptr = None
        if lens is not None:
            counts = torch.tensor((0, *lens), dtype=torch.int32)
            q_indptr = counts.cumsum(0, dtype=torch.int32).to(self._device, non_blocking=True)
        max_new = max(lens or (0,))
        extents = [tables.extents(requests, layer) for layer in range(tables.lengths(requests).shape[1])]
        return [ArenaLists(tables.arena, of.starts, of.lengths, q_indptr, max_new) for of in extents]

    def decode(
        self,
        queries: torch.Tensor,
        k_cells: torch.Tensor,
        v_cells: torch.Tensor,
        lists: ArenaLists,
        scaling: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the base class; queries are bf16, fp16 or fp32. Can be captured in a CUDA graph."""
        result: torch.Tensor = self._kernels.decode_attention(
            queries, k_cells, v_cells, lists.arena, lists.starts, lists.lengths, scaling, out, self._num_splits
        )
        return result

    def extend(
        self,
        queries: torch.Tensor,
        k_cells: torch.Tensor,
        v_cells: torch.Tensor,
        lists: ArenaLists,
        scaling: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the base class; queries are bf16, fp16 or fp32."""
        result: torch.Tensor = self._kernels.extend_attention(
            queries, k_cells, v_cells, lists.arena, lists.starts, lists.lengths, known_new_lens(lists.q_indptr),
            lists.max_new, scaling, out,
        )  # fmt: skip
        return result


def resolve_backend(name: str, device: torch.device | str) -> AttentionBackend[Any]:
    """The attention backend of that name for tensors on `device`.

    name: one of BACKEND_NAMES. auto is torch on the CPU and triton on a GPU, which needs no plan for each layer and
    works inside CUDA graphs. Raises ConfigError for other names and where the named backend cannot run: there is no
    fallback.
    """
    device = torch.device(device)
    chosen = name if name != "auto" else "torch" if device.type == "cpu" else "triton"
    backend: AttentionBackend[Any]
    if chosen == "torch":
        backend = TorchBackend(device)
    elif chosen == "triton":
        backend = TritonBackend(device)
    elif chosen == "flashinfer":
        if device.type != "cuda":
            raise ConfigError(f"attention backend flashinfer on {device}: it is for NVIDIA GPUs; use torch or auto")
        module = _imported("sglang_kvtc.kernels.flashinfer_attention", "flashinfer", chosen)
        backend = module.FlashInferBackend(device, _imported("flashinfer", "flashinfer", chosen))
    else:
        raise ConfigError(f"attention backend {name!r} is unknown: expected one of {', '.join(BACKEND_NAMES)}")
    logger.info("attention over kept tokens runs on %s, backend %s (asked for: %s)", device, backend.name, name)
    return backend


def checked_new_lens(requests: Sequence[int] | torch.Tensor, new_lens: Sequence[int] | None) -> tuple[int, ...] | None:
    """`new_lens` as `AttentionBackend.lists` takes it. Raises ConfigError unless there is a count for each request."""
    if new_lens is None:
        return None
    lens = tuple(int(count) for count in new_lens)
    if len(lens) != len(requests) or min(lens, default=0) < 0:
        raise ConfigError(f"new_lens is {list(lens)} for {len(requests)} requests: expected a count of each, 0 or more")
    return lens


_T = TypeVar("_T")


def known_new_lens(value: _T | None) -> _T:
    """What `extend` needs of its lists. Raises ConfigError where they were made for `decode`."""
    if value is None:
        raise ConfigError("these lists were made for decode: make them with new_lens for extend")
    return value


def _imported(module: str, package: str, backend: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"attention backend {backend} needs the package {package}, which cannot be imported ({error}): install it "
            "or choose another backend"
        ) from error
