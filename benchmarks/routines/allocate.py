"""Time and memory of the bit allocation of one side: error table and dynamic programme together."""

from __future__ import annotations

import argparse
import time

from sglang_kvtc.benchmarks.memory import peak_memory
from sglang_kvtc.benchmarks.synthetic import coefficients
from sglang_kvtc.cli.progress import TerminalProgress
from sglang_kvtc.codec.allocate import SAMPLE_TOKENS, Allocator, error_table, side_plan
from sglang_kvtc.errors import KVTCError
from sglang_kvtc.types import Side

HELP = "time and memory of the optimal bit allocation of one side (K) of a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The defaults are a Llama 3.1 8B as the paper calibrates it."""
    parser.add_argument("--features", type=int, default=32_768, help="features p of the side (default %(default)s)")
    parser.add_argument("--rank", type=int, default=10_000, help="components considered (default %(default)s)")
    parser.add_argument("--ratio", type=float, default=16.0, help="target ratio (default %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic coefficients (default %(default)s)")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Allocate once. `peak_bytes` is resident memory beyond the sample's, by the kernel's accounting."""
    sample = coefficients(Side.K, args.features, args.rank, SAMPLE_TOKENS, args.seed)
    budget = int(16 * args.features / args.ratio)
    progress = TerminalProgress()
    with peak_memory() as memory:
        started = time.perf_counter()
        with progress.stage("errors of all groups", 5 * args.rank, "components") as advance:
            table = error_table(sample, on_components=advance)
        measured = time.perf_counter()
        with progress.stage("bit allocation", args.rank, "components") as advance:
            allocator = Allocator(table, budget, advance)
        groups = allocator.groups(budget)
        finished = time.perf_counter()
    plan = side_plan(table, groups, float(table.variances.sum()))
    if plan.bits_per_token > budget or abs(table.error(groups) / allocator.errors[budget] - 1) > 1e-9:
        raise KVTCError(f"the allocation has {plan.bits_per_token} bits and another error than was promised")
    return [
        {
            "features": args.features,
            "rank": args.rank,
            "ratio": args.ratio,
            "budget_bits": budget,
            "seconds": finished - started,
            "table_seconds": measured - started,
            "peak_bytes": memory.peak_bytes,
            "groups": len(groups),
            "components": len(plan.columns),
            "predicted_error": plan.predicted_error,
        }
    ]
