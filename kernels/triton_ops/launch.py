"""How kernels are launched: on which device, in which pieces, and what Triton's interpreter makes necessary."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_kvtc.errors import ConfigError

MAX_HEAD_DIM = 256
MAX_SPLITS = 64
"""The kernel that combines splits holds those of a query head at once."""
WAVES = 4
"""Programs per multiprocessor from which on more splits hide no more latency."""
BLOCK_BYTES = 1 << 14
"""K, or V, of the cells that are loaded at once: a few such blocks fit the shared memory of every GPU."""
QUERY_BYTES = 1 << 15
"""Queries that attend at once, likewise."""
OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
"""Triton's names of the dtypes that kernels multiply."""

IS_INTERPRETED = not isinstance(tl.sum, triton.JITFunction)
"""Whether TRITON_INTERPRET was set when Triton was imported: the kernels then run on the CPU, for tests.

The interpreter of Triton 3.8 multiplies the bits of bf16 instead of its values, and rounds to it towards 0. So for bf16
it is given fp32 to multiply and to write, and torch rounds the result.
"""


def written_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that kernels multiply and write where `dtype` is wanted: another one only under the interpreter."""
    return torch.float32 if IS_INTERPRETED and dtype == torch.bfloat16 else dtype


def written_output(out: torch.Tensor) -> torch.Tensor:
    """What kernels write: `out` itself, or memory to be copied to it under the interpreter."""
    dtype = written_dtype(out.dtype)
    return out if dtype == out.dtype else torch.empty(out.shape, dtype=dtype, device=out.device)


def device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it that of `tensor`."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def splits_for(num_lists: int, device: torch.device) -> int:
    """Splits with which decoding `num_lists` lists fills a device, 1 on the CPU. Nothing is waited for."""
    if device.type != "cuda" or num_lists == 0:
        return 1
    programs = WAVES * torch.cuda.get_device_properties(device).multi_processor_count
    return int(min(MAX_SPLITS, max(1, programs // num_lists)))


def block_rows(queries: torch.Tensor, group: int) -> int:
    """Rows of a block of queries of several tokens, each with `group` heads: a power of two, 16 or more."""
    width = max(16, triton.next_power_of_2(queries.shape[2])) * written_dtype(queries.dtype).itemsize
    return int(max(16, min(64, QUERY_BYTES // width), triton.next_power_of_2(group)))


def kernel_constants(queries: torch.Tensor, v_cells: torch.Tensor, rows: int) -> dict[str, Any]:
    """Constants of a kernel. Blocks are powers of two, and at least the 16 that tensor cores multiply."""
    head_dim, v_head_dim = queries.shape[2], v_cells.shape[1]
    head_block, v_head_block = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, v_head_dim))
    widest = max(head_block, v_head_block)
    if widest > MAX_HEAD_DIM:
        raise ConfigError(f"heads of {head_dim} and {v_head_dim} dimensions: expected at most {MAX_HEAD_DIM}")
    dtype = written_dtype(queries.dtype)
    return {
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "head_block": head_block,
        "v_head_block": v_head_block,
        "rows": rows,
        "block_cells": min(64, max(16, BLOCK_BYTES // (widest * dtype.itemsize))),
        "operand": OPERANDS[dtype],
    }
