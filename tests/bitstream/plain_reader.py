"""A second reader, written from FORMAT.md alone: slow, plain, no code of the package, zlib instead of ISA-L."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

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


def read(frame: bytes) -> PlainFrame:
    """FORMAT.md sections 2 to 5 and 7, for valid frames."""
    if xxhash.xxh3_64_digest(frame[:-8]) != frame[-8:]:
        raise ValueError("checksum")
    magic, version, kind, num_sections, flags = struct.unpack("<4sBBBB", frame[:8])
    if (magic, version, flags) != (b"KVTC", 1, 0):
        raise ValueError("identity")
    num_tokens, start_position, plan = struct.unpack("<III", frame[8:20])
    sections = {}
    stored_at = 44 + 12 * num_sections
    for row in range(num_sections):
        entry = frame[44 + 12 * row : 56 + 12 * row]
        number, coder, element_bytes, _, raw_bytes, stored_bytes = struct.unpack("<BBBBII", entry)
        stored = frame[stored_at : stored_at + stored_bytes]
        stored_at += stored_bytes
        planes = zlib.decompress(stored, -15) if coder == 1 else stored
        count = raw_bytes // element_bytes
        sections[SECTION_NAMES[number]] = bytes(
            planes[plane * count + element] for element in range(count) for plane in range(element_bytes)
        )
    if stored_at != len(frame) - 8:
        raise ValueError("size")
    return PlainFrame(kind, num_tokens, start_position, plan, frame[20:28], frame[28:44], sections)


def pack(symbols: npt.NDArray[np.uint8], widths: npt.NDArray[np.uint8]) -> bytes:
    """FORMAT.md section 6, bit by bit."""
    packed = bytearray()
    for row, width in zip(symbols.tolist(), widths.tolist(), strict=True):
        number = sum(symbol << (token * width) for token, symbol in enumerate(row))
        packed += number.to_bytes((len(row) * width + 7) // 8, "little")
    return bytes(packed)


def unpack(packed: bytes, widths: npt.NDArray[np.uint8], num_tokens: int) -> npt.NDArray[np.uint8]:
    """FORMAT.md section 6, the other way."""
    symbols = np.zeros((len(widths), num_tokens), np.uint8)
    start = 0
    for component, width in enumerate(widths.tolist()):
        size = (num_tokens * width + 7) // 8
        number = int.from_bytes(packed[start : start + size], "little")
        start += size
        for token in range(num_tokens):
            symbols[component, token] = (number >> (token * width)) & ((1 << width) - 1)
    return symbols
