"""Gated eviction on the live server, next to the stock server with the same flags.

concurrency: many long prompts at once in a fixed pool, SGLang's strict checks on. overhead: decode steps of the stock
attention backend and of ours, and what gating adds to ours (see `upkeep`), strict checks off. multi-turn: facts of a
list asked for over two turns, with and without the compressed tier. generation: the memory of one long answer under a
fixed budget. Servers run one after the other, since an idle one keeps a core busy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from sglang_kvtc.benchmarks.conversations import conversations, measure_conversations
from sglang_kvtc.benchmarks.live_servers import (
    Row,
    Setup,
    measure_concurrency,
    measure_generation,
    measure_overhead,
    plot_generation,
)
from sglang_kvtc.calibrate.causal_lm import load_config, load_tokenizer, model_geometry
from sglang_kvtc.calibrate.demo_artifact import demo_artifact
from sglang_kvtc.calibrate.demo_model import default_cache_dir, demo_model_dir
from sglang_kvtc.cli.progress import TerminalProgress
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.gates.io import load_gates

HELP = "requests together, upkeep, answers over two turns and memory of long answers, with gated eviction on a server"

PARTS = ("concurrency", "overhead", "multi-turn", "generation")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Parts, gates and budgets; then the sizes of each part."""
    parser.add_argument("--parts", type=_names, default=PARTS, help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument("--gates", type=Path, help="gate file (default: the demo gates, trained on first use)")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="demo model, artifact and gates")
    parser.add_argument("--keep", type=_shares, default=(0.5, 0.3), help="shares that stay (default 0.5,0.3)")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="of a prompt at once (default %(default)s)")
    parser.add_argument("--pool-tokens", type=int, default=8000, help="memory of a server (default %(default)s)")
    parser.add_argument("--requests", type=int, default=12, help="concurrency: prompts at once (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="... tokens of each (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=48, help="... tokens to generate (default %(default)s)")
    parser.add_argument("--batches", type=_counts, default=(1, 8), help="overhead: requests that decode (default 1,8)")
    parser.add_argument("--context-tokens", type=int, default=1000, help="... tokens of each (default %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="... decode steps (default %(default)s)")
    parser.add_argument("--conversations", type=int, default=5, help="multi-turn: how many (default %(default)s)")
    parser.add_argument("--lines", type=int, default=50, help="... facts in each (default %(default)s)")
    parser.add_argument("--needles", type=int, default=20, help="... facts asked for (default %(default)s)")
    parser.add_argument("--window", type=int, default=8, help="... last tokens kept (default %(default)s)")
    parser.add_argument("--ratio", type=float, default=16.0, help="... target ratio of the tier (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="... of the facts (default %(default)s)")
    parser.add_argument("--generate", type=int, default=1500, help="generation: tokens (default %(default)s)")
    parser.add_argument("--start-tokens", type=int, default=256, help="... of its prompt (default %(default)s)")
    parser.add_argument("--keep-tokens", type=int, default=512, help="... its budget (default %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the memory of a long answer, as .png")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return the rows of each part; a quarter of an hour on two idle cores once gates and artifact exist."""
    _check(args)
    model_dir = demo_model_dir(args.cache_dir)
    tokenizer = load_tokenizer(model_dir)
    progress = TerminalProgress()
    path = args.gates
    if path is None:
        from sglang_kvtc.distill.demo_gates import demo_gates

        path = demo_gates(progress, args.cache_dir)
    gates = load_gates(path)
    geometry = model_geometry(load_config(model_dir).get_text_config(decoder=True))
    setup = Setup(model_dir, geometry, path.resolve(), args.chunk_tokens)

    def concurrency() -> list[Row]:
        return measure_concurrency(
            setup,
            args.keep,
            gates,
            progress,
            requests=args.requests,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            pool_tokens=args.pool_tokens,
        )

    def overhead() -> list[Row]:
        # Everything kept: as many pairs are attended to as on stock. Least kept: the most is evicted.
        shares = tuple(dict.fromkeys((1.0, min(args.keep))))
        return measure_overhead(
            setup,
            shares,
            gates,
            progress,
            batches=args.batches,
            context_tokens=args.context_tokens,
            steps=args.steps,
        )

    def multi_turn() -> list[Row]:
        held = conversations(
            tokenizer,
            model_dir,
            count=args.conversations,
            num_lines=args.lines,
            needles=args.needles,
            chunk_tokens=args.chunk_tokens,
            seed=args.seed,
        )
        return measure_conversations(
            setup,
            held,
            args.keep,
            demo_artifact(progress, args.cache_dir),
            progress,
            window=args.window,
            ratio=args.ratio,
            pool_tokens=args.pool_tokens,
        )

    def generation() -> list[Row]:
        rows, curves = measure_generation(
            setup, args.keep_tokens, progress, prompt_tokens=args.start_tokens, new_tokens=args.generate
        )
        if args.plot is not None:
            plot_generation(curves, args.plot)
        return rows

    measures: dict[str, Callable[[], list[Row]]] = dict(
        zip(PARTS, (concurrency, overhead, multi_turn, generation), strict=True)
    )
    return [row for part in PARTS if part in args.parts for row in measures[part]()]


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for what would fail after minutes only."""
    if unknown := [name for name in args.parts if name not in PARTS]:
        raise ConfigError(f"--parts {','.join(unknown)}: expected some of {', '.join(PARTS)}")
    if wrong := [share for share in args.keep if not 0 < share <= 1]:
        raise ConfigError(f"--keep {wrong[0]}: expected shares above 0 and at most 1")
    if args.plot is not None and (args.plot.suffix != ".png" or not args.plot.parent.is_dir()):
        raise ConfigError(f"--plot {args.plot}: expected a file name that ends in .png, in a folder that exists")
    if args.plot is not None and "generation" not in args.parts:
        raise ConfigError("--plot: only the part generation has a picture")
    if args.prompt_tokens + args.new_tokens >= args.pool_tokens:
        raise ConfigError(
            f"--pool-tokens {args.pool_tokens}: expected more than the {args.prompt_tokens} + {args.new_tokens} of one "
            "request, which stock has to hold"
        )
    if args.needles < 2:
        raise ConfigError(f"--needles {args.needles}: expected at least 2, one of them for the first turn")
    for name in ("requests", "new_tokens", "conversations", "steps", "generate"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 1")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _shares(text: str) -> tuple[float, ...]:
    return tuple(float(share) for share in text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(count) for count in text.split(","))
