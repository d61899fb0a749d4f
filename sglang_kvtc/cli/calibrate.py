"""`sglang-kvtc calibrate`: fit a model's artifact on text and check it on held-out text."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from sglang_kvtc.artifact.io import save_artifact
from sglang_kvtc.calibrate.calibration import Calibration, calibrate
from sglang_kvtc.calibrate.report import describe_artifact
from sglang_kvtc.cli.progress import TerminalProgress

_DEFAULTS = Calibration(Path())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags and their defaults are those of `calibrate.calibration.Calibration`."""
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="Hugging Face model directory")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the artifact is written")
    parser.add_argument(
        "--data",
        nargs="+",
        default=list(_DEFAULTS.data),
        metavar="FILE",
        help="text to calibrate on: builtin (text that ships with Python), .txt, .jsonl, .parquet, directories",
    )
    parser.add_argument("--tokens", type=int, default=_DEFAULTS.num_tokens, help="tokens to run (default %(default)s)")
    parser.add_argument(
        "--ratio",
        type=_ratios,
        default=_DEFAULTS.ratios,
        metavar="R[,R]",
        help="target ratios before entropy coding, one plan each (default 16); 1 alone is lossless",
    )
    parser.add_argument("--seed", type=int, default=_DEFAULTS.seed, help="order of the text (default %(default)s)")
    parser.add_argument(
        "--max-length", type=int, default=_DEFAULTS.max_length, help="tokens of a long sequence (default %(default)s)"
    )
    parser.add_argument("--dtype", default=_DEFAULTS.dtype, help="of the forward passes (default %(default)s)")
    parser.add_argument("--device", default=_DEFAULTS.device, help="torch device (default %(default)s)")
    parser.add_argument(
        "--pca",
        choices=("auto", "exact", "randomized"),
        default=_DEFAULTS.pca,
        help="auto is exact up to 8192 features per side (default %(default)s)",
    )
    parser.add_argument(
        "--rank", type=int, default=_DEFAULTS.rank, help="most components to fit (default 0: 10000 or all of them)"
    )
    parser.add_argument(
        "--max-error",
        type=float,
        default=_DEFAULTS.max_error,
        help="refuse a ratio that loses more of the held-out variance of K or V (default %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default 0: as many as torch takes)")


def run(args: argparse.Namespace) -> int:
    """Calibrate, write the artifact and print what it holds."""
    settings = Calibration(
        model_dir=args.model,
        data=tuple(args.data),
        num_tokens=args.tokens,
        ratios=args.ratio,
        seed=args.seed,
        max_length=args.max_length,
        dtype=args.dtype,
        device=args.device,
        pca=args.pca,
        rank=args.rank,
        max_error=args.max_error,
    )
    if args.threads > 0:
        torch.set_num_threads(args.threads)
    artifact = save_artifact(calibrate(settings, TerminalProgress()), args.out)
    print("\n".join(describe_artifact(artifact)))
    print(f"written to {args.out}")
    return 0


def _ratios(text: str) -> tuple[float, ...]:
    return tuple(float(ratio) for ratio in text.split(","))
