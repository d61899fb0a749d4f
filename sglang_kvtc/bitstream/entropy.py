"""Entropy coders of sections (FORMAT.md section 5.1).

DEFLATE is written by zlib and read by ISA-L: the stream is the same, ISA-L inflates it about twice as fast, and both
release the GIL while they work. ZSTD needs the package `zstandard`; without it the coder is refused by name.
"""

from __future__ import annotations

import enum
import importlib.util
import zlib

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from sglang_kvtc.errors import BitstreamError, TruncatedFrame, UnsupportedVersion

Bytes = npt.NDArray[np.uint8]


class Coder(enum.IntEnum):
    """Coder ids. Two writers may share an id only if each reads what the other wrote."""

    IDENTITY = 0
    DEFLATE = 1
    GDEFLATE = 2
    ANS = 3
    ZSTD = 4


SUPPORTED = frozenset({Coder.IDENTITY, Coder.DEFLATE, Coder.ZSTD})

_HAS_ZSTANDARD = importlib.util.find_spec("zstandard") is not None
_ZSTD_LARGEST_GROWTH = 32768
"""A block of at least four bytes yields at most 128 KiB."""
_RAW_WBITS = -15
_MEM_LEVEL = 8
_PROBE_SLICES = 4
_PROBE_SLICE_BYTES = 8192


def coder_by_name(name: str) -> Coder:
    """The coder a configuration names. Raises UnsupportedVersion for those that cannot be used here."""
    try:
        coder = Coder[name.upper()]
    except KeyError as error:
        raise UnsupportedVersion(f"unknown entropy coder {name!r}, expected one of {_names()}") from error
    return _supported(coder)


def coder_by_id(number: int) -> Coder:
    """The coder a frame names. Raises UnsupportedVersion for those that cannot be used here."""
    try:
        coder = Coder(number)
    except ValueError as error:
        raise UnsupportedVersion(f"unknown entropy coder id {number}, expected one of {_names()}") from error
    return _supported(coder)


def encode(raw: Bytes, coder: Coder, level: int) -> bytes:
    """Code `raw` on its own. The result depends on the arguments (and the coder's library) only.

    level: effort of the search for repeats, 1 to 9. The result may be longer than `raw`; the frame then stores `raw`.
    """
    if coder is Coder.IDENTITY:
        return raw.tobytes()
    if coder is Coder.ZSTD:
        return _zstd_compress(raw, level)
    return _deflate(raw, level)


def decode(stored: memoryview, coder: Coder, raw_bytes: int) -> bytes | memoryview:
    """Invert `encode`; the result has exactly `raw_bytes` bytes.

    Raises BitstreamError for an invalid stream and TruncatedFrame for one that does not decode to that size. Never
    produces more than `raw_bytes` + 1 bytes. The buffer of DEFLATE grows with what the stream really yields; that of
    ZSTD is allocated at once, after the stream was found to announce that size too and to be long enough for it.
    """
    if coder is Coder.IDENTITY:
        if len(stored) != raw_bytes:
            raise TruncatedFrame(f"a section stored as it is has {len(stored)} bytes, its table entry says {raw_bytes}")
        return stored
    if coder is Coder.ZSTD:
        return _zstd_decompress(stored, raw_bytes)
    return _inflate(stored, raw_bytes)


def _deflate(raw: Bytes, level: int) -> bytes:
    """Raw DEFLATE by whichever strategy is smaller on a sample of `raw`.

    Quantised coefficients seldom repeat, and Huffman codes with runs only (Z_RLE) are then smaller than level 6 and
    four times as fast; where the text repeats, so do the symbols, and the search for matches halves the size.
    """
    sample = _sample(raw)
    trials = {strategy: _compress(sample, level, strategy) for strategy in (zlib.Z_RLE, zlib.Z_DEFAULT_STRATEGY)}
    best = min(trials, key=lambda strategy: len(trials[strategy]))
    return trials[best] if sample is raw else _compress(raw, level, best)


def _sample(raw: Bytes) -> Bytes:
    """A few slices spread over `raw` (which has regions: bit widths, byte planes), or all of it if that is small."""
    if raw.size <= 2 * _PROBE_SLICES * _PROBE_SLICE_BYTES:
        return raw
    starts = np.linspace(0, raw.size - _PROBE_SLICE_BYTES, _PROBE_SLICES).astype(np.int64)
    return np.concatenate([raw[start : start + _PROBE_SLICE_BYTES] for start in starts])


def _compress(raw: Bytes, level: int, strategy: int) -> bytes:
    deflater = zlib.compressobj(level, zlib.DEFLATED, _RAW_WBITS, _MEM_LEVEL, strategy)
    return deflater.compress(raw.data) + deflater.flush()


def _inflate(stored: memoryview, raw_bytes: int) -> bytes:
    inflater = isal_zlib.decompressobj(wbits=_RAW_WBITS)
    try:
        # One byte more than declared, so that the end of the stream is reached and a longer one shows.
        raw = inflater.decompress(stored, raw_bytes + 1)
    except isal_zlib.error as error:  # type: ignore[misc]  # the stub declares an instance
        raise BitstreamError(f"a section is not valid DEFLATE: {error}") from error
    if len(raw) != raw_bytes or not inflater.eof:
        raise TruncatedFrame(f"a section inflates to {len(raw)} bytes or more, its table entry says {raw_bytes}")
    if inflater.unused_data:
        raise TruncatedFrame(f"{len(inflater.unused_data)} bytes follow a section's DEFLATE stream")
    return raw


def _zstd_compress(raw: Bytes, level: int) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=level).compress(raw.data)


def _zstd_decompress(stored: memoryview, raw_bytes: int) -> bytes:
    import zstandard

    if stored[:4] != zstandard.FRAME_HEADER:
        raise BitstreamError(f"a section starts with {bytes(stored[:4])!r}, no Zstandard frame does")
    try:
        announced = zstandard.frame_content_size(stored)
        if announced != raw_bytes or raw_bytes > _ZSTD_LARGEST_GROWTH * len(stored):
            raise TruncatedFrame(
                f"{len(stored)} bytes of Zstandard announce {announced} bytes, the table entry says {raw_bytes}"
            )
        raw = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BitstreamError(f"a section is not one valid Zstandard frame: {error}") from error
    return raw


def _supported(coder: Coder) -> Coder:
    if coder not in SUPPORTED:
        raise UnsupportedVersion(f"entropy coder {coder.name} is reserved and not supported yet, use one of {_names()}")
    if coder is Coder.ZSTD and not _HAS_ZSTANDARD:
        raise UnsupportedVersion("entropy coder ZSTD needs the package zstandard: install sglang-kvtc[zstd]")
    return coder


def _names() -> str:
    return ", ".join(coder.name.lower() for coder in sorted(SUPPORTED))
