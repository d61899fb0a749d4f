"""How far the model's output moves when the KV of a prefix is coded and decoded, against simple quantisers.

KL, NLL and top-1 are measured in fp32 on held-out text; ratios count every stored byte of the coded tokens.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch

from sglang_kvtc.artifact.io import load_artifact
from sglang_kvtc.artifact.schema import Artifact
from sglang_kvtc.benchmarks.baselines import Coded, fp8, integer
from sglang_kvtc.benchmarks.harness import Method, evaluate, load_passages, summarize
from sglang_kvtc.calibrate.calibration import cached_calibration
from sglang_kvtc.calibrate.causal_lm import DTYPES, load_model, load_tokenizer
from sglang_kvtc.calibrate.corpus import BUILTIN, read_documents, split_documents
from sglang_kvtc.calibrate.demo_artifact import DEMO_RATIOS, DEMO_TOKENS, demo_calibration
from sglang_kvtc.calibrate.demo_model import default_cache_dir, demo_model_dir
from sglang_kvtc.cli.progress import TerminalProgress
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.types import TokenRange

HELP = "KL, NLL and top-1 of a model on a coded prefix, against fp8 and 2- and 4-bit quantisers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes default to those of the measured reference (six documents, 1,024 + 192 tokens)."""
    parser.add_argument("--model", type=Path, help="Hugging Face model directory (default: the demo model)")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="demo model and artifacts")
    parser.add_argument("--ratio", type=float, default=16.0, help="target ratio to show first (default %(default)g)")
    parser.add_argument("--ratios", type=_ratios, default=DEMO_RATIOS, help="all target ratios, comma-separated")
    parser.add_argument("--tokens", type=int, default=DEMO_TOKENS, help="calibration tokens (default %(default)s)")
    parser.add_argument("--documents", type=int, default=6, help="held-out documents (default %(default)s)")
    parser.add_argument("--prefix-tokens", type=int, default=1024, help="coded context (default %(default)s)")
    parser.add_argument("--suffix-tokens", type=int, default=192, help="tokens scored after it (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="order of the documents (default %(default)s)")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row per method; the artifact is calibrated once and then read from the cache folder."""
    model_dir = args.model or demo_model_dir(args.cache_dir)
    ratios = tuple(dict.fromkeys((args.ratio, *args.ratios)))
    settings = demo_calibration(model_dir, args.tokens, ratios)
    artifact = load_artifact(cached_calibration(settings, args.cache_dir, TerminalProgress()))
    tokenizer = load_tokenizer(model_dir)
    model = load_model(model_dir, "float32")
    _, held_out = split_documents(read_documents([BUILTIN], tokenizer))
    passages = load_passages(
        model,
        tokenizer,
        held_out,
        count=args.documents,
        prefix_tokens=args.prefix_tokens,
        suffix_tokens=args.suffix_tokens,
        cache_dtype=DTYPES[artifact.geometry.dtype],
        seed=args.seed,
    )
    rows: list[dict[str, object]] = []
    for name, target_ratio, method in _methods(artifact):
        results = [evaluate(model, passage, method) for passage in passages]
        rows.append({"method": name, "target_ratio": target_ratio, **summarize(results)})
    return rows


def _methods(artifact: Artifact) -> list[tuple[str, float, Method]]:
    """Name, nominal ratio and function of every method."""
    return [
        *(("kvtc", plan.target_ratio, _kvtc(artifact, plan.target_ratio)) for plan in artifact.plans),
        ("fp8", 2.0, fp8),
        ("int4", 4.0, partial(integer, rope=artifact.rope, num_bits=4)),
        ("int2", 8.0, partial(integer, rope=artifact.rope, num_bits=2)),
    ]


def _kvtc(artifact: Artifact, target_ratio: float) -> Method:
    """The codec as the tier uses it, on tokens that are neither sinks nor window."""
    config = CodecConfig(target_ratio=target_ratio, sink_tokens=0, window_tokens=0)
    codec = KVCodec(artifact, config)

    def method(keys: torch.Tensor, values: torch.Tensor, start_position: int) -> Coded:
        parts, stored_bytes = [], 0
        for tokens, encoded in codec.encode_node(keys, values, start_position):
            opened = codec.open(encoded.frame, tokens.start, len(tokens))
            parts.append(opened.reconstruct(range(artifact.geometry.num_layers), TokenRange(0, len(tokens))))
            stored_bytes += len(encoded.frame)
        decoded_keys, decoded_values = (torch.cat(side, dim=1) for side in zip(*parts, strict=True))
        return Coded(decoded_keys, decoded_values, stored_bytes)

    return method


def _ratios(text: str) -> tuple[float, ...]:
    return tuple(float(ratio) for ratio in text.split(","))
