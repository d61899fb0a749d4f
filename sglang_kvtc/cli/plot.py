"""`sglang-kvtc plot`: pictures of an artifact and of what benchmarks measured with it."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_kvtc.artifact.io import load_artifact
from sglang_kvtc.calibrate.pictures import (
    plot_allocation,
    plot_held_out,
    plot_positions,
    plot_rate_distortion,
    plot_spectrum,
    plot_stages,
    read_records,
)
from sglang_kvtc.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", type=Path, help="directory or file written by `sglang-kvtc calibrate`")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the pictures are written")
    parser.add_argument(
        "--records",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="records of `sglang-kvtc bench --json` with rows of method, ratio and kl, or of error by position",
    )


def run(args: argparse.Namespace) -> int:
    """Draw what artifact and records allow and print the files."""
    artifact = load_artifact(args.artifact)
    if not artifact.plans:
        raise ConfigError(f"{args.artifact} is lossless only: it has no basis and no plan to draw")
    records = read_records(args.records)
    for name, draw in (
        ("spectrum", plot_spectrum),
        ("bit-allocation", plot_allocation),
        ("held-out-error", plot_held_out),
        ("stages", plot_stages),
    ):
        path = args.out / f"{name}.png"
        draw(artifact, path)
        print(path)
    drawn = 0
    for name, draw_records in (("rate-distortion", plot_rate_distortion), ("error-by-position", plot_positions)):
        path = args.out / f"{name}.png"
        if draw_records(records, path):
            print(path)
            drawn += 1
    if args.records and not drawn:
        raise ConfigError("--records: no row has method, ratio and kl, or method, position and an error")
    return 0
