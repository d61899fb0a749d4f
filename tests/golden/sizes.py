"""Sizes of fixed frames by kind, coder and level: `sizes.json`, which `golden.make_golden` writes."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import zstandard
from bitstream.sample_frames import header, sections

from sglang_kvtc.bitstream.frame import write_frame
from sglang_kvtc.bitstream.header import FrameKind

FILE = Path(__file__).with_name("sizes.json")
TOKENS = 256
LEVELS = {"identity": (1,), "deflate": (1, 6, 9), "zstd": (1, 6, 9)}


def versions() -> dict[str, str]:
    """Libraries on which the sizes depend, by coder."""
    return {
        "deflate": f"zlib {zlib.ZLIB_RUNTIME_VERSION}",
        "zstd": "zstd " + ".".join(map(str, zstandard.ZSTD_VERSION)),
    }


def frame_sizes() -> dict[str, dict[str, int]]:
    """Bytes of a frame of TOKENS tokens, by kind and "coder level"."""
    return {
        kind.name: {
            f"{coder} {level}": len(write_frame(header(kind, TOKENS), sections(kind, TOKENS), coder, level))
            for coder, levels in LEVELS.items()
            for level in levels
        }
        for kind in FrameKind
    }


def write() -> None:
    FILE.write_text(json.dumps({"versions": versions(), "sizes": frame_sizes()}, indent=1) + "\n", encoding="utf-8")


def read() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return loaded
