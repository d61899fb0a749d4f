"""`sglang-kvtc inspect`: verify an artifact or a frame and say what it holds."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_kvtc.artifact.io import load_artifact
from sglang_kvtc.bitstream.frame import open_frame
from sglang_kvtc.bitstream.header import MAGIC
from sglang_kvtc.calibrate.report import describe_artifact, describe_frame
from sglang_kvtc.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="artifact (directory or .safetensors file) or frame (.kvtc file)")


def run(args: argparse.Namespace) -> int:
    """Print one description. Raises ArtifactError or BitstreamError for a damaged file."""
    path: Path = args.path
    if not path.exists():
        raise ConfigError(f"{path}: no such file or directory")
    if path.is_file() and _starts_like_a_frame(path):
        lines = describe_frame(open_frame(path.read_bytes()))
    else:
        lines = describe_artifact(load_artifact(path))
    print("\n".join(lines))
    return 0


def _starts_like_a_frame(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix == ".kvtc" or file.read(len(MAGIC)) == MAGIC
