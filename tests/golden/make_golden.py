"""Write the golden frames: run by hand, from the folder `tests`, when the format gains a version or a case.

    python -m golden.make_golden

`v1/<name>.kvtc` must decode to what `v1/<name>.json` says, in every later version. `bad/<name>.kvtc` must be refused
with the error class of `bad/<name>.json`. A test never writes here.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
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

from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.bitstream.entropy import Coder
from sglang_kvtc.bitstream.frame import ENTRY_BYTES, SectionId, open_frame, write_frame
from sglang_kvtc.bitstream.header import HEADER_BYTES, FrameExpectation, FrameHeader, FrameKind

HERE = Path(__file__).parent
Symbols = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]


def good_frames() -> dict[str, tuple[FrameHeader, Sections, str, Symbols | None]]:
    """Name -> header, sections, coder, and (widths, symbols) of K where the frame has any."""
    coded = header(FrameKind.CODED)
    frames: dict[str, tuple[FrameHeader, Sections, str, Symbols | None]] = {
        "raw_no_tokens": (header(FrameKind.RAW, 0, 0), sections(FrameKind.RAW, 0), "deflate", None),
        "raw_sinks_bfloat16": (header(FrameKind.RAW, 4, 0), sections(FrameKind.RAW, 4), "deflate", None),
        "fp8_window": (header(FrameKind.FP8, 9, 1015), sections(FrameKind.FP8, 9), "deflate", None),
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
        ("coded_identity", 24, "identity"),
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
    none_kept = np.zeros(8, np.uint8)
    frames["coded_zero_widths"] = (
        coded,
        {**sections(FrameKind.CODED), SectionId.K_SYMBOLS: b"", SectionId.V_PARAMS: b"", SectionId.V_SYMBOLS: b""},
        "deflate",
        (none_kept, np.zeros((8, 24), np.uint8)),
    )
    return frames


def bad_frames() -> dict[str, tuple[bytes, str]]:
    """Name -> bytes, error class. All are read as if the frame of `frame(FrameKind.CODED)` were wanted."""
    good = frame(FrameKind.CODED)
    params = HEADER_BYTES + 4
    bad = {
        "empty": (b"", "TruncatedFrame"),
        "header_cut": (good[: HEADER_BYTES - 1], "TruncatedFrame"),
        "table_cut": (good[: HEADER_BYTES + ENTRY_BYTES], "TruncatedFrame"),
        "last_byte_cut": (good[:-1], "TruncatedFrame"),
        "trailing_byte": (good + b"\0", "TruncatedFrame"),
        "magic": (resealed(b"KVTX" + good[4:]), "UnsupportedVersion"),
        "version_2": (resealed(_patched(good, 4, b"\2")), "UnsupportedVersion"),
        "payload_bit_flipped": (_patched(good, 200, bytes([good[200] ^ 16])), "ChecksumMismatch"),
        "checksum_bit_flipped": (_patched(good, len(good) - 1, bytes([good[-1] ^ 1])), "ChecksumMismatch"),
        "position_changed": (_patched(good, 13, b"\0"), "ChecksumMismatch"),
        "header_flag": (resealed(_patched(good, 7, b"\1")), "UnsupportedVersion"),
        "kind_3": (resealed(_patched(good, 5, b"\3")), "UnsupportedVersion"),
        "section_twice": (resealed(_patched(good, HEADER_BYTES, b"\1")), "UnsupportedVersion"),
        "section_unknown": (resealed(_patched(good, HEADER_BYTES, b"\x63")), "UnsupportedVersion"),
        "section_missing": (_without_last_section(good), "UnsupportedVersion"),
        "coder_gdeflate": (resealed(_patched(good, HEADER_BYTES + 1, bytes([Coder.GDEFLATE]))), "UnsupportedVersion"),
        "element_of_3_bytes": (resealed(_patched(good, HEADER_BYTES + 2, b"\3")), "UnsupportedVersion"),
        "declares_4_gib": (resealed(_patched(good, params, (2**32 - 2).to_bytes(4, "little"))), "GeometryMismatch"),
        "raw_with_plan": (resealed(_patched(good, 5, b"\0")), "GeometryMismatch"),
        "other_position": (frame(FrameKind.CODED, start_position=0), "GeometryMismatch"),
        "other_tokens": (frame(FrameKind.CODED, num_tokens=23), "GeometryMismatch"),
        "other_plan": (_with(plan=1), "GeometryMismatch"),
        "other_artifact": (_with(artifact_digest=b"another artifact"), "GeometryMismatch"),
        "other_geometry": (_with(geometry_digest=b"yrtemoeg"), "GeometryMismatch"),
        "stream_invalid": (_with_first_stream(good, b"\xff" * 20), "BitstreamError"),
        "stream_short": (_with_first_stream(good, _deflate(bytes(100))), "TruncatedFrame"),
        "stream_long": (_with_first_stream(good, _deflate(bytes(100_000))), "TruncatedFrame"),
        "stream_unfinished": (_with_first_stream(good, _deflate(_first_raw(good))[:-1]), "TruncatedFrame"),
        "stream_trailing_byte": (_with_first_stream(good, _deflate(_first_raw(good)) + b"\0"), "TruncatedFrame"),
    }
    return bad


def main() -> None:
    """Write all golden files."""
    for name, (wanted, content, coder, k_symbols) in good_frames().items():
        written = write_frame(wanted, content, coder, 6)
        _write(HERE / "v1" / name, written, _description(wanted, content, k_symbols))
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


def _with_first_stream(good: bytes, stream: bytes) -> bytes:
    """`good` with another stored first section of the same declared size."""
    entry = open_frame(good).entries[SectionId.K_PARAMS]
    payload = HEADER_BYTES + 4 * ENTRY_BYTES
    sized = _patched(good, HEADER_BYTES + 8, len(stream).to_bytes(4, "little"))
    return resealed(sized[:payload] + stream + sized[payload + entry.stored_bytes :])


def _deflate(raw: bytes) -> bytes:
    deflater = zlib.compressobj(6, zlib.DEFLATED, -15)
    return deflater.compress(raw) + deflater.flush()


if __name__ == "__main__":
    main()
