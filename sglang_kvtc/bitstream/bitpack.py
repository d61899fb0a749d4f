"""Symbols of 0 to 8 bits packed component-major (FORMAT.md section 6).

Eight symbols of `width` bits fill `width` bytes exactly, so one 64-bit word holds them with room to spare. Packing
halves the number of lanes of that word three times, unpacking doubles it; each step is a few numpy operations over all
components of a run of equal width, and numpy releases the GIL in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sglang_kvtc.errors import BitstreamError, TruncatedFrame

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

MAX_WIDTH = 8
_WORD_BYTES = 8
_WORD = np.dtype("<u8")
_LANE_BITS = (8, 16, 32)


def row_bytes(widths: Bytes, num_tokens: int) -> npt.NDArray[np.int64]:
    """Packed bytes of each component's row."""
    return (widths.astype(np.int64) * num_tokens + 7) // 8


def packed_bytes(widths: Bytes, num_tokens: int) -> int:
    """Size of `pack`'s result."""
    return int(row_bytes(widths, num_tokens).sum())


def pack(symbols: Bytes, widths: Bytes) -> Bytes:
    """Pack each component's row of symbols, least significant bit first, padded with zero bits to whole bytes.

    symbols: u8[num_components, num_tokens]. widths: u8[num_components], 0 to 8. Returns u8[packed_bytes].
    Raises BitstreamError for a width above 8 or a symbol that its width cannot hold.
    """
    _check_widths(widths)
    num_components, num_tokens = symbols.shape
    if len(widths) != num_components:
        raise BitstreamError(f"{len(widths)} bit widths for {num_components} components")
    sizes = row_bytes(widths, num_tokens)
    packed = np.empty(int(sizes.sum()), np.uint8)
    if not num_tokens:
        return packed
    offset = 0
    for start, stop in _runs(widths):
        width, rows = int(widths[start]), symbols[start:stop]
        if int(rows.max()) >> width:
            raise BitstreamError(f"symbol {rows.max()} in components {start}..{stop - 1} does not fit {width} bits")
        end = offset + int(sizes[start:stop].sum())
        if width == MAX_WIDTH:
            packed[offset:end] = rows.reshape(-1)
        elif width:
            _pack_run(rows, width, packed[offset:end])
        offset = end
    return packed


def unpack(packed: Bytes, widths: Bytes, num_tokens: int) -> Bytes:
    """Inverse of `pack`: C-contiguous u8[num_components, num_tokens]; components of width 0 are zeros.

    Raises TruncatedFrame when `packed` is not exactly as long as widths and tokens say, BitstreamError for a width
    above 8.
    """
    _check_widths(widths)
    sizes = row_bytes(widths, num_tokens)
    if packed.size != sizes.sum():
        raise TruncatedFrame(f"packed symbols have {packed.size} bytes, widths and tokens need {sizes.sum()}")
    # A run's last word may be read past its end; what was read there is masked or cut off.
    padded = np.zeros(packed.size + _WORD_BYTES, np.uint8)
    padded[: packed.size] = packed
    symbols = np.empty((len(widths), num_tokens), np.uint8)
    if not num_tokens:
        return symbols
    offset = 0
    for start, stop in _runs(widths):
        width, rows = int(widths[start]), symbols[start:stop]
        end = offset + int(sizes[start:stop].sum())
        if width == 0:
            rows[:] = 0
        elif width == MAX_WIDTH:
            rows.reshape(-1)[:] = padded[offset:end]
        else:
            _unpack_run(padded, offset, width, rows)
        offset = end
    return symbols


def _pack_run(rows: Bytes, width: int, packed: Bytes) -> None:
    num_rows, num_tokens = rows.shape
    words_per_row = -(-num_tokens // _WORD_BYTES)
    lanes = np.zeros((num_rows, words_per_row * _WORD_BYTES), np.uint8)
    lanes[:, :num_tokens] = rows
    words = lanes.view(_WORD)
    high = np.empty_like(words)
    for lane_bits in _LANE_BITS:
        bits = width * lane_bits // 8
        low_mask = _lane_mask(lane_bits, bits)
        np.bitwise_and(words, low_mask << np.uint64(lane_bits), out=high)
        np.right_shift(high, np.uint64(lane_bits - bits), out=high)
        np.bitwise_and(words, low_mask, out=words)
        np.bitwise_or(words, high, out=words)
    used = lanes.reshape(num_rows, words_per_row, _WORD_BYTES)
    if num_tokens % _WORD_BYTES == 0:
        groups = packed.reshape(num_rows, words_per_row, width)
        for byte in range(width):
            groups[:, :, byte] = used[:, :, byte]
    else:
        row_size = packed.size // num_rows
        packed.reshape(num_rows, row_size)[:] = used[:, :, :width].reshape(num_rows, -1)[:, :row_size]


def _unpack_run(padded: Bytes, offset: int, width: int, rows: Bytes) -> None:
    num_rows, num_tokens = rows.shape
    words_per_row = -(-num_tokens // _WORD_BYTES)
    stride = (num_tokens * width + 7) // 8
    # One unaligned 64-bit word every `width` bytes: the first 8 * width bits of each are its eight symbols.
    source: Words = np.ndarray((num_rows, words_per_row), _WORD, padded.data, offset, (stride, width))
    whole_words = num_tokens % _WORD_BYTES == 0
    words = rows.reshape(-1).view(_WORD).reshape(num_rows, -1) if whole_words else np.empty(source.shape, _WORD)
    np.copyto(words, source)
    high = np.empty_like(words)
    for lane_bits in reversed(_LANE_BITS):
        bits = width * lane_bits // 8
        low_mask = _lane_mask(lane_bits, bits)
        np.left_shift(words, np.uint64(lane_bits - bits), out=high)
        np.bitwise_and(high, low_mask << np.uint64(lane_bits), out=high)
        np.bitwise_and(words, low_mask, out=words)
        np.bitwise_or(words, high, out=words)
    if not whole_words:
        rows[:] = words.view(np.uint8)[:, :num_tokens]


def _lane_mask(lane_bits: int, bits: int) -> np.uint64:
    """The low `bits` bits of every even lane of a 64-bit word."""
    mask = 0
    for lane in range(0, 64, 2 * lane_bits):
        mask |= ((1 << bits) - 1) << lane
    return np.uint64(mask)


def _runs(widths: Bytes) -> Iterator[tuple[int, int]]:
    """Maximal ranges [start, stop) of components of equal width."""
    edges = np.flatnonzero(np.diff(widths)) + 1
    bounds = [0, *edges.tolist(), len(widths)]
    return ((start, stop) for start, stop in itertools.pairwise(bounds) if start < stop)


def _check_widths(widths: Bytes) -> None:
    if widths.size and int(widths.max()) > MAX_WIDTH:
        raise BitstreamError(f"bit width {widths.max()}: the format knows 0 to {MAX_WIDTH}")
