"""Lists of cells as kernels take them: what of the arguments can be checked without waiting for the device.

The lists are laid out as in paged_attention.py.
"""

from __future__ import annotations

import torch

from sglang_kvtc.errors import ConfigError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of queries; cells may have any float dtype and are converted to it as they are read."""


def checked_output(
    queries: torch.Tensor,
    k_cells: torch.Tensor,
    v_cells: torch.Tensor,
    arena: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    batch: int,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, int]:
    """Check the arguments of an operation of paged_attention.py on `batch` requests.

    Returns dtype[*queries.shape[:2], v_head_dim] to be written, `out` if it is given, and num_kv_heads. Raises
    ConfigError for shapes, dtypes, strides and devices that do not fit. What lies in the lists is not looked at.
    """
    tensors = {
        "queries": (queries, 3, DTYPES),
        "k_cells": (k_cells, 2, None),
        "v_cells": (v_cells, 2, None),
        "arena": (arena, 1, (torch.int32,)),
        "starts": (starts, 1, (torch.int64,)),
        "lengths": (lengths, 1, (torch.int32,)),
    }
    for name, (tensor, num_dimensions, dtypes) in tensors.items():
        if tensor.device != queries.device:
            raise ConfigError(f"{name} lies on {tensor.device} and queries on {queries.device}: expected one device")
        if tensor.dim() != num_dimensions:
            raise ConfigError(f"{name} has shape {list(tensor.shape)}: expected {num_dimensions} dimensions")
        if tensor.dtype not in dtypes if dtypes else not tensor.is_floating_point():
            expected = ", ".join(map(str, dtypes)) if dtypes else "floats"
            raise ConfigError(f"{name} is {tensor.dtype}: expected {expected}")
        # Pieces of longer tensors may begin anywhere, but their entries are read one after the other.
        if num_dimensions == 1 and not tensor.is_contiguous():
            raise ConfigError(f"{name} has stride {tensor.stride(0)}: expected 1")
    if queries.shape[2] != k_cells.shape[1]:
        raise ConfigError(
            f"queries of shape {list(queries.shape)} do not fit k_cells of shape {list(k_cells.shape)}: expected the "
            "same head size"
        )
    num_kv_heads = len(starts) // batch if batch else 1
    is_counted = len(starts) == len(lengths) == num_kv_heads * batch
    if not is_counted or (batch and (num_kv_heads == 0 or queries.shape[1] % num_kv_heads)):
        raise ConfigError(
            f"there are {len(starts)} starts and {len(lengths)} lengths, for {batch} requests of {queries.shape[1]} "
            "heads: expected one list per request and KV head, and a number of heads that is a multiple of that of KV "
            "heads"
        )
    shape = (*queries.shape[:2], v_cells.shape[1])
    if out is None:
        return queries.new_empty(shape), num_kv_heads
    if out.shape != shape or out.dtype != queries.dtype or out.device != queries.device:
        raise ConfigError(
            f"out is {out.dtype}{list(out.shape)} on {out.device}: expected {queries.dtype}{list(shape)} on "
            f"{queries.device} for these queries and v_cells"
        )
    return out, num_kv_heads
