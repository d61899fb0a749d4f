"""Writing and reading frames (FORMAT.md sections 2, 4 and 8).

A reader checks every byte against the checksum before any decoder sees one, and every size before it allocates.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from sglang_kvtc.bitstream import entropy
from sglang_kvtc.bitstream.entropy import Coder
from sglang_kvtc.bitstream.header import (
    HEADER_BYTES,
    FrameExpectation,
    FrameHeader,
    FrameKind,
    check_identity,
    pack_header,
    unpack_header,
)
from sglang_kvtc.bitstream.shuffle import ELEMENT_BYTES, shuffle, unshuffle
from sglang_kvtc.errors import BitstreamError, ChecksumMismatch, GeometryMismatch, TruncatedFrame, UnsupportedVersion

Bytes = npt.NDArray[np.uint8]
FrameBuffer = bytes | bytearray | memoryview
"""Contiguous bytes; a memoryview must be one-dimensional with format "B"."""

# id, coder, element bytes, flags, raw bytes, stored bytes
_ENTRY = struct.Struct("<BBBBII")
ENTRY_BYTES = _ENTRY.size
CHECKSUM_BYTES = 8
_U32_MAX = 2**32 - 1


class SectionId(enum.IntEnum):
    """What a section holds (FORMAT.md section 4.1 gives shapes)."""

    K_PARAMS = 0
    K_SYMBOLS = 1
    V_PARAMS = 2
    V_SYMBOLS = 3
    K_RAW = 4
    V_RAW = 5
    K_FP8 = 6
    V_FP8 = 7
    K_SCALES = 8
    V_SCALES = 9


SECTIONS: Mapping[FrameKind, tuple[SectionId, ...]] = {
    FrameKind.RAW: (SectionId.K_RAW, SectionId.V_RAW),
    FrameKind.FP8: (SectionId.K_FP8, SectionId.V_FP8, SectionId.K_SCALES, SectionId.V_SCALES),
    FrameKind.CODED: (SectionId.K_PARAMS, SectionId.K_SYMBOLS, SectionId.V_PARAMS, SectionId.V_SYMBOLS),
}
"""The sections of each kind, in file order: all of them, and no others."""


@dataclass(frozen=True, slots=True)
class SectionEntry:
    """One row of the section table. `element_bytes` above 1 means byte planes (bitstream.shuffle)."""

    id: SectionId
    coder: Coder
    element_bytes: int
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A verified frame. `entries` are the rows of its section table, by section."""

    header: FrameHeader
    entries: Mapping[SectionId, SectionEntry]
    _stored: Mapping[SectionId, memoryview]

    def section(self, section: SectionId) -> Bytes:
        """Decode one section: u8[raw_bytes], in the byte order it was given to `write_frame`.

        The result may be a read-only view of the frame. Raises BitstreamError when the section does not decode to
        exactly its declared size, and KeyError for a section that frames of this kind do not have.
        """
        entry = self.entries[section]
        if entry.raw_bytes == 0:
            return np.empty(0, np.uint8)
        raw = entropy.decode(self._stored[section], entry.coder, entry.raw_bytes)
        return unshuffle(np.frombuffer(raw, np.uint8), entry.element_bytes)


@dataclass(frozen=True, slots=True)
class CodedSection:
    """A section as `write_frame` stores it. Coding takes most of the time of a frame, and threads may share it."""

    entry: SectionEntry
    stored: bytes | memoryview


Content = bytes | npt.NDArray[Any]


def write_frame(
    header: FrameHeader,
    sections: Mapping[SectionId, Content | CodedSection],
    coder: str,
    level: int,
) -> bytes:
    """Write one frame.

    sections: exactly those of the header's kind, their content or the result of `code_section`.
    coder, level: entropy coder by name and its effort (bitstream.entropy); a section it does not shrink is stored as it
        is.
    Raises BitstreamError for sections or fields that the format cannot hold, UnsupportedVersion for an unknown coder.
    """
    expected = SECTIONS[header.kind]
    if sections.keys() != set(expected):
        found = ", ".join(SectionId(section).name for section in sections)
        raise BitstreamError(f"a {header.kind.name} frame has {_names(expected)}, got {found}")
    table, payload = [], []
    for section in expected:
        content = sections[section]
        coded = content if isinstance(content, CodedSection) else code_section(section, content, coder, level)
        entry, stored = coded.entry, coded.stored
        table.append(_ENTRY.pack(entry.id, entry.coder, entry.element_bytes, 0, entry.raw_bytes, entry.stored_bytes))
        payload.append(stored)
    parts = [pack_header(header, len(expected)), *table, *payload]
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return b"".join([*parts, checksum.digest()])


def code_section(section: SectionId, content: Content, coder: str, level: int) -> CodedSection:
    """Turn one section into what a frame stores.

    content: arrays of 2- or 4-byte elements are stored as byte planes; `bytes` and arrays of single bytes as they are.
        Elements are little-endian, in C order.
    coder, level: as for `write_frame`. Raises BitstreamError for content that the format cannot hold,
    UnsupportedVersion for an unknown coder.
    """
    coder_id = entropy.coder_by_name(coder)
    array = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else np.ascontiguousarray(content)
    if array.itemsize not in ELEMENT_BYTES or array.nbytes > _U32_MAX:
        raise BitstreamError(f"{section.name}: {array.dtype}{list(array.shape)} is no section of this format")
    raw = shuffle(array.reshape(-1).view(np.uint8), array.itemsize)
    if coder_id is not Coder.IDENTITY and raw.size:
        coded = entropy.encode(raw, coder_id, level)
        if len(coded) < raw.size:
            return CodedSection(SectionEntry(section, coder_id, array.itemsize, raw.size, len(coded)), coded)
    return CodedSection(SectionEntry(section, Coder.IDENTITY, array.itemsize, raw.size, raw.size), raw.data)


def read_header(frame: FrameBuffer) -> FrameHeader:
    """Read the header without looking at the rest: only for frames that were verified before.

    Raises TruncatedFrame, UnsupportedVersion or GeometryMismatch.
    """
    view = memoryview(frame)
    check_identity(view)
    return unpack_header(view)


def verify(frame: FrameBuffer) -> FrameHeader:
    """Check that a frame is whole, unchanged and well formed; no section is decoded.

    Costs one XXH3 pass over the frame. Raises a BitstreamError: TruncatedFrame, UnsupportedVersion, ChecksumMismatch or
    GeometryMismatch (FORMAT.md section 8).
    """
    return open_frame(frame).header


def read_frame(frame: FrameBuffer, expected: FrameExpectation) -> Frame:
    """Verify a frame and check that it is the one the caller needs; its sections are decoded on demand.

    Raises what `verify` raises, and GeometryMismatch naming the field or section that differs. The returned Frame
    refers to the caller's buffer.
    """
    opened = open_frame(frame)
    expected.check(opened.header)
    for entry in opened.entries.values():
        if entry.raw_bytes > expected.max_section_bytes:
            raise GeometryMismatch(
                f"{entry.id.name} declares {entry.raw_bytes} bytes, at most {expected.max_section_bytes} fit the model"
            )
    return opened


def open_frame(frame: FrameBuffer) -> Frame:
    """Verify a frame of unknown origin, for inspection: nothing says which model and position it should belong to,
    and nothing bounds its sections but the format. Raises what `verify` raises.
    """
    view = memoryview(frame)
    num_sections = check_identity(view)
    payload_start = HEADER_BYTES + num_sections * ENTRY_BYTES
    payload_end = len(view) - CHECKSUM_BYTES
    if payload_end < payload_start:
        raise TruncatedFrame(f"the frame has {len(view)} bytes, too few for its table of {num_sections} sections")
    rows = list(_ENTRY.iter_unpack(view[HEADER_BYTES:payload_start]))
    declared = sum(stored_bytes for *_, stored_bytes in rows)
    if payload_start + declared != payload_end:
        raise TruncatedFrame(
            f"the frame has {payload_end - payload_start} bytes of sections, its table says {declared}"
        )
    if xxhash.xxh3_64_digest(view[:payload_end]) != view[payload_end:]:
        raise ChecksumMismatch("the frame's bytes do not match its checksum: it changed after it was written")

    header = unpack_header(view)
    expected = SECTIONS[header.kind]
    if tuple(number for number, *_ in rows) != expected:
        raise UnsupportedVersion(
            f"a {header.kind.name} frame has {_names(expected)}, got section ids {[number for number, *_ in rows]}"
        )
    entries, stored = {}, {}
    start = payload_start
    for section, row in zip(expected, rows, strict=True):
        entry = _check_entry(section, *row[1:])
        entries[section] = entry
        stored[section] = view[start : start + entry.stored_bytes]
        start += entry.stored_bytes
    return Frame(header, entries, stored)


def _check_entry(
    section: SectionId, coder_id: int, element_bytes: int, flags: int, raw_bytes: int, stored_bytes: int
) -> SectionEntry:
    if flags:
        raise UnsupportedVersion(f"{section.name} has flags {flags:#04x}, this reader knows none")
    if element_bytes not in ELEMENT_BYTES or raw_bytes % element_bytes:
        raise UnsupportedVersion(f"{section.name} has {raw_bytes} bytes in elements of {element_bytes}")
    coder = entropy.coder_by_id(coder_id)
    if coder is Coder.IDENTITY and stored_bytes != raw_bytes:
        raise TruncatedFrame(f"{section.name} is stored as it is, but has {stored_bytes} bytes instead of {raw_bytes}")
    if coder is not Coder.IDENTITY and not 0 < stored_bytes < raw_bytes:
        raise TruncatedFrame(f"{section.name} is coded, but has {stored_bytes} bytes for {raw_bytes} decoded ones")
    return SectionEntry(section, coder, element_bytes, raw_bytes, stored_bytes)


def _names(sections: tuple[SectionId, ...]) -> str:
    return ", ".join(section.name for section in sections)
