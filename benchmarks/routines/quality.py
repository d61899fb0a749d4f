"""How far the model's output moves when the KV of a prefix is coded and decoded, against simple quantisers.

Both presets of `calibrate` are compared in one run. KL, NLL and top-1 are measured in fp32 on held-out text; ratios
count every stored byte of the coded tokens. Rows "kvtc node" code the whole prefix as the tier stores it: sinks raw,
the last tokens by the finest plan.
"""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from pathlib import Path
from typing import get_args

from sglang_kvtc.artifact.io import load_artifact
from sglang_kvtc.benchmarks.baselines import fp8, integer
from sglang_kvtc.benchmarks.harness import Method, add_passage_arguments, evaluate, held_out_passages, summarize
from sglang_kvtc.benchmarks.schemes import kvtc
from sglang_kvtc.calibrate.calibration import cached_calibration
from sglang_kvtc.calibrate.causal_lm import DTYPES, load_config, load_model, load_tokenizer, model_geometry
from sglang_kvtc.calibrate.demo_artifact import DEMO_RATIOS, DEMO_TOKENS, demo_calibration
from sglang_kvtc.calibrate.demo_model import default_cache_dir, demo_model_dir
from sglang_kvtc.calibrate.settings import Preset
from sglang_kvtc.calibrate.small_qwen import small_qwen_dir
from sglang_kvtc.cli.progress import TerminalProgress

FAMILIES = ("llama", "qwen")
PRESETS = get_args(Preset)
HELP = "KL, NLL and top-1 of a model on a coded prefix, against fp8 and 2- and 4-bit quantisers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes default to those of the measured reference (six documents, 1,024 + 192 tokens)."""
    parser.add_argument("--model", type=Path, help="Hugging Face model directory (default: see --family)")
    parser.add_argument(
        "--family",
        choices=FAMILIES,
        default=FAMILIES[0],
        help="without --model: the demo model, or the Qwen3 model trained from it (default %(default)s)",
    )
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="models and artifacts")
    parser.add_argument("--ratio", type=float, default=16.0, help="target ratio to show first (default %(default)g)")
    parser.add_argument("--ratios", type=_ratios, default=DEMO_RATIOS, help="all target ratios, comma-separated")
    parser.add_argument("--presets", type=_names, default=PRESETS, help=f"of {','.join(PRESETS)} (default: all)")
    parser.add_argument("--tokens", type=int, default=DEMO_TOKENS, help="calibration tokens (default %(default)s)")
    add_passage_arguments(parser, documents=6, prefix_tokens=1024, suffix_tokens=192)


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row per method; artifacts are calibrated once and then read from the cache folder."""
    model_dir = args.model or _family_dir(args.family, args.cache_dir)
    ratios = tuple(dict.fromkeys((args.ratio, *args.ratios)))
    settings = demo_calibration(model_dir, args.tokens, ratios)
    artifacts = {
        preset: load_artifact(
            cached_calibration(dataclasses.replace(settings, preset=preset), args.cache_dir, TerminalProgress())
        )
        for preset in args.presets
    }
    tokenizer = load_tokenizer(model_dir)
    model = load_model(model_dir, "float32")
    cache_dtype = DTYPES[model_geometry(load_config(model_dir)).dtype]
    passages = held_out_passages(args, model, tokenizer, cache_dtype)
    rows: list[dict[str, object]] = []

    def add(method: str, preset: str, target_ratio: float, function: Method, **uncoded: int) -> None:
        results = [evaluate(model, passage, function, **uncoded) for passage in passages]
        rows.append({"method": method, "preset": preset, "target_ratio": target_ratio, **summarize(results)})

    for preset, artifact in artifacts.items():
        for ratio in ratios:
            add("kvtc", preset, ratio, kvtc(artifact, ratio))
    for preset, artifact in artifacts.items():
        for ratio in ratios:
            add("kvtc node", preset, ratio, kvtc(artifact, ratio, as_node=True), sink_tokens=0, window_tokens=0)
    rope = artifacts[args.presets[0]].rope
    add("fp8", "", 2.0, fp8)
    add("int4", "", 4.0, partial(integer, rope=rope, num_bits=4))
    add("int2", "", 8.0, partial(integer, rope=rope, num_bits=2))
    return rows


def _family_dir(family: str, cache_dir: Path) -> Path:
    return small_qwen_dir(TerminalProgress(), cache_dir) if family == "qwen" else demo_model_dir(cache_dir)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in PRESETS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: expected some of {', '.join(PRESETS)}")
    return names


def _ratios(text: str) -> tuple[float, ...]:
    return tuple(float(ratio) for ratio in text.split(","))
