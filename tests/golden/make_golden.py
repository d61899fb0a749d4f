"""Write the golden frames: run by hand, from the folder `tests`, when the format gains a version or a case.

    python -m golden.make_golden

`v1/<name>.kvtc` must decode to what `v1/<name>.json` says, in every later version. `bad/<name>.kvtc` must be refused
with the error class of `bad/<name>.json`. `sizes.json` has the sizes of larger frames by coder and level, so that a
change of size shows in review (golden.sizes). A test never writes here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from bitstream.sample_frames import (
    K_WIDTHS,
    V_WIDTHS,
    Sections,
    expectation,
    frame,
    header,
    resealed,
    sections,
    symbols,
)
from golden import sizes

from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.bitstream.entropy import Coder
from sglang_kvtc.bitstream.frame import (
    ENTRY_BYTES,
    CodedSection,
    SectionEntry,
    SectionId,
    open_frame,
    write_frame,
)
from sglang_kvtc.bitstream.header import HEADER_BYTES, FrameExpectation, FrameHeader, FrameKind
from sglang_kvtc.bitstream.shuffle import shuffle

HERE = Path(__file__).parent
Symbols = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]


def good_frames() -> dict[str, tuple[FrameHeader, Sections, str, Symbols | None]]:
    """Name -> header, sections, coder, and (widths, symbols) of K where the frame has any."""
    coded = header(FrameKind.CODED)
    frames: dict[str, tuple[FrameHeader, Sections, str, Symbols | None]] = {
        "raw_no_tokens": (header(FrameKind.RAW, 0, 0), sections(FrameKind.RAW, 0), "deflate", None),
        "raw_one_token": (header(FrameKind.RAW, 1, 0), sections(FrameKind.RAW, 1), "deflate", None),
        "raw_sinks_bfloat16": (header(FrameKind.RAW, 4, 0), sections(FrameKind.RAW, 4), "deflate", None),
        "raw_identity": (header(FrameKind.RAW, 4, 0), sections(FrameKind.RAW, 4), "identity", None),
        "raw_zstd": (header(FrameKind.RAW, 4, 0), sections(FrameKind.RAW, 4), "zstd", None),
        "raw_last_position": (header(FrameKind.RAW, 1, 2**32 - 1), sections(FrameKind.RAW, 1), "deflate", None),
        "fp8_no_tokens": (header(FrameKind.FP8, 0), sections(FrameKind.FP8, 0), "deflate", None),
        "fp8_one_token": (header(FrameKind.FP8, 1), sections(FrameKind.FP8, 1), "deflate", None),
        "fp8_window": (header(FrameKind.FP8, 9, 1015), sections(FrameKind.FP8, 9), "deflate", None),
        "fp8_identity": (header(FrameKind.FP8, 9, 1015), sections(FrameKind.FP8, 9), "identity", None),
        "fp8_zstd": (header(FrameKind.FP8, 9, 1015), sections(FrameKind.FP8, 9), "zstd", None),
    }
    rng = np.random.default_rng(32)
    frames["raw_float32"] = (
        header(FrameKind.RAW, 3, 0),
        {
            SectionId.K_RAW: rng.standard_normal((2, 3, 2, 16)).astype("<f4"),
            SectionId.V_RAW: rng.standard_normal((2, 3, 2, 8)).astype("<f4"),
        },
        "deflate",
        None,
    )
    for name, num_tokens, coder in (
        ("coded_mixed_widths", 24, "deflate"),
        ("coded_odd_tokens", 13, "deflate"),
        ("coded_one_token", 1, "deflate"),
        ("coded_no_tokens", 0, "deflate"),
        ("coded_identity", 24, "identity"),
        ("coded_zstd", 24, "zstd"),
    ):
        given = symbols(np.random.default_rng(num_tokens), K_WIDTHS, num_tokens)
        content = {**sections(FrameKind.CODED, num_tokens), SectionId.K_SYMBOLS: bitpack.pack(given, K_WIDTHS)}
        frames[name] = (dataclasses.replace(coded, num_tokens=num_tokens), content, coder, (K_WIDTHS, given))
    repeated = np.tile(symbols(rng, K_WIDTHS, 16), 8)
    content = {
        SectionId.K_PARAMS: np.ones((2, 8, 128), "<f2"),
        SectionId.K_SYMBOLS: bitpack.pack(repeated, K_WIDTHS),
        SectionId.V_PARAMS: np.ones((2, 3, 128), "<f2"),
        SectionId.V_SYMBOLS: bitpack.pack(np.zeros((12, 128), np.uint8), V_WIDTHS),
    }
    frames["coded_repeating_text"] = (
        dataclasses.replace(coded, num_tokens=128),
        content,
        "deflate",
        (K_WIDTHS, repeated),
    )
    for coder in ("deflate", "zstd"):
        every_width = np.arange(9, dtype=np.uint8)
        given = symbols(np.random.default_rng(9), every_width, 24)
        given[:, 0], given[:, 1] = 0, (1 << every_width.astype(int)) - 1
        content = {**sections(FrameKind.CODED), SectionId.K_SYMBOLS: bitpack.pack(given, every_width)}
        frames[f"coded_every_width_{coder}"] = (coded, content, coder, (every_width, given))
    none_kept = np.zeros(8, np.uint8)
    frames["coded_zero_widths"] = (
        coded,
        {**sections(FrameKind.CODED), SectionId.K_SYMBOLS: b"", SectionId.V_PARAMS: b"", SectionId.V_SYMBOLS: b""},
        "deflate",
        (none_kept, np.zeros((8, 24), np.uint8)),
    )
    frames["coded_uniform"] = _uniform_frame()
    return frames


UNIFORM_GROUPS = ((2, 12), (3, 8), (2, 4))
"""Number of components and width, in the order of the plan of the golden uniform frame."""
UNIFORM_STEP = 0.1


def _uniform_frame() -> tuple[FrameHeader, Sections, str, Symbols | None]:
    rng = np.random.default_rng(5)
    row_widths = np.array([8, 8, 4, 4, 8, 8, 8, 4, 4], np.uint8)
    rows = symbols(rng, row_widths, 24)
    rows[:, 0] = 0
    rows[:, 1] = (1 << row_widths.astype(int)) - 1
    codes = np.r_[0, 255, rng.integers(110, 150, 22)].astype(np.uint8)
    content = {
        **sections(FrameKind.CODED),
        SectionId.K_PARAMS: codes,
        SectionId.K_SYMBOLS: bitpack.pack(rows, row_widths),
    }
    return header(FrameKind.CODED), content, "deflate", (row_widths, rows)


def foreign_frames() -> dict[str, tuple[FrameHeader, Sections, bytes]]:
    """Name -> header, sections, bytes. Streams as other writers may make them and ours does not."""
    wanted, content, _, _ = good_frames()["coded_repeating_text"]
    zstd_with_checksum = zstandard.ZstdCompressor(level=19, write_checksum=True)
    return {
        f"coded_foreign_{coder.name.lower()}": (
            wanted,
            content,
            write_frame(wanted, {id: _coded(id, given, coder, code) for id, given in content.items()}, "identity", 1),
        )
        for coder, code in ((Coder.DEFLATE, _deflate_of_fixed_blocks), (Coder.ZSTD, zstd_with_checksum.compress))
    }


def bad_frames() -> dict[str, tuple[bytes, str]]:
    """Name -> bytes, error class. All are read as if the frame of `frame(FrameKind.CODED)` were wanted."""
    return {**_damaged_frames(), **_wrongly_written_frames(), **_frames_with_bad_streams()}


def _damaged_frames() -> dict[str, tuple[bytes, str]]:
    good = frame(FrameKind.CODED)
    return {
        "empty": (b"", "TruncatedFrame"),
        "header_cut": (good[: HEADER_BYTES - 1], "TruncatedFrame"),
        "table_cut": (good[: HEADER_BYTES + ENTRY_BYTES], "TruncatedFrame"),
        "last_byte_cut": (good[:-1], "TruncatedFrame"),
        "trailing_byte": (good + b"\0", "TruncatedFrame"),
        "twice": (good + good, "TruncatedFrame"),
        "payload_bit_flipped": (_patched(good, 200, bytes([good[200] ^ 16])), "ChecksumMismatch"),
        "checksum_bit_flipped": (_patched(good, len(good) - 1, bytes([good[-1] ^ 1])), "ChecksumMismatch"),
        "position_changed": (_patched(good, 13, b"\0"), "ChecksumMismatch"),
        "second_half_of_another": (good[: len(good) // 2] + _other_half(good), "ChecksumMismatch"),
    }


def _wrongly_written_frames() -> dict[str, tuple[bytes, str]]:
    good = frame(FrameKind.CODED)
    whole_table = good[HEADER_BYTES : HEADER_BYTES + 4 * ENTRY_BYTES]
    first_two, others = whole_table[: 2 * ENTRY_BYTES], whole_table[2 * ENTRY_BYTES :]
    coder, element, flags = (HEADER_BYTES + field for field in (1, 2, 3))
    raw_bytes, stored_bytes = HEADER_BYTES + 4, HEADER_BYTES + 8
    entry = open_frame(good).entries[SectionId.K_PARAMS]

    def wrong(offset: int, patch: bytes) -> bytes:
        return resealed(_patched(good, offset, patch))

    return {
        "magic": (wrong(0, b"KVTX"), "UnsupportedVersion"),
        "version_0": (wrong(4, b"\0"), "UnsupportedVersion"),
        "version_2": (wrong(4, b"\2"), "UnsupportedVersion"),
        "header_flag": (wrong(7, b"\1"), "UnsupportedVersion"),
        "kind_3": (wrong(5, b"\3"), "UnsupportedVersion"),
        "kind_fp8": (wrong(5, b"\1\4\0" + good[8:16] + _u32(0)), "UnsupportedVersion"),
        "sections_255": (wrong(6, b"\xff"), "TruncatedFrame"),
        "section_twice": (wrong(HEADER_BYTES, b"\1"), "UnsupportedVersion"),
        "section_unknown": (wrong(HEADER_BYTES, b"\x63"), "UnsupportedVersion"),
        "section_missing": (_without_last_section(good), "UnsupportedVersion"),
        "sections_reordered": (wrong(HEADER_BYTES, others + first_two), "UnsupportedVersion"),
        "section_flag": (wrong(flags, b"\x80"), "UnsupportedVersion"),
        "coder_gdeflate": (wrong(coder, bytes([Coder.GDEFLATE])), "UnsupportedVersion"),
        "coder_ans": (wrong(coder, bytes([Coder.ANS])), "UnsupportedVersion"),
        "coder_unknown": (wrong(coder, b"\5"), "UnsupportedVersion"),
        "element_of_0_bytes": (wrong(element, b"\0"), "UnsupportedVersion"),
        "element_of_3_bytes": (wrong(element, b"\3"), "UnsupportedVersion"),
        "half_an_element": (wrong(raw_bytes, _u32(entry.raw_bytes + 1)), "UnsupportedVersion"),
        "sizes_beyond_the_frame": (wrong(stored_bytes, _u32(2**32 - 1)), "TruncatedFrame"),
        "identity_of_another_size": (wrong(coder, bytes([Coder.IDENTITY])), "TruncatedFrame"),
        "coded_without_gain": (wrong(raw_bytes, _u32(entry.stored_bytes & ~1)), "TruncatedFrame"),
        "coded_to_nothing": (_with_first_stream(good, b""), "TruncatedFrame"),
        "declares_4_gib": (wrong(raw_bytes, _u32(2**32 - 2)), "GeometryMismatch"),
        "declares_4_gib_zstd": (
            wrong(coder, bytes([Coder.ZSTD, 2, 0]) + _u32(2**32 - 2)),
            "GeometryMismatch",
        ),
        "raw_with_plan": (wrong(5, b"\0"), "GeometryMismatch"),
        "coded_without_plan": (wrong(16, _u32(0)), "GeometryMismatch"),
        "other_position": (frame(FrameKind.CODED, start_position=0), "GeometryMismatch"),
        "other_tokens": (frame(FrameKind.CODED, num_tokens=23), "GeometryMismatch"),
        "other_plan": (_with(plan=1), "GeometryMismatch"),
        "other_artifact": (_with(artifact_digest=b"another artifact"), "GeometryMismatch"),
        "other_geometry": (_with(geometry_digest=b"yrtemoeg"), "GeometryMismatch"),
    }


def _frames_with_bad_streams() -> dict[str, tuple[bytes, str]]:
    good = frame(FrameKind.CODED)
    planes = _first_raw(good)
    stream, zstd = _deflate(planes), zstandard.ZstdCompressor(level=6).compress(planes)
    size_unknown = zstandard.ZstdCompressor(level=6, write_content_size=False).compress(planes)
    longer = zstandard.ZstdCompressor(level=6).compress(planes + b"x")
    # A frame of its own with four bytes that every decoder skips, as long as the section in the end.
    skippable = bytes.fromhex("502a4d18 04000000") + bytes(4)
    streams = {
        "stream_invalid": (b"\xff" * 20, "BitstreamError"),
        "stream_short": (_deflate(bytes(100)), "TruncatedFrame"),
        "stream_long": (_deflate(bytes(100_000)), "TruncatedFrame"),
        "stream_unfinished": (stream[:-1], "TruncatedFrame"),
        "stream_trailing_byte": (stream + b"\0", "TruncatedFrame"),
        "stream_of_another_coder": (zstd, "BitstreamError"),
    }
    zstd_streams = {
        "zstd_invalid": (zstd[:10] + b"\xff" * 20, "BitstreamError"),
        "zstd_of_another_coder": (stream, "BitstreamError"),
        "zstd_other_size": (longer, "TruncatedFrame"),
        "zstd_without_size": (size_unknown, "TruncatedFrame"),
        "zstd_cut": (zstd[:-1], "BitstreamError"),
        "zstd_header_cut": (zstd[:5], "BitstreamError"),
        "zstd_trailing_byte": (zstd + b"\0", "BitstreamError"),
        "zstd_trailing_frame": (zstd + skippable, "BitstreamError"),
        "zstd_skippable": (skippable, "BitstreamError"),
        "zstd_dictionary": (zstd[:4] + bytes([zstd[4] | 1, 7]) + zstd[5:], "BitstreamError"),
        "zstd_too_few_bytes": (zstd[:4] + b"\x20\x00" * 2, "TruncatedFrame"),
    }
    return {
        **{name: (_with_first_stream(good, *case[:1]), case[1]) for name, case in streams.items()},
        **{name: (_with_first_stream(good, case[0], Coder.ZSTD), case[1]) for name, case in zstd_streams.items()},
    }


def main() -> None:
    """Write all golden files."""
    sizes.write()
    for name, (wanted, content, written) in foreign_frames().items():
        _write(HERE / "v1" / name, written, _description(wanted, content, None))
    for name, (wanted, content, coder, k_symbols) in good_frames().items():
        written = write_frame(wanted, content, coder, 6)
        described = _description(wanted, content, k_symbols)
        if name == "coded_uniform":
            described["k_step"], described["k_groups"] = UNIFORM_STEP, UNIFORM_GROUPS
            described["k_coefficients"] = [[value.hex() for value in row] for row in uniform_coefficients()]
        _write(HERE / "v1" / name, written, described)
    wanted = expectation(header(FrameKind.CODED))
    for name, (written, error) in bad_frames().items():
        _write(HERE / "bad" / name, written, {"error": error, "expected": _plain(wanted)})


def _description(wanted: FrameHeader, content: Sections, k_symbols: Symbols | None) -> dict[str, Any]:
    description = {
        "header": {**_plain(wanted), "kind": wanted.kind.name},
        "sections": {section.name: bytes(memoryview(given)).hex() for section, given in content.items()},
    }
    if k_symbols is not None:
        widths, given = k_symbols
        description["k_widths"] = widths.tolist()
        description["k_symbols"] = [row.tobytes().hex() for row in given]
    return description


def uniform_coefficients() -> list[list[float]]:
    """Those of K in the golden uniform frame, from the numbers it was made of: [num_components][num_tokens]."""
    _, content, _, k_symbols = _uniform_frame()
    assert k_symbols is not None
    rows = [row.tolist() for row in k_symbols[1]]
    symbols_of = [[16 * upper + lower for upper, lower in zip(rows[c], rows[c + 2], strict=True)] for c in (0, 1)]
    symbols_of += rows[4:]
    offsets = [2 ** (width - 1) for size, width in UNIFORM_GROUPS for _ in range(size)]
    steps = []
    for code in memoryview(content[SectionId.K_PARAMS]):
        # 8 significant bits of 0.1 x 2^(e/4), by decimal arithmetic.
        exact = Decimal("0.1") * Decimal(2) ** (Decimal(code - 128) / 4)
        unit = Decimal(2) ** (math.frexp(float(exact))[1] - 8)
        steps.append(float((exact / unit).to_integral_value() * unit))
    return [
        [(symbol - offset) * step for symbol, step in zip(row, steps, strict=True)]
        for row, offset in zip(symbols_of, offsets, strict=True)
    ]


def _plain(value: FrameHeader | FrameExpectation) -> dict[str, Any]:
    return {key: item.hex() if isinstance(item, bytes) else item for key, item in dataclasses.asdict(value).items()}


def _write(stem: Path, written: bytes, description: dict[str, Any]) -> None:
    stem.with_suffix(".kvtc").write_bytes(written)
    stem.with_suffix(".json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


def _patched(good: bytes, offset: int, patch: bytes) -> bytes:
    return good[:offset] + patch + good[offset + len(patch) :]


def _with(**changes: Any) -> bytes:
    changed = dataclasses.replace(header(FrameKind.CODED), **changes)
    return write_frame(changed, sections(FrameKind.CODED), "deflate", 6)


def _without_last_section(good: bytes) -> bytes:
    last = list(open_frame(good).entries.values())[-1]
    table_end = HEADER_BYTES + 4 * ENTRY_BYTES
    rest = good[HEADER_BYTES : table_end - ENTRY_BYTES] + good[table_end : -8 - last.stored_bytes] + bytes(8)
    return resealed(_patched(good, 6, b"\3")[:HEADER_BYTES] + rest)


def _first_raw(good: bytes) -> bytes:
    """The byte planes of the first section."""
    entry = open_frame(good).entries[SectionId.K_PARAMS]
    stored = good[HEADER_BYTES + 4 * ENTRY_BYTES :][: entry.stored_bytes]
    return zlib.decompress(stored, -15)


def _with_first_stream(good: bytes, stream: bytes, coder: Coder = Coder.DEFLATE) -> bytes:
    """`good` with another stored first section of the same declared size."""
    entry = open_frame(good).entries[SectionId.K_PARAMS]
    payload = HEADER_BYTES + 4 * ENTRY_BYTES
    sized = _patched(good, HEADER_BYTES + 8, _u32(len(stream)))
    sized = _patched(sized, HEADER_BYTES + 1, bytes([coder]))
    return resealed(sized[:payload] + stream + sized[payload + entry.stored_bytes :])


def _other_half(good: bytes) -> bytes:
    """The end of another frame of the same length."""
    other = _with(artifact_digest=b"another artifact")
    return other[len(good) // 2 :]


def _coded(section: SectionId, content: Any, coder: Coder, code: Callable[[bytes], bytes]) -> CodedSection:
    array = np.ascontiguousarray(content)
    planes = shuffle(array.reshape(-1).view(np.uint8), array.itemsize)
    stored = code(planes.tobytes())
    return CodedSection(SectionEntry(section, coder, array.itemsize, planes.size, len(stored)), stored)


def _deflate_of_fixed_blocks(raw: bytes) -> bytes:
    """Blocks of the codes that RFC 1951 fixes, and empty ones of stored bytes between them."""
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15, 8, zlib.Z_FIXED)
    third = len(raw) // 3 + 1
    parts = [
        deflater.compress(raw[at : at + third]) + deflater.flush(zlib.Z_FULL_FLUSH) for at in (0, third, 2 * third)
    ]
    return b"".join(parts) + deflater.flush()


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def _deflate(raw: bytes) -> bytes:
    deflater = zlib.compressobj(6, zlib.DEFLATED, -15)
    return deflater.compress(raw) + deflater.flush()


if __name__ == "__main__":
    main()
