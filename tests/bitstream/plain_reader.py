"""A second reader, written from FORMAT.md alone: slow, plain, no code of the package, other libraries for the coders.

It follows the order of the format's text. What section 8 says about errors is here too: `Refused` has their names.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow
import xxhash

Floats = npt.NDArray[np.float64]

SECTION_NAMES = (
    "K_PARAMS",
    "K_SYMBOLS",
    "V_PARAMS",
    "V_SYMBOLS",
    "K_RAW",
    "V_RAW",
    "K_FP8",
    "V_FP8",
    "K_SCALES",
    "V_SCALES",
)
SECTIONS_OF_KIND = {0: (4, 5), 1: (6, 7, 8, 9), 2: (0, 1, 2, 3)}
IDENTITY, DEFLATE, ZSTD = 0, 1, 4
CODED = 2
INCOMPLETE_CODES = "incomplete codes"


class Refused(Exception):
    """A frame that section 8 refuses; `error` is the name of the class it says."""

    def __init__(self, error: str, reason: str) -> None:
        super().__init__(f"{error}: {reason}")
        self.error, self.reason = error, reason


class Wanted(Protocol):
    """What step 5 compares: any object with these fields."""

    geometry_digest: bytes
    artifact_digest: bytes
    plans: tuple[int, ...]
    start_position: int
    num_tokens: int
    max_section_bytes: int


@dataclass
class PlainFrame:
    """Header fields as they are stored, and the decoded sections by name."""

    kind: int
    num_tokens: int
    start_position: int
    plan: int
    geometry_digest: bytes
    artifact_digest: bytes
    sections: dict[str, bytes]


def read(frame: bytes, wanted: Wanted | None = None) -> PlainFrame:
    """Sections 2 to 5, 7 and 8. Without `wanted`, step 5 is left out. Raises Refused."""
    # Step 1
    demand(len(frame) >= 44, "TruncatedFrame", "shorter than a header")
    magic, version, kind, num_sections, flags = struct.unpack("<4sBBBB", frame[:8])
    demand(magic == b"KVTC" and version == 1, "UnsupportedVersion", "magic or version")
    # Step 2
    sections_start = 44 + 12 * num_sections
    demand(sections_start + 8 <= len(frame), "TruncatedFrame", "shorter than the table")
    table = [struct.unpack_from("<BBBBII", frame, 44 + 12 * row) for row in range(num_sections)]
    demand(sections_start + sum(row[5] for row in table) + 8 == len(frame), "TruncatedFrame", "size")
    # Step 3
    demand(xxhash.xxh3_64_digest(frame[:-8]) == frame[-8:], "ChecksumMismatch", "checksum")
    # Step 4
    num_tokens, start_position, plan = struct.unpack("<III", frame[8:20])
    demand(flags == 0, "UnsupportedVersion", "header flags")
    demand(kind in SECTIONS_OF_KIND, "UnsupportedVersion", "kind")
    demand((kind == CODED) == (plan > 0), "GeometryMismatch", "plan")
    demand(tuple(row[0] for row in table) == SECTIONS_OF_KIND[kind], "UnsupportedVersion", "section ids")
    for _, coder, element_bytes, section_flags, raw_bytes, stored_bytes in table:
        demand(section_flags == 0, "UnsupportedVersion", "section flags")
        demand(element_bytes in (1, 2, 4) and raw_bytes % element_bytes == 0, "UnsupportedVersion", "elements")
        demand(coder in (IDENTITY, DEFLATE, ZSTD), "UnsupportedVersion", "coder")
        fits = stored_bytes == raw_bytes if coder == IDENTITY else 0 < stored_bytes < raw_bytes
        demand(fits, "TruncatedFrame", "stored size")
    # Step 5
    if wanted is not None:
        found = (frame[20:28], frame[28:44], start_position, num_tokens)
        expected = (wanted.geometry_digest, wanted.artifact_digest, wanted.start_position, wanted.num_tokens)
        demand(found == expected, "GeometryMismatch", "another frame is wanted")
        demand(kind != CODED or plan in wanted.plans, "GeometryMismatch", "another plan is wanted")
        demand(all(row[4] <= wanted.max_section_bytes for row in table), "GeometryMismatch", "section too large")
    # Step 6
    sections = {}
    stored_at = sections_start
    for number, coder, element_bytes, _, raw_bytes, stored_bytes in table:
        stored = frame[stored_at : stored_at + stored_bytes]
        stored_at += stored_bytes
        sections[SECTION_NAMES[number]] = elements(decode(stored, coder, raw_bytes), element_bytes)
    return PlainFrame(kind, num_tokens, start_position, plan, frame[20:28], frame[28:44], sections)


def demand(holds: bool, error: str, reason: str) -> None:
    if not holds:
        raise Refused(error, reason)


def decode(stored: bytes, coder: int, raw_bytes: int) -> bytes:
    """Section 5.1 and step 6 of section 8: byte planes."""
    if coder == DEFLATE:
        return inflate(stored, raw_bytes)
    return decode_zstd(stored, raw_bytes) if coder == ZSTD else stored


def inflate(stored: bytes, raw_bytes: int) -> bytes:
    inflater = zlib.decompressobj(-15)
    try:
        planes = inflater.decompress(stored, raw_bytes + 1)
    except zlib.error as error:
        # Libraries differ here, and FORMAT.md lets them: zlib alone refuses every incomplete code.
        is_incomplete = re.search("invalid (distances|literal/lengths|code lengths) set", str(error))
        raise Refused("BitstreamError", INCOMPLETE_CODES if is_incomplete else "DEFLATE") from error
    demand(len(planes) == raw_bytes and inflater.eof, "TruncatedFrame", "the stream has another size")
    demand(not inflater.unused_data, "TruncatedFrame", "bytes after the stream")
    return planes


def decode_zstd(stored: bytes, raw_bytes: int) -> bytes:
    """RFC 8878 section 3.1.1 by hand for the frame and its blocks; pyarrow's library for what the blocks hold."""
    content_size, blocks_start, has_checksum = zstd_header(stored)
    demand(content_size == raw_bytes and raw_bytes <= 32768 * len(stored), "TruncatedFrame", "announced size")
    at, is_last = blocks_start, False
    while not is_last:
        demand(at + 3 <= len(stored), "BitstreamError", "a block is cut")
        block = int.from_bytes(stored[at : at + 3], "little")
        is_last, block_type, size = bool(block & 1), block >> 1 & 3, block >> 3
        at += 3 + (1 if block_type == 1 else size)
    demand(at + 4 * has_checksum == len(stored), "BitstreamError", "the blocks end elsewhere")
    try:
        planes = pyarrow.decompress(stored, decompressed_size=raw_bytes, codec="zstd", asbytes=True)
    except OSError as error:
        raise Refused("BitstreamError", "Zstandard") from error
    demand(len(planes) == raw_bytes, "BitstreamError", "the blocks have another size")
    return bytes(planes)


def zstd_header(stored: bytes) -> tuple[int, int, bool]:
    """Frame_Content_Size (-1: not given), where the blocks start, whether a checksum follows them."""
    demand(len(stored) >= 5 and stored[:4] == b"\x28\xb5\x2f\xfd", "BitstreamError", "no Zstandard frame")
    descriptor = stored[4]
    is_single_segment = bool(descriptor & 0x20)
    demand(not descriptor & 0x08, "BitstreamError", "reserved bit")
    dictionary_at = 5 if is_single_segment else 6
    size_at = dictionary_at + (0, 1, 2, 4)[descriptor & 3]
    size_bytes = (1 if is_single_segment else 0, 2, 4, 8)[descriptor >> 6]
    demand(len(stored) >= size_at + size_bytes, "BitstreamError", "the header is cut")
    size = int.from_bytes(stored[size_at : size_at + size_bytes], "little") + (256 if size_bytes == 2 else 0)
    return size if size_bytes else -1, size_at + size_bytes, bool(descriptor & 0x04)


def elements(planes: bytes, element_bytes: int) -> bytes:
    """Section 5.2."""
    count = len(planes) // element_bytes
    return b"".join(planes[element::count] for element in range(count))


def pack(symbols: npt.NDArray[np.uint8], widths: npt.NDArray[np.uint8]) -> bytes:
    """Section 6, bit by bit."""
    packed = bytearray()
    for row, width in zip(symbols.tolist(), widths.tolist(), strict=True):
        number = sum(symbol << (token * width) for token, symbol in enumerate(row))
        packed += number.to_bytes((len(row) * width + 7) // 8, "little")
    return bytes(packed)


def unpack(packed: bytes, widths: npt.NDArray[np.uint8], num_tokens: int) -> npt.NDArray[np.uint8]:
    """Section 6, the other way."""
    symbols = np.zeros((len(widths), num_tokens), np.uint8)
    start = 0
    for component, width in enumerate(widths.tolist()):
        size = (num_tokens * width + 7) // 8
        number = int.from_bytes(packed[start : start + size], "little")
        start += size
        for token in range(num_tokens):
            symbols[component, token] = (number >> (token * width)) & ((1 << width) - 1)
    return symbols


def coefficients(
    frame: PlainFrame, side: str, widths: npt.NDArray[np.uint8], group_of_component: Sequence[int]
) -> Floats:
    """Section 4.1, a CODED frame of a grouped plan: float[num_components, num_tokens]. side: "K" or "V"."""
    params = frame.sections[f"{side}_PARAMS"]
    halves = np.array(struct.unpack(f"<{len(params) // 2}e", params)).reshape(2, -1, frame.num_tokens)
    demand(bool(np.isfinite(halves).all()), "BitstreamError", "a shift or scale is not finite")
    symbols = unpack(frame.sections[f"{side}_SYMBOLS"], widths, frame.num_tokens)
    return np.array(
        [
            [
                halves[0, group, token] + halves[1, group, token] * symbols[component, token]
                for token in range(frame.num_tokens)
            ]
            for component, group in enumerate(group_of_component)
        ]
    )


def uniform_coefficients(frame: PlainFrame, side: str, groups: Sequence[tuple[int, int]], step: float) -> Floats:
    """Section 4.1, a CODED frame of a uniform plan: float[num_components, num_tokens].

    side: "K" or "V". groups: number of components and width, in the order of the plan.
    """
    steps = []
    for code in frame.sections[f"{side}_PARAMS"]:
        exact = step * 2.0 ** ((code - 128) / 4)
        last_place = 2.0 ** (math.floor(math.log2(exact)) - 7)
        steps.append(round(exact / last_place) * last_place)
    row_widths: list[int] = []
    for size, width in groups:
        row_widths += [min(width, 8)] * size + ([width - 8] * size if width > 8 else [])
    rows = unpack(frame.sections[f"{side}_SYMBOLS"], np.array(row_widths, np.uint8), frame.num_tokens).astype(int)
    found = []
    for size, width in groups:
        for component in range(size):
            symbols = rows[component]
            if width > 8:
                symbols = symbols * 2 ** (width - 8) + rows[size + component]
            levels = symbols - 2 ** (width - 1)
            found.append([int(level) * of_token for level, of_token in zip(levels, steps, strict=True)])
        rows = rows[2 * size if width > 8 else size :]
    return np.array(found)


def raw_values(frame: PlainFrame, side: str, dtype: str, shape: tuple[int, int, int, int]) -> Floats:
    """Section 4.1 of a RAW frame. dtype: "bfloat16", "float16" or "float32"; shape: [L, T, H, D]."""
    content = frame.sections[f"{side}_RAW"]
    if dtype == "bfloat16":
        content = b"".join(b"\0\0" + content[at : at + 2] for at in range(0, len(content), 2))
    code, size = ("e", 2) if dtype == "float16" else ("f", 4)
    return np.array(struct.unpack(f"<{len(content) // size}{code}", content)).reshape(shape)


def fp8_values(frame: PlainFrame, side: str, shape: tuple[int, int, int, int]) -> Floats:
    """Section 4.1 of an FP8 frame. shape: [L, T, H, D]."""
    layers, _, heads, _ = shape
    scales = struct.unpack(f"<{layers * heads}f", frame.sections[f"{side}_SCALES"])
    numbers = np.array([e4m3(byte) for byte in frame.sections[f"{side}_FP8"]]).reshape(shape)
    return numbers * np.array(scales).reshape(layers, 1, heads, 1)


def e4m3(byte: int) -> float:
    """OCP E4M3: a sign, 4 bits of exponent with bias 7, 3 of mantissa; the largest pattern is NaN, none is infinite."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def geometry_digest(
    shape: tuple[int, int, int, int],
    dtype: str,
    rope_kind: str,
    rotary_dim: int,
    interleaved: bool,
    attention_factor: float,
    inv_freq: Sequence[float],
) -> bytes:
    """Section 7. shape: layers, KV heads, head size of K, of V."""
    described = struct.pack("<4I", *shape)
    for name in (dtype, rope_kind):
        described += struct.pack("<I", len(name.encode())) + name.encode()
    described += struct.pack("<IBdI", rotary_dim, interleaved, attention_factor, len(inv_freq))
    described += b"".join(struct.pack("<d", frequency) for frequency in inv_freq)
    return xxhash.xxh3_64_digest(described)
