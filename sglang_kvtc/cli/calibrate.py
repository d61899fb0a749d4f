"""`sglang-kvtc calibrate`: fit a model's artifact on text and check it on held-out text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import torch

from sglang_kvtc.artifact.io import save_artifact
from sglang_kvtc.artifact.shard import shard_of
from sglang_kvtc.calibrate.calibration import calibrate_shards
from sglang_kvtc.calibrate.estimate import describe_estimate, estimate
from sglang_kvtc.calibrate.report import describe_artifact
from sglang_kvtc.calibrate.settings import Calibration, Preset, Split
from sglang_kvtc.cli.progress import TerminalProgress

_DEFAULTS = Calibration(Path())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags and their defaults are those of `calibrate.calibration.Calibration`."""
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="Hugging Face model directory")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the artifact is written")
    parser.add_argument(
        "--data",
        nargs="+",
        default=list(_DEFAULTS.data),
        metavar="FILE",
        help="text to calibrate on: builtin (text that ships with Python), .txt, .jsonl, .parquet, directories",
    )
    parser.add_argument("--tokens", type=int, default=_DEFAULTS.num_tokens, help="tokens to run (default %(default)s)")
    parser.add_argument(
        "--preset",
        choices=get_args(Preset),
        default=_DEFAULTS.preset,
        help="minimise the error of the model's output, or that of K and V as KVTC does (default %(default)s)",
    )
    _add_targets(parser)
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
        "--layers-per-group",
        type=int,
        default=_DEFAULTS.layers_per_group,
        metavar="N",
        help="layers that share a PCA (default 0: all of them)",
    )
    parser.add_argument(
        "--max-error",
        type=float,
        default=_DEFAULTS.max_error,
        help="refuse a ratio that loses more of the held-out variance of K or V (default %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="write a plan that loses more, and record that it does")
    parser.add_argument("--tp", type=int, default=_DEFAULTS.tp_size, help="tensor parallel ranks, an artifact for each")
    parser.add_argument("--pp", type=int, default=_DEFAULTS.pp_size, help="pipeline stages, an artifact for each")
    parser.add_argument(
        "--work-dir", type=Path, metavar="DIR", help="keep what is collected there, and continue from it after a stop"
    )
    parser.add_argument(
        "--save-every",
        type=int,
        default=_DEFAULTS.save_every,
        metavar="N",
        help="sequences between two writes of --work-dir (default %(default)s)",
    )
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="fit the work folders of finished runs over different text together; --data only checks the result",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print memory, time and size it would take; config.json is enough"
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default 0: as many as torch takes)")
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Calibrate, write the artifact and print what it holds."""
    settings = Calibration(
        model_dir=args.model,
        preset=args.preset,
        data=tuple(args.data),
        num_tokens=args.tokens,
        ratios=args.ratio or _DEFAULTS.ratios,
        k_ratios=args.k_ratio,
        v_ratios=args.v_ratio,
        split=args.split,
        target_errors=args.target_error,
        window_ratio=args.window_ratio,
        seed=args.seed,
        max_length=args.max_length,
        dtype=args.dtype,
        device=args.device,
        pca=args.pca,
        rank=args.rank,
        layers_per_group=args.layers_per_group,
        max_error=args.max_error,
        force=args.force,
        tp_size=args.tp,
        pp_size=args.pp,
        work_dir=args.work_dir,
        save_every=args.save_every,
        merge=tuple(args.merge),
    )
    if args.threads > 0:
        torch.set_num_threads(args.threads)
    if args.dry_run:
        print("\n".join(describe_estimate(estimate(settings))))
        return 0
    if args.out is None:
        args.usage_error("the following arguments are required: --out")
    for artifact in calibrate_shards(settings, TerminalProgress()):
        shard = shard_of(artifact.provenance)
        path = args.out if shard is None else args.out / shard.name
        print("\n".join(describe_artifact(save_artifact(artifact, path))))
        print(f"written to {path}")
    return 0


def _add_targets(parser: argparse.ArgumentParser) -> None:
    targets = parser.add_mutually_exclusive_group()
    targets.add_argument(
        "--ratio",
        type=_numbers,
        default=(),
        metavar="R[,R]",
        help="target ratios (preset paper: before entropy coding), one plan each (default 16); 1 alone is lossless",
    )
    targets.add_argument(
        "--k-ratio",
        type=_numbers,
        default=(),
        metavar="R[,R]",
        help="target ratios of K, each with one of --v-ratio; the plan is named after the ratio of both together",
    )
    parser.add_argument("--v-ratio", type=_numbers, default=(), metavar="R[,R]", help="target ratios of V")
    parser.add_argument(
        "--split",
        choices=get_args(Split),
        default=_DEFAULTS.split,
        help="give K and V the same ratio, or the shares of the bits that lose least; auto: the latter in preset "
        "sensitivity (default %(default)s)",
    )
    targets.add_argument(
        "--target-error",
        type=_numbers,
        default=(),
        metavar="E[,E]",
        help="instead of ratios: the largest ratio that loses at most this share of the variance of K and of V",
    )
    parser.add_argument(
        "--window-ratio",
        type=float,
        default=_DEFAULTS.window_ratio,
        metavar="R",
        help="target ratio of one more plan, for the last tokens of a prefix, which matter most, unless another is as "
        "fine; 0 for none (default %(default)g)",
    )


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(","))
