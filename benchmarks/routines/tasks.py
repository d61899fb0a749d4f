"""Accuracy on generated tasks by method, shaped like Table 16 of the paper (Table 2 with standard errors).

Every method codes the same prefilled contexts, and the questions come afterwards. Ratios count every stored byte before
the window; `whole_ratio` counts the window too.
"""

from __future__ import annotations

import argparse

from sglang_kvtc.benchmarks.accuracy import score
from sglang_kvtc.benchmarks.harness import SINK_TOKENS, WINDOW_TOKENS
from sglang_kvtc.benchmarks.schemes import DEFAULT_METHODS, add_model_arguments, find_artifacts, find_model, schemes
from sglang_kvtc.benchmarks.tasks import (
    PASSKEY_DEPTHS,
    TASKS,
    add_task_arguments,
    check_lengths,
    comma_separated,
    draw_tasks,
)
from sglang_kvtc.calibrate.causal_lm import DTYPES, load_model, load_tokenizer
from sglang_kvtc.cli.progress import TerminalProgress

HELP = "accuracy in percent on key-value retrieval, variable tracking, passkeys and arithmetic, by method"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, methods, tasks and what stays raw."""
    add_model_arguments(parser)
    parser.add_argument(
        "--methods",
        type=comma_separated,
        default=DEFAULT_METHODS,
        help=f"fp8, kivi2, kivi4, svdR, dpqR, kvtc, kvtcR (default {','.join(DEFAULT_METHODS)})",
    )
    add_task_arguments(parser, tuple(TASKS), 20)
    parser.add_argument("--sinks", type=int, default=SINK_TOKENS, help="first tokens left raw (default %(default)s)")
    parser.add_argument("--window", type=int, default=WINDOW_TOKENS, help="last tokens left raw (default %(default)s)")
    parser.add_argument("--by-depth", action="store_true", help="also the passkeys at each depth")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks (default %(default)s)")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row per method, that of the full cache first."""
    progress = TerminalProgress()
    model_dir = find_model(args)
    tasks = draw_tasks(args, load_tokenizer(model_dir))
    check_lengths(tasks, args.sinks + args.window)
    calibrated = find_artifacts(args, model_dir, progress)
    compared = schemes(args.methods, calibrated, sink_tokens=args.sinks, window_tokens=args.window)
    model = load_model(model_dir, "float32")
    cache_dtype = DTYPES[calibrated[0].artifact.geometry.dtype]
    rows: list[dict[str, object]] = []
    for found in score(model, compared, tasks, {}, cache_dtype, progress):
        row = {"method": found.scheme.name, **found.columns()}
        if args.by_depth and "passkey" in found.correct:
            row |= {f"depth_{depth:g}": found.correct_at("passkey", i) for i, depth in enumerate(PASSKEY_DEPTHS)}
        rows.append(row)
    return rows
