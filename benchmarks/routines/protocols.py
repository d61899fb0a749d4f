"""What coding a growing cache does to a document that is read on: once, as the paper simulates it, and turn by turn.

KL, NLL and top-1 in fp32 against the full cache. `ratio` counts what stands before the window, of the last coding;
turn by turn it counts everything, since windows are stored too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from sglang_kvtc.benchmarks import protocols
from sglang_kvtc.benchmarks.harness import (
    SINK_TOKENS,
    WINDOW_TOKENS,
    Passage,
    PositionChanges,
    add_passage_arguments,
    compare_positions,
    held_out_passages,
    mean_and_error,
    means,
    position_rows,
)
from sglang_kvtc.benchmarks.protocols import Reading
from sglang_kvtc.benchmarks.schemes import (
    Bytes,
    Calibrated,
    add_model_arguments,
    find_artifacts,
    find_model,
    schemes,
)
from sglang_kvtc.benchmarks.tasks import comma_separated
from sglang_kvtc.calibrate.causal_lm import DTYPES, load_model, load_tokenizer
from sglang_kvtc.cli.progress import TerminalProgress
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import CodecConfig, TierConfig
from sglang_kvtc.errors import ConfigError

HELP = "KL, NLL and top-1 where a cache is coded once, every few tokens (the paper), and turn by turn (the tier)"

Read = Callable[[Any, Passage], Reading]
DEFAULT_METHODS = ("fp8", "kivi2", "kvtc16", "kvtc32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, methods, and the sizes of documents, intervals and turns."""
    add_model_arguments(parser)
    parser.add_argument(
        "--methods",
        type=comma_separated,
        default=DEFAULT_METHODS,
        help=f"as of `bench tasks`; the tier has kvtc alone (default {','.join(DEFAULT_METHODS)})",
    )
    # The prefix is the tier's first turn.
    add_passage_arguments(parser, documents=6, prefix_tokens=640, suffix_tokens=384)
    parser.add_argument("--interval", type=int, default=16, help="the paper's c: code so often (default %(default)s)")
    parser.add_argument("--window", type=int, default=WINDOW_TOKENS, help="last tokens not coded (default %(default)s)")
    parser.add_argument("--turn-tokens", type=int, default=192, help="of the tier's later turns (default %(default)s)")
    parser.add_argument(
        "--bin-tokens",
        type=int,
        default=0,
        help="a row per so many positions instead of one for all",
    )


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row per protocol and method, or with --bin-tokens one for each of their bins of positions."""
    _check_sizes(args)
    progress = TerminalProgress()
    model_dir = find_model(args)
    calibrated = find_artifacts(args, model_dir, progress)
    readers = list(_readers(args, calibrated))
    tokenizer = load_tokenizer(model_dir)
    model = load_model(model_dir, "float32")
    passages = held_out_passages(args, model, tokenizer, DTYPES[calibrated[0].artifact.geometry.dtype])
    rows: list[dict[str, object]] = []
    with progress.stage("held-out documents", len(readers) * len(passages), "readings") as advance:
        for protocol, method, read in readers:
            changes, sizes = [], Bytes()
            for passage in passages:
                reading = read(model, passage)
                changes.append(compare_positions(passage.log_probs, reading.log_probs, passage.suffix))
                sizes.merge(reading.sizes)
                advance(1)
            row: dict[str, object] = {"protocol": protocol, "method": method, **sizes.columns()}
            if args.bin_tokens:
                rows += [row | columns for columns in position_rows(changes, args.prefix_tokens, args.bin_tokens)]
            else:
                rows.append(row | _means(changes))
    return rows


def _check_sizes(args: argparse.Namespace) -> None:
    """Raise ConfigError for sizes with which there is nothing to measure."""
    raw_tokens = SINK_TOKENS + args.window
    smallest = {"documents": 1, "prefix_tokens": raw_tokens + 1, "suffix_tokens": 2, "interval": 1, "turn_tokens": 1}
    smallest |= {"window": args.interval, "bin_tokens": 0}
    for name, least in smallest.items():
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least {least}")


def _readers(args: argparse.Namespace, calibrated: Sequence[Calibrated]) -> Iterator[tuple[str, str, Read]]:
    """Protocol, method and function of every combination."""
    for scheme in schemes(args.methods, calibrated, window_tokens=args.window):
        yield "once", scheme.name, partial(protocols.once, coder=scheme.code)
    # As in the paper: w - c tokens are left when the cache is coded, and w before it is coded again.
    shortest = args.window - args.interval
    for scheme in schemes(args.methods, calibrated, window_tokens=shortest, residual_tokens=args.window)[1:]:
        read = partial(protocols.every, coder=scheme.code, interval_tokens=args.interval)
        yield f"every {args.interval}", scheme.name, read
    for one in calibrated:
        for ratio in _tier_ratios(args.methods, one):
            for window_format in ("coded", "fp8", "raw"):
                config = CodecConfig(
                    target_ratio=ratio,
                    sink_tokens=SINK_TOKENS,
                    window_tokens=args.window,
                    window_format=window_format,
                )
                read = partial(
                    protocols.turns,
                    codec=KVCodec(one.artifact, config),
                    turn_tokens=args.turn_tokens,
                    min_coded_tokens=TierConfig().min_node_tokens,
                )
                yield f"turns of {args.turn_tokens}, {window_format} window", one.named(f"kvtc {ratio:g}x"), read


def _tier_ratios(methods: Sequence[str], one: Calibrated) -> list[float]:
    """Ratios of the kvtc methods among `methods`, which are known to be well-formed."""
    ratios: list[float] = []
    for name in methods:
        if name == "kvtc":
            ratios += sorted(plan.target_ratio for plan in one.artifact.plans)
        elif name.startswith("kvtc"):
            ratios.append(float(name.removeprefix("kvtc")))
    return ratios


def _means(changes: Sequence[PositionChanges]) -> dict[str, object]:
    sums = [change.sums() for change in changes]
    columns = mean_and_error("kl", [change.kl / change.num_tokens for change in sums])
    return columns | {name: value for name, value in means(sums).items() if name != "kl"}
