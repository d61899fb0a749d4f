"""Time of scoring tokens with gates, next to the forward pass that makes those tokens, on the same threads.

Hidden states are those that enter the model's attention for a held-out text. Forward pass and scoring take turns;
times are medians. The forward pass is that of the layers, without logits. The gates have the model's geometry and
random weights, since values do not change the time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_kvtc.calibrate.attention_hook import attention_inputs
from sglang_kvtc.calibrate.causal_lm import DTYPES, load_model, load_tokenizer, model_geometry
from sglang_kvtc.calibrate.corpus import BUILTIN, read_documents, split_documents, tokenize
from sglang_kvtc.calibrate.demo_model import default_cache_dir, demo_model_dir
from sglang_kvtc.errors import ConfigError, KVTCError
from sglang_kvtc.gates.model import GateConfig, GateInput, GateKind, Gates, new_gates
from sglang_kvtc.gates.score import GateScorer

HELP = "time of scoring a chunk and of scoring buffered states, next to the model's forward pass"

WARM_UP = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo model in bfloat16 by default."""
    parser.add_argument("--model", type=Path, help="Hugging Face model directory (default: the demo model)")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="where the demo model is kept")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of model and projections")
    parser.add_argument("--chunk-tokens", type=int, default=1024, help="of the forward pass (default %(default)s)")
    parser.add_argument("--buffered-tokens", type=int, default=128, help="scored at once while decoding")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="passes after the warm-up (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the gates (default %(default)s)")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row per way of scoring; `over_forward` is its time over that of the chunk's forward pass."""
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        with torch.inference_mode():
            return _measure(args)
    finally:
        torch.set_num_threads(threads)


def _measure(args: argparse.Namespace) -> list[dict[str, object]]:
    model_dir = args.model or demo_model_dir(args.cache_dir)
    model = load_model(model_dir, args.dtype)
    token_ids = torch.tensor([_text(load_tokenizer(model_dir), args.chunk_tokens)])
    states = _hidden_states(model, token_ids)
    gates = new_gates(_config(model), args.seed)
    scorer = GateScorer(gates, DTYPES[args.dtype])
    out = torch.empty(*states.shape[:2], gates.config.num_kv_heads)
    buffered = states[:, : args.buffered_tokens].contiguous()

    def forward() -> object:
        return model.base_model(input_ids=token_ids, use_cache=True)

    def by_layer() -> None:
        for layer, inputs in enumerate(states):
            scorer.score(layer, inputs, out=out[layer])

    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "chunk, layer by layer": (states.shape[1], by_layer),
        "chunk, all layers": (states.shape[1], lambda: scorer.score_layers(states, out=out)),
        "buffered, all layers": (buffered.shape[1], lambda: scorer.score_layers(buffered)),
    }
    difference = _largest_difference(gates, scorer, states)
    times: defaultdict[str, list[float]] = defaultdict(list)
    turns: dict[str, Callable[[], object]] = {"forward": forward, **{name: case for name, (_, case) in cases.items()}}
    for repeat in range(WARM_UP + args.repeats):
        for name, function in turns.items():
            start = time.perf_counter()
            function()
            if repeat >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    forward_s = statistics.median(times["forward"])
    return [
        {
            "case": name,
            "tokens": num_tokens,
            "layers": gates.config.num_layers,
            "dtype": args.dtype,
            "score_ms": 1e3 * statistics.median(times[name]),
            "score_min_ms": 1e3 * min(times[name]),
            "forward_ms": 1e3 * forward_s,
            "forward_min_ms": 1e3 * min(times["forward"]),
            "over_forward": statistics.median(times[name]) / forward_s,
            "max_difference": difference,
        }
        for name, (num_tokens, _) in cases.items()
    ]


def _text(tokenizer: Any, num_tokens: int) -> list[int]:
    _, held_out = split_documents(read_documents([BUILTIN], tokenizer))
    for document in held_out:
        token_ids = tokenize(document.text, tokenizer)[:num_tokens]
        if len(token_ids) == num_tokens:
            return token_ids
    raise ConfigError(f"--chunk-tokens {num_tokens}: no held-out text is that long")


def _hidden_states(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """What enters attention: dtype[num_layers, num_tokens, hidden size]."""
    states: dict[int, torch.Tensor] = {}
    with attention_inputs(model, lambda layer, inputs: states.update({layer: inputs.clone()})):
        model.base_model(input_ids=token_ids, use_cache=True)
    return torch.stack([states[layer] for layer in range(len(states))])


def _config(model: Any) -> GateConfig:
    config = model.config.get_text_config(decoder=True)
    geometry = model_geometry(config)
    return GateConfig(
        GateKind.SINK_ATTENTION,
        GateInput.HIDDEN,
        num_layers=geometry.num_layers,
        input_features=config.hidden_size,
        num_kv_heads=geometry.num_kv_heads,
        group_size=config.num_attention_heads // geometry.num_kv_heads,
    )


def _largest_difference(gates: Gates, scorer: GateScorer, states: torch.Tensor) -> float:
    """Between the scorer and forward() in fp64, on the same inputs.

    Raises KVTCError when it is more than twice that of forward() in the scorer's dtype.
    """
    exact, rounded = (type(gates)(gates.config).to(dtype) for dtype in (torch.float64, scorer.dtype))
    for copy in (exact, rounded):
        copy.load_state_dict(gates.state_dict())
    expected = exact(states)
    difference = float((scorer.score_layers(states) - expected).abs().max())
    allowed = 2 * float((rounded(states) - expected).abs().max())
    if difference > allowed:
        raise KVTCError(f"scores are off by {difference:.2g}, which is more than {allowed:.2g}: the scorer is wrong")
    return difference
