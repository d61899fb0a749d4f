"""Grouped plans on a GPU: coefficients to packed symbols and parameters, and back.

The oracle is `sglang_kvtc.codec.quantize.GroupedQuantizer` with `sglang_kvtc.bitstream.bitpack`. Bytes and parameters
are the same on every device: nothing is fused (`pack.EXACT_OPTIONS`), divisions are rounded correctly, and minima and
maxima do not depend on their order. Only a shift of 0 may have either sign where a group's minimum is both 0 and -0:
the oracle's sign depends on the order of the components, and coefficients are equal either way.

Groups of width 0, whose shift is the mean, are refused: a sum of fp32 depends on its order, in torch even on the
instructions of the CPU, so no kernel could promise the oracle's bits. The allocator makes no such groups, and
`unpack_and_dequantize` takes those of other writers.

CUDA graphs: launches follow from shapes and the plan, nothing is read from the device, and what is allocated has sizes
that follow from shapes. `refused` is set on the device, to be read when the caller waits for the bytes anyway.

Roofline. For C components of mean width w in G groups, a token of the encoder reads 4 C bytes (twice, the second time
from a cache: a program sees at most 64 KiB) and writes w C / 8 + 4 G; with w = 3 that is 4.4 bytes and 9 operations in
fp32 per component. A token of the decoder reads w C / 8 + 4 G bytes and writes 2 C in 16 bits: 2.4 bytes and 2
operations in fp32. An H200 (4.8 TB/s, 67 Tflop/s in fp32) has 14 for each byte, so both are bound by its memory as long
as the integer operations that pack, a few of 64 bits per component, hide behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.codec.quantize import GroupedQuantizer
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.kernels.triton_ops.launch import device_of, written_output
from sglang_kvtc.kernels.triton_ops.pack import (
    EXACT_OPTIONS,
    OUT_DTYPES,
    check_components,
    contiguous,
    first_byte,
    load_symbols,
    refusal_flag,
    row_bytes,
    row_starts,
    store_symbols,
    tile,
)

TILE_WORDS = 128
"""Words of eight tokens in a tile of the encoder: eight coefficients for each thread of four warps."""
DECODED_ROWS, DECODED_WORDS = 32, 8
"""A tile of the decoder: whole memory sectors on both sides, of 4-bit rows and of 16-bit coefficients."""


@dataclass(frozen=True, slots=True)
class GroupTables:
    """A grouped plan on a device. Nothing changes after construction.

    widths, groups: i32[num_components], bits and group of every kept component. starts: i32[9, num_components]
    (pack.row_starts). first_rows: i32[num_groups], first component of every group. members: the groups of each size
    that occurs, i32[their number]. row_widths: u8[num_components], on the host.
    """

    widths: torch.Tensor
    groups: torch.Tensor
    starts: torch.Tensor
    first_rows: torch.Tensor
    members: tuple[tuple[int, torch.Tensor], ...]
    row_widths: npt.NDArray[np.uint8]

    @classmethod
    def from_quantizer(cls, quantizer: GroupedQuantizer, device: torch.device | str) -> GroupTables:
        """The tables of a plan, copied to `device`: once, outside of what is captured."""
        sizes = np.concatenate([np.zeros(0, np.int64), *(np.full(run.num_groups, run.size) for run in quantizer.runs)])
        numbers = np.arange(len(sizes))

        def on_device(array: npt.NDArray[np.integer]) -> torch.Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device)

        return cls(
            widths=on_device(quantizer.row_widths),
            groups=on_device(np.repeat(numbers, sizes)),
            starts=on_device(row_starts(quantizer.row_widths)),
            first_rows=on_device(sizes.cumsum() - sizes),
            members=tuple((int(size), on_device(numbers[sizes == size])) for size in np.unique(sizes)),
            row_widths=quantizer.row_widths,
        )

    @property
    def device(self) -> torch.device:
        return self.widths.device

    @property
    def num_components(self) -> int:
        return len(self.widths)

    @property
    def num_groups(self) -> int:
        return len(self.first_rows)


@triton.jit
def _round_down(values):  # type: ignore[no-untyped-def]
    """Largest f16 that is not above the value, by the oracle's arithmetic on bits."""
    nearest = values.to(tl.float16)
    bits = nearest.to(tl.int16, bitcast=True)
    below = tl.where(bits < 0, bits + 1, bits - 1).to(tl.float16, bitcast=True)
    return tl.where(nearest.to(tl.float32) > values, below, nearest)


@triton.jit
def _round_up(values):  # type: ignore[no-untyped-def]
    """Smallest f16 that is not below the value, for values of at least 0."""
    nearest = values.to(tl.float16)
    above = (nearest.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
    return tl.where(nearest.to(tl.float32) < values, above, nearest)


@triton.jit
def _is_finite(values):  # type: ignore[no-untyped-def]
    """Of f16."""
    return (values.to(tl.int16, bitcast=True) & 0x7C00) != 0x7C00


@triton.jit  # type: ignore[untyped-decorator]
def _quantize_and_pack(  # type: ignore[no-untyped-def]
    coefficients,
    params,
    packed,
    refused,
    widths,
    starts,
    first_rows,
    members,
    strides,
    num_components,
    num_groups,
    num_members,
    num_tokens,
    size: tl.constexpr,
    rows: tl.constexpr,
    tile_words: tl.constexpr,
):
    """Program (i, block of tokens): the i-th group of this size, or the `rows` groups from rows x i on if size is 1.

    shift = min, rounded down to f16; scale = (max - shift) / (2**width - 1), rounded up to f16;
    symbol = round((coefficient - shift) / scale), clipped to 0 .. 2**width - 1.
    """
    row = tl.arange(0, rows)[:, None, None]
    word = tl.program_id(1) * tile_words + tl.arange(0, tile_words)[None, :, None]
    token = word * 8 + tl.arange(0, 8)[None, None, :]
    is_token = token < num_tokens
    # One group for all rows of the tile, or one for each.
    if size == 1:  # noqa: SIM108 (a constant, which decides what is compiled)
        member = tl.program_id(0) * rows + row
    else:
        member = tl.program_id(0) + tl.zeros((1, 1, 1), tl.int32)
    exists = member < num_members
    group = tl.load(members + member, mask=exists, other=0)
    first_row = tl.load(first_rows + group, mask=exists, other=0)
    width = tl.load(widths + first_row, mask=exists, other=1)
    top = ((1 << width) - 1).to(tl.float32)
    is_value = exists & is_token
    if size == 1:
        places = coefficients + first_row.to(tl.int64) * strides[0] + token.to(tl.int64) * strides[1]
        low = tl.load(places, mask=is_value, other=0.0)
        # min and max pass over NaN, but infinity makes the parameters infinite too.
        low = tl.where(low == low, low, float("inf"))
        high = low
    else:
        places = coefficients + (first_row + row).to(tl.int64) * strides[0] + token.to(tl.int64) * strides[1]
        low = tl.full((1, tile_words, 8), float("inf"), tl.float32)
        high = -low
        for chunk in range(0, size, rows):
            values = tl.load(places + chunk * strides[0], mask=is_value, other=0.0)
            values = tl.where(values == values, values, float("inf"))
            low = tl.minimum(low, tl.min(values, 0, keep_dims=True))
            high = tl.maximum(high, tl.max(values, 0, keep_dims=True))
    rounded_shift = _round_down(low)
    shift = rounded_shift.to(tl.float32)
    rounded_scale = _round_up(tl.div_rn(high - shift, top))
    step = rounded_scale.to(tl.float32)
    param = params + group.to(tl.int64) * num_tokens + token
    tl.store(param, rounded_shift, mask=is_value)
    tl.store(param + num_groups * num_tokens, rounded_scale, mask=is_value)
    is_refused = is_value & ~(_is_finite(rounded_shift) & _is_finite(rounded_scale))
    tl.store(refused + tl.zeros_like(token + member), 1, mask=is_refused)
    # The oracle, too, multiplies by the rounded inverse. Scale 0 is that of equal values which f16 holds exactly.
    has_range = step > 0.0
    per_step = tl.where(has_range, tl.div_rn(1.0, tl.where(has_range, step, 1.0)), 0.0)
    begin = first_byte(starts, first_row, num_components, num_tokens, exists)
    for chunk in range(0, size, rows):
        values = tl.load(places + chunk * strides[0], mask=is_value, other=0.0)
        steps = tl.minimum(tl.maximum((values - shift) * per_step, 0.0), top)
        symbols = (steps + 0.5).to(tl.int32)
        if size == 1:
            store_symbols(packed, begin, width, word, symbols, num_tokens, exists)
        else:
            store_symbols(
                packed, begin + (chunk + row) * row_bytes(width, num_tokens), width, word, symbols, num_tokens, exists
            )


@triton.jit  # type: ignore[untyped-decorator]
def _unpack_and_dequantize(  # type: ignore[no-untyped-def]
    packed,
    params,
    out,
    widths,
    groups,
    starts,
    strides,
    num_components,
    num_groups,
    num_tokens,
    rows: tl.constexpr,
    tile_words: tl.constexpr,
):
    """Program (i, block of tokens): `rows` components, whatever their groups: shift + scale x symbol.

    The product of 8 and 11 significant bits is exact in fp32, so it does not matter whether it is fused.
    """
    row, word, token = tile(rows, tile_words)
    exists = row < num_components
    is_value = exists & (token < num_tokens)
    width = tl.load(widths + row, mask=exists, other=0)
    begin = first_byte(starts, row, num_components, num_tokens, exists)
    levels = load_symbols(packed, begin, width, word, num_tokens, exists).to(tl.float32)
    param = params + tl.load(groups + row, mask=exists, other=0).to(tl.int64) * num_tokens + token
    shift = tl.load(param, mask=is_value, other=0.0).to(tl.float32)
    scale = tl.load(param + num_groups * num_tokens, mask=is_value, other=0.0).to(tl.float32)
    tl.store(
        out + row.to(tl.int64) * strides[0] + token.to(tl.int64) * strides[1],
        (shift + levels * scale).to(out.dtype.element_ty),
        mask=is_value,
    )


def quantize_and_pack(
    coefficients: torch.Tensor,
    tables: GroupTables,
    *,
    params: torch.Tensor | None = None,
    packed: torch.Tensor | None = None,
    refused: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise the kept components of a chunk and pack their symbols.

    coefficients: f32[num_components, num_tokens] of any strides; those of [num_tokens, num_components] are read slower.
    params: f16[2, num_groups, num_tokens], packed: u8[packed bytes], to be written and returned: the contents of the
        sections of FORMAT.md section 4.1.
    refused: i32[1], set to 1 where the oracle returns None, for coefficients that are not finite or too large for f16;
        what was written is then of no use. It is never cleared, so that several operations may share one.

    Returns params, packed and refused. All tensors lie on the device of the tables, a GPU or, under Triton's
    interpreter, the CPU; nothing is waited for. Raises ConfigError for other shapes, dtypes, strides and devices, and
    for groups of width 0.
    """
    num_tokens = check_components("coefficients", coefficients, (torch.float32,), tables.num_components, tables.device)
    if not tables.row_widths.all():
        raise ConfigError("the plan has a group of width 0: expected 1 to 8, or encode it by the codec on the CPU")
    params = contiguous("params", params, torch.float16, (2, tables.num_groups, num_tokens), tables.device)
    num_bytes = bitpack.packed_bytes(tables.row_widths, num_tokens)
    packed = contiguous("packed", packed, torch.uint8, (num_bytes,), tables.device)
    refused = refusal_flag(refused, tables.device)
    if num_tokens:
        with device_of(coefficients):
            for size, members in tables.members:
                rows, tile_words = tile_of(size)
                grid = (triton.cdiv(len(members), rows if size == 1 else 1), triton.cdiv(num_tokens, 8 * tile_words))
                _quantize_and_pack[grid](
                    coefficients, params, packed, refused, tables.widths, tables.starts, tables.first_rows, members,
                    coefficients.stride(), tables.num_components, tables.num_groups, len(members), num_tokens,
                    size=size, rows=rows, tile_words=tile_words, **EXACT_OPTIONS,
                )  # fmt: skip
    return params, packed, refused


def unpack_and_dequantize(
    packed: torch.Tensor, params: torch.Tensor, tables: GroupTables, out: torch.Tensor
) -> torch.Tensor:
    """Inverse of `quantize_and_pack`, computed in fp32 and rounded to the dtype of `out`.

    packed, params: as `quantize_and_pack` makes them. That params are finite, which FORMAT.md section 4.1 asks readers
        to see to, is left to GroupedQuantizer.read_params.
    out: float[num_components, num_tokens], one of OUT_DTYPES, of any strides, written and returned. What
        SideTransform.reconstruct takes, [num_tokens, num_components + mean rows], is written in place as
        `coefficients[:, :num_components].T`; the ones in its last columns stay.

    Raises ConfigError for other shapes, dtypes and devices.
    """
    num_tokens = check_components("out", out, OUT_DTYPES, tables.num_components, tables.device)
    contiguous("params", params, torch.float16, (2, tables.num_groups, num_tokens), tables.device)
    num_bytes = bitpack.packed_bytes(tables.row_widths, num_tokens)
    contiguous("packed", packed, torch.uint8, (num_bytes,), tables.device)
    if num_tokens and tables.num_components:
        result = written_output(out)
        grid = (triton.cdiv(tables.num_components, DECODED_ROWS), triton.cdiv(num_tokens, 8 * DECODED_WORDS))
        with device_of(out):
            _unpack_and_dequantize[grid](
                packed, params, result, tables.widths, tables.groups, tables.starts, result.stride(),
                tables.num_components, tables.num_groups, num_tokens, rows=DECODED_ROWS, tile_words=DECODED_WORDS,
                **EXACT_OPTIONS,
            )  # fmt: skip
        if result is not out:
            out.copy_(result)
    return out


def tile_of(size: int) -> tuple[int, int]:
    """Rows and words of a tile of the encoder: few words for large groups, so that a chunk of 512 tokens makes enough
    programs.
    """
    rows = 16 if size == 1 else min(size, 64)
    return rows, TILE_WORDS // rows
