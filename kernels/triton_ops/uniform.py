"""Uniform plans on a GPU: coefficients to packed symbols and codes of steps, and back.

The oracle is `sglang_kvtc.codec.uniform.UniformQuantizer` with `sglang_kvtc.bitstream.bitpack`. The step of a token
follows from a sum of fp32 over its components, which depends on its order, in torch even on the instructions of the
CPU: its code may be a neighbour of the oracle's where what the token needs is within the rounding of that sum of an
entry of the table. Either code is valid, and given the codes, symbols are the same on every device, since nothing is
fused (`pack.EXACT_OPTIONS`) and divisions are rounded correctly.

Coefficients are exact in fp32, so they are the oracle's in every dtype.

CUDA graphs: as in `quantize.py`.

Roofline. For C components of mean width w, a token of the encoder reads 4 C bytes twice, once for its step and once for
its symbols, and writes w C / 8 + 1: with w = 6, 8.8 bytes and 10 operations in fp32 per component. A token of the
decoder reads w C / 8 + 1 bytes and writes 2 C in 16 bits: 2.8 bytes and 1 operation in fp32. As in `quantize.py` both
are bound by memory; the second reading finds coefficients in the L2 cache (50 MB on an H200) where they fit it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.codec.uniform import SCALE_ONE, UniformQuantizer
from sglang_kvtc.kernels.triton_ops.launch import device_of, written_output
from sglang_kvtc.kernels.triton_ops.pack import (
    EXACT_OPTIONS,
    OUT_DTYPES,
    check_components,
    contiguous,
    first_byte,
    load_symbols,
    refusal_flag,
    row_starts,
    store_symbols,
    tile,
)

NUM_STEPS = 256
SUM_ROWS, SUM_TOKENS = 64, 16
"""Components and tokens of a tile of sums."""
SPLIT_ROWS = 256
"""Components that one program adds up: enough programs for a chunk of 512 tokens."""
STEP_TOKENS = 16
"""Tokens whose steps one program looks up."""
ENCODED_ROWS, DECODED_ROWS, TILE_WORDS = 16, 32, 8
"""Rows and words of eight tokens in a tile, as in `quantize.py`."""
_SCALE_ONE = tl.constexpr(SCALE_ONE)
_NUM_STEPS = tl.constexpr(NUM_STEPS)


@dataclass(frozen=True, slots=True)
class LevelTables:
    """A uniform plan on a device. Nothing changes after construction.

    widths: i32[num_components]. upper_starts, lower_starts: i32[9, num_components] (pack.row_starts), of the row of
    each component's symbols or of their upper 8 bits, and of that of the other bits, if there are any. steps: f32[256].
    inverse_deviations, inverse_levels: f32[num_components]. row_widths: u8[num_rows], on the host.
    """

    widths: torch.Tensor
    upper_starts: torch.Tensor
    lower_starts: torch.Tensor
    steps: torch.Tensor
    inverse_deviations: torch.Tensor
    inverse_levels: torch.Tensor
    row_widths: npt.NDArray[np.uint8]

    @classmethod
    def from_quantizer(cls, quantizer: UniformQuantizer, device: torch.device | str) -> LevelTables:
        """The tables of a plan, copied to `device`: once, outside of what is captured."""
        none = np.zeros(0, np.int64)
        widths = np.concatenate([none, *(np.full(run.size, run.width) for run in quantizer.runs)])
        upper = np.concatenate([none, *(run.row + np.arange(run.size) for run in quantizer.runs)])
        # Components of one row get some row that is never read.
        lower = upper + np.concatenate(
            [none, *(np.full(run.size, run.size if run.lower_bits else 0) for run in quantizer.runs)]
        )
        starts = row_starts(quantizer.row_widths)

        def on_device(array: npt.NDArray[np.integer]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device)

        return cls(
            widths=on_device(widths),
            upper_starts=on_device(starts[:, upper]),
            lower_starts=on_device(starts[:, lower]),
            steps=quantizer.steps.to(device),
            inverse_deviations=quantizer.inverse_deviations[:, 0].to(device),
            inverse_levels=quantizer.inverse_levels[:, 0].to(device),
            row_widths=quantizer.row_widths,
        )

    @property
    def device(self) -> torch.device:
        return self.widths.device

    @property
    def num_components(self) -> int:
        return len(self.widths)


@triton.jit  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def]
    coefficients,
    squares,
    reaches,
    inverse_deviations,
    inverse_levels,
    strides,
    num_components,
    num_tokens,
    split_rows: tl.constexpr,
    rows: tl.constexpr,
    tokens: tl.constexpr,
):
    """Program (split, block of tokens): over the split's components, squares f32[splits, num_tokens] = sum of
    (coefficient / deviation)**2, and reaches of the same shape = max of abs(coefficient) / largest level.
    """
    split = tl.program_id(0)
    token = tl.program_id(1) * tokens + tl.arange(0, tokens)
    is_token = token < num_tokens
    total = tl.zeros((tokens,), tl.float32)
    reach = tl.zeros((tokens,), tl.float32)
    for chunk in range(0, split_rows, rows):
        row = split * split_rows + chunk + tl.arange(0, rows)
        exists = row < num_components
        values = tl.load(
            coefficients + row.to(tl.int64)[:, None] * strides[0] + token.to(tl.int64)[None, :] * strides[1],
            mask=exists[:, None] & is_token[None, :],
            other=0.0,
        )
        units = values * tl.load(inverse_deviations + row, mask=exists, other=0.0)[:, None]
        total += tl.sum(units * units, 0)
        levels = tl.abs(values * tl.load(inverse_levels + row, mask=exists, other=0.0)[:, None])
        reach = tl.maximum(reach, tl.max(levels, 0))
    tl.store(squares + split * num_tokens + token, total, mask=is_token)
    tl.store(reaches + split * num_tokens + token, reach, mask=is_token)


@triton.jit  # type: ignore[untyped-decorator]
def _choose_steps(  # type: ignore[no-untyped-def]
    squares,
    reaches,
    steps,
    codes,
    refused,
    num_components,
    num_splits,
    num_tokens,
    tokens: tl.constexpr,
):
    """Program i: codes u8[num_tokens] of a block of tokens, the first step that is not below what the token needs."""
    token = tl.program_id(0) * tokens + tl.arange(0, tokens)
    is_token = token < num_tokens
    total = tl.zeros((tokens,), tl.float32)
    reach = tl.zeros((tokens,), tl.float32)
    for split in range(0, num_splits):
        total += tl.load(squares + split * num_tokens + token, mask=is_token, other=0.0)
        reach = tl.maximum(reach, tl.load(reaches + split * num_tokens + token, mask=is_token, other=0.0))
    mean = tl.div_rn(total, tl.zeros((tokens,), tl.float32) + num_components)
    energy = tl.sqrt_rn(mean) * tl.load(steps + _SCALE_ONE)
    largest = tl.load(steps + _NUM_STEPS - 1)
    # Any NaN or infinity is in the energy: max passes over NaN, and so would a comparison that asks for too much.
    is_refused = is_token & ~((energy <= largest) & (reach <= largest))
    needed = tl.maximum(energy, reach)
    table = tl.load(steps + tl.arange(0, _NUM_STEPS))
    below = (table[None, :] < needed[:, None]).to(tl.int32)
    tl.store(codes + token, tl.minimum(tl.sum(below, 1), _NUM_STEPS - 1).to(tl.uint8), mask=is_token)
    tl.store(refused + tl.zeros_like(token), 1, mask=is_refused)


@triton.jit  # type: ignore[untyped-decorator]
def _quantize_and_pack(  # type: ignore[no-untyped-def]
    coefficients,
    codes,
    packed,
    widths,
    upper_starts,
    lower_starts,
    steps,
    strides,
    num_components,
    num_tokens,
    rows: tl.constexpr,
    tile_words: tl.constexpr,
):
    """Program (i, block of tokens): `rows` components. symbol = round(coefficient / step) + 2**(width - 1)."""
    row, word, token = tile(rows, tile_words)
    exists = row < num_components
    is_token = token < num_tokens
    width = tl.load(widths + row, mask=exists, other=2)
    step = tl.load(steps + tl.load(codes + token, mask=is_token, other=0).to(tl.int32))
    values = tl.load(
        coefficients + row.to(tl.int64) * strides[0] + token.to(tl.int64) * strides[1],
        mask=exists & is_token,
        other=0.0,
    )
    offset = (1 << (width - 1)).to(tl.float32)
    # The oracle, too, multiplies by the rounded inverse, and cuts off after adding a half.
    unsigned = values * tl.div_rn(1.0, step) + (offset + 0.5)
    symbols = tl.minimum(tl.maximum(unsigned, 0.0), 2.0 * offset - 1.0).to(tl.int32)
    lower_bits = tl.maximum(width - 8, 0)
    begin = first_byte(upper_starts, row, num_components, num_tokens, exists)
    store_symbols(packed, begin, width - lower_bits, word, symbols >> lower_bits, num_tokens, exists)
    if tl.max(width) > 8:
        begin = first_byte(lower_starts, row, num_components, num_tokens, exists)
        store_symbols(packed, begin, lower_bits, word, symbols & ((1 << lower_bits) - 1), num_tokens, exists)


@triton.jit  # type: ignore[untyped-decorator]
def _unpack_and_dequantize(  # type: ignore[no-untyped-def]
    packed,
    codes,
    out,
    widths,
    upper_starts,
    lower_starts,
    steps,
    strides,
    num_components,
    num_tokens,
    rows: tl.constexpr,
    tile_words: tl.constexpr,
):
    """Program (i, block of tokens): `rows` components. (symbol - 2**(width - 1)) x step, exact in fp32."""
    row, word, token = tile(rows, tile_words)
    exists = row < num_components
    is_token = token < num_tokens
    width = tl.load(widths + row, mask=exists, other=2)
    lower_bits = tl.maximum(width - 8, 0)
    begin = first_byte(upper_starts, row, num_components, num_tokens, exists)
    symbols = load_symbols(packed, begin, width - lower_bits, word, num_tokens, exists)
    if tl.max(width) > 8:
        begin = first_byte(lower_starts, row, num_components, num_tokens, exists)
        lower = load_symbols(packed, begin, lower_bits, word, num_tokens, exists)
        symbols = (symbols << lower_bits) + lower
    step = tl.load(steps + tl.load(codes + token, mask=is_token, other=0).to(tl.int32))
    tl.store(
        out + row.to(tl.int64) * strides[0] + token.to(tl.int64) * strides[1],
        ((symbols - (1 << (width - 1))).to(tl.float32) * step).to(out.dtype.element_ty),
        mask=exists & is_token,
    )


def quantize_and_pack(
    coefficients: torch.Tensor,
    tables: LevelTables,
    *,
    codes: torch.Tensor | None = None,
    packed: torch.Tensor | None = None,
    refused: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise the kept components of a chunk and pack their symbols.

    coefficients: f32[num_components, num_tokens] of any strides; those of [num_tokens, num_components] are read slower.
    codes: u8[num_tokens], packed: u8[packed bytes], to be written and returned: the contents of the sections of
        FORMAT.md section 4.1.
    refused: i32[1], set to 1 where the oracle returns None, for coefficients that are not finite or too large for any
        step; what was written is then of no use. It is never cleared, so that several operations may share one.

    Returns codes, packed and refused. All tensors lie on the device of the tables, a GPU or, under Triton's
    interpreter, the CPU; nothing is waited for. Raises ConfigError for other shapes, dtypes, strides and devices.
    """
    num_components = tables.num_components
    num_tokens = check_components("coefficients", coefficients, (torch.float32,), num_components, tables.device)
    codes = contiguous("codes", codes, torch.uint8, (num_tokens,), tables.device)
    num_bytes = bitpack.packed_bytes(tables.row_widths, num_tokens)
    packed = contiguous("packed", packed, torch.uint8, (num_bytes,), tables.device)
    refused = refusal_flag(refused, tables.device)
    if not num_components:
        codes.fill_(SCALE_ONE)
    elif num_tokens:
        num_splits = triton.cdiv(num_components, SPLIT_ROWS)
        squares, reaches = torch.empty(2, num_splits, num_tokens, device=tables.device)
        with device_of(coefficients):
            _measure[(num_splits, triton.cdiv(num_tokens, SUM_TOKENS))](
                coefficients, squares, reaches, tables.inverse_deviations, tables.inverse_levels,
                coefficients.stride(), num_components, num_tokens, split_rows=SPLIT_ROWS, rows=SUM_ROWS,
                tokens=SUM_TOKENS, **EXACT_OPTIONS,
            )  # fmt: skip
            _choose_steps[(triton.cdiv(num_tokens, STEP_TOKENS),)](
                squares, reaches, tables.steps, codes, refused, num_components, num_splits, num_tokens,
                tokens=STEP_TOKENS, **EXACT_OPTIONS,
            )  # fmt: skip
            _quantize_and_pack[_grid(num_components, num_tokens, ENCODED_ROWS)](
                coefficients, codes, packed, tables.widths, tables.upper_starts, tables.lower_starts, tables.steps,
                coefficients.stride(), num_components, num_tokens, rows=ENCODED_ROWS, tile_words=TILE_WORDS,
                **EXACT_OPTIONS,
            )  # fmt: skip
    return codes, packed, refused


def unpack_and_dequantize(
    packed: torch.Tensor, codes: torch.Tensor, tables: LevelTables, out: torch.Tensor
) -> torch.Tensor:
    """Inverse of `quantize_and_pack`, exact in fp32 and rounded to the dtype of `out`.

    packed, codes: as `quantize_and_pack` makes them. out: as in `quantize.unpack_and_dequantize`. Raises ConfigError
    for other shapes, dtypes and devices.
    """
    num_components = tables.num_components
    num_tokens = check_components("out", out, OUT_DTYPES, num_components, tables.device)
    contiguous("codes", codes, torch.uint8, (num_tokens,), tables.device)
    num_bytes = bitpack.packed_bytes(tables.row_widths, num_tokens)
    contiguous("packed", packed, torch.uint8, (num_bytes,), tables.device)
    if num_components and num_tokens:
        result = written_output(out)
        with device_of(out):
            _unpack_and_dequantize[_grid(num_components, num_tokens, DECODED_ROWS)](
                packed, codes, result, tables.widths, tables.upper_starts, tables.lower_starts, tables.steps,
                result.stride(), num_components, num_tokens, rows=DECODED_ROWS, tile_words=TILE_WORDS,
                **EXACT_OPTIONS,
            )  # fmt: skip
        if result is not out:
            out.copy_(result)
    return out


def _grid(num_components: int, num_tokens: int, rows: int) -> tuple[int, int]:
    return triton.cdiv(num_components, rows), triton.cdiv(num_tokens, 8 * TILE_WORDS)
