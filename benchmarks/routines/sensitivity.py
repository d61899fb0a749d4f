"""Does the Fisher information say what noise in one KV head does to the model's output?

Noise is added to K (before RoPE) or V of single heads, drawn at random, in the cache of held-out documents, and the KL
on what follows is compared with d^T F d / 2, where F is measured on other documents by one backward pass each.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import torch

from sglang_kvtc.benchmarks.harness import (
    SINK_TOKENS,
    WINDOW_TOKENS,
    Passage,
    add_passage_arguments,
    compare,
    held_out_passages,
    log_probs,
)
from sglang_kvtc.calibrate.causal_lm import load_config, load_model, load_tokenizer
from sglang_kvtc.calibrate.corpus import BUILTIN, read_documents, split_documents, token_sequences
from sglang_kvtc.calibrate.demo_model import default_cache_dir, demo_model_dir
from sglang_kvtc.calibrate.sensitivity import NUM_SEQUENCES, measure_sensitivity, sensitivity_sequences
from sglang_kvtc.cli.progress import TerminalProgress
from sglang_kvtc.codec.rope import rope_spec_from_config, rotate
from sglang_kvtc.types import Side

HELP = "KL of noise in single KV heads, against what their Fisher information predicts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Noise is relative to the standard deviation of the head's numbers over all tokens and channels."""
    parser.add_argument("--model", type=Path, help="Hugging Face model directory (default: the demo model)")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="demo model")
    parser.add_argument("--probes", type=int, default=24, help="heads to add noise to (default %(default)s)")
    parser.add_argument("--noise", type=float, default=0.1, help="its size (default %(default)s)")
    add_passage_arguments(parser, documents=3, prefix_tokens=1024, suffix_tokens=192)


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row per probe, by falling prediction, and one for all of them."""
    model_dir = args.model or demo_model_dir(args.cache_dir)
    rope = rope_spec_from_config(load_config(model_dir).to_dict())
    tokenizer = load_tokenizer(model_dir)
    model = load_model(model_dir, "float32")
    documents, _ = split_documents(read_documents([BUILTIN], tokenizer))
    length = args.prefix_tokens + args.suffix_tokens
    sequences = token_sequences(
        documents, tokenizer, num_tokens=4 * NUM_SEQUENCES * length, max_length=length, seed=args.seed
    )
    sensitivity = measure_sensitivity(
        model, sensitivity_sequences(sequences), rope, seed=args.seed, progress=TerminalProgress()
    )
    passages = held_out_passages(args, model, tokenizer, torch.float32)
    num_layers, num_heads = sensitivity.k.shape[:2]
    heads = [(side, layer, head) for side in Side for layer in range(num_layers) for head in range(num_heads)]
    generator = torch.Generator().manual_seed(args.seed)
    rows: list[dict[str, object]] = []
    for side, layer, head in random.Random(args.seed).sample(heads, min(args.probes, len(heads))):
        block = (sensitivity.k if side is Side.K else sensitivity.v)[layer, head]
        changes, predicted = [], 0.0
        for passage in passages:
            keys, values, squared = _with_noise(passage, side, layer, head, args.noise, generator)
            if side is Side.K:
                positions = torch.arange(SINK_TOKENS, SINK_TOKENS + keys.shape[1])
                keys = rotate(keys, positions, rope)
            changed = passage.keys.clone(), passage.values.clone()
            for whole, noise in zip(changed, (keys, values), strict=True):
                whole[:, SINK_TOKENS : whole.shape[1] - WINDOW_TOKENS] += noise
            changes.append(compare(passage.log_probs, log_probs(model, *changed, passage.suffix), passage.suffix))
            predicted += float(block.diagonal().mean()) * squared / 2 * args.suffix_tokens
        measured = sum(change.kl for change in changes)
        num_tokens = sum(change.num_tokens for change in changes)
        rows.append(
            {
                "side": side.name,
                "layer": layer,
                "head": head,
                "kl": measured / num_tokens,
                "predicted_kl": predicted / num_tokens,
                "ratio": measured / predicted,
            }
        )
    rows.sort(key=lambda row: -float(str(row["predicted_kl"])))
    logs = np.log([[float(str(row[key])) for key in ("kl", "predicted_kl")] for row in rows])
    summary: dict[str, object] = {"side": "all", "ratio": float(np.exp(np.median(logs[:, 0] - logs[:, 1])))}
    if len(rows) > 1:
        summary["correlation_of_logs"] = float(np.corrcoef(logs.T)[0, 1])
    summary["standard_error"] = sensitivity.standard_error
    return [*rows, summary]


def _with_noise(
    passage: Passage, side: Side, layer: int, head: int, size: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """What to add to K before RoPE and to V of the coded tokens, and its squared norm."""
    coded = slice(SINK_TOKENS, passage.keys.shape[1] - WINDOW_TOKENS)
    noise = [torch.zeros_like(passage.keys[:, coded]), torch.zeros_like(passage.values[:, coded])]
    target = noise[side][layer, :, head]
    spread = float((passage.keys if side is Side.K else passage.values)[layer, coded, head].std())
    target.copy_(size * spread * torch.randn(target.shape, generator=generator))
    return noise[0], noise[1], float(target.double().square().sum())
