"""Rows of packed symbols (FORMAT.md section 6) as kernels of both quantisers read and write them.

The oracle is `sglang_kvtc.bitstream.bitpack`. Eight symbols of `width` bits make a word of `width` whole bytes, and a
program works on whole words, so no two programs write to one byte. Widths are numbers that a kernel loads: what is
compiled does not depend on the plan.

Rows have no gaps, so where one begins depends on the number of tokens. With 8 q + r tokens a row of width w has
q w + ceil(r w / 8) bytes; `row_starts` has the sums of ceil(r w / 8) over the rows before each one, for r from 0 to 8,
and a row begins at q x sums[8] + sums[r]. So one table serves chunks of any length.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from sglang_kvtc.errors import ConfigError

EXACT_OPTIONS = {"enable_fp_fusion": False}
"""Options of every launch that makes symbols. A product and a sum that are fused are rounded once instead of twice,
which would change symbols; the interpreter, which never fuses, ignores the option. Division is `tl.div_rn`, since `/`
is not rounded correctly on GPUs."""
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of dequantised coefficients."""


def row_starts(row_widths: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """i32[9, num_rows], see above. row_widths: u8[num_rows]."""
    sizes = (np.arange(9)[:, None] * row_widths.astype(np.int64) + 7) // 8
    before: npt.NDArray[np.int32] = (sizes.cumsum(axis=1) - sizes).astype(np.int32)
    return before


@triton.jit  # type: ignore[untyped-decorator]
def tile(rows: tl.constexpr, words: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of program (i, j): components i32[rows, 1, 1], words i32[1, words, 1] and their tokens i32[1, words, 8]."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)[:, None, None]
    word = tl.program_id(1) * words + tl.arange(0, words)[None, :, None]
    return row, word, word * 8 + tl.arange(0, 8)[None, None, :]


@triton.jit
def first_byte(starts, row, num_rows, num_tokens, exists):  # type: ignore[no-untyped-def]
    """i64, first byte of rows of a plan. starts: from `row_starts`, i32[9, num_rows]."""
    whole = tl.load(starts + 8 * num_rows + row, mask=exists, other=0).to(tl.int64)
    rest = tl.load(starts + (num_tokens % 8) * num_rows + row, mask=exists, other=0)
    return (num_tokens // 8) * whole + rest


@triton.jit
def row_bytes(width, num_tokens):  # type: ignore[no-untyped-def]
    """Packed bytes of a row."""
    return (width * num_tokens + 7) // 8


@triton.jit
def store_symbols(packed, begin, width, word, symbols, num_tokens, exists):  # type: ignore[no-untyped-def]
    """Pack a tile of symbols i32[rows, words, 8] into u8 `packed`; symbols of tokens beyond the last one become 0.

    begin: i64[rows, 1, 1], first byte of each row. width: i32[rows, 1, 1]. word: i32[1, words, 1], its number in the
    row. exists: bool[rows, 1, 1].
    """
    lane = tl.arange(0, 8)[None, None, :]
    bits = tl.where(word * 8 + lane < num_tokens, symbols, 0).to(tl.int64) << (width * lane).to(tl.int64)
    # The bits of the eight do not overlap.
    words = tl.sum(bits, 2, keep_dims=True)
    place = word * width + lane
    tl.store(
        packed + begin + place,
        ((words >> (8 * lane).to(tl.int64)) & 0xFF).to(tl.uint8),
        mask=exists & (lane < width) & (place < row_bytes(width, num_tokens)),
    )


@triton.jit
def load_symbols(packed, begin, width, word, num_tokens, exists):  # type: ignore[no-untyped-def]
    """Inverse of `store_symbols`: i32[rows, words, 8]; rows of width 0 are zeros."""
    lane = tl.arange(0, 8)[None, None, :]
    place = word * width + lane
    parts = tl.load(
        packed + begin + place, mask=exists & (lane < width) & (place < row_bytes(width, num_tokens)), other=0
    )
    words = tl.sum(parts.to(tl.int64) << (8 * lane).to(tl.int64), 2, keep_dims=True)
    symbols = (words >> (width * lane).to(tl.int64)).to(tl.int32)
    return symbols & ((1 << width) - 1)


def check_components(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], num_components: int, device: torch.device
) -> int:
    """Check a tensor dtype[num_components, num_tokens] of any strides and return num_tokens. Raises ConfigError."""
    is_expected = tensor.dim() == 2 and len(tensor) == num_components and tensor.dtype in dtypes
    if not is_expected or tensor.device != device:
        raise ConfigError(
            f"{name} is {tensor.dtype}{list(tensor.shape)} on {tensor.device}: expected "
            f"{' or '.join(map(str, dtypes))} of [{num_components}, num_tokens] on {device}"
        )
    return tensor.shape[1]


def contiguous(
    name: str, tensor: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """The tensor if it is contiguous and has this dtype, shape and device, else a ConfigError; None makes one."""
    if tensor is None:
        return torch.empty(shape, dtype=dtype, device=device)
    is_expected = tensor.shape == shape and tensor.dtype == dtype and tensor.device == device
    if not (is_expected and tensor.is_contiguous()):
        raise ConfigError(
            f"{name} is {tensor.dtype}{list(tensor.shape)} of strides {list(tensor.stride())} on {tensor.device}: "
            f"expected contiguous {dtype}{list(shape)} on {device}"
        )
    return tensor


def refusal_flag(refused: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """i32[1] that kernels set to 1: the caller's own, which is not cleared, or a new one that is 0."""
    if refused is None:
        return torch.zeros(1, dtype=torch.int32, device=device)
    return contiguous("refused", refused, torch.int32, (1,), device)
