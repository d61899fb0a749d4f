"""Time of scoring tokens with gates, next to the forward pass that makes those tokens, on the same threads.

Hidden states are those that enter the model's attention for a held-out text. Forward pass and scoring take turns;
times are medians. Inside the forward pass means as the server does it: each layer's states are scored when they enter
its attention, and only that is timed. The forward pass is that of the layers, without logits. The gates have the
model's geometry and random weights, since values do not change the time. Every backend that scores on the CPU is timed;
the scorer takes the first of them by itself.
"""

from __future__ import annotations

import argparse
import functools
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
from sglang_kvtc.distill.distillation import Distillation
from sglang_kvtc.errors import ConfigError, KVTCError
from sglang_kvtc.gates.model import GateConfig, GateInput, GateKind, Gates, new_gates
from sglang_kvtc.gates.pass_score import PassScorer
from sglang_kvtc.gates.score import BACKENDS, GateScorer

HELP = "time of scoring a chunk and of scoring buffered states, next to the model's forward pass"

WARM_UP = 2
INSIDE = "chunk, inside the forward pass"
_TRAINED = Distillation(model_dir=Path())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo model in bfloat16 by default."""
    parser.add_argument("--model", type=Path, help="Hugging Face model directory (default: the demo model)")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="where the demo model is kept")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of model and projections")
    parser.add_argument("--chunk-tokens", type=int, default=1024, help="of the forward pass (default %(default)s)")
    parser.add_argument("--buffered-tokens", type=int, default=128, help="scored at once while decoding")
    parser.add_argument("--gate-dim", type=int, default=_TRAINED.gate_dim, help="width (default %(default)s)")
    parser.add_argument("--sinks", type=int, default=_TRAINED.num_sinks, help="of the gates (default %(default)s)")
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
    gates = new_gates(_config(model, args), args.seed)
    out = torch.empty(*states.shape[:2], gates.config.num_kv_heads)
    buffered = states[:, : args.buffered_tokens].contiguous()

    def forward() -> object:
        return model.base_model(input_ids=token_ids, use_cache=True)

    def by_layer(scorer: GateScorer) -> None:
        for layer, inputs in enumerate(states):
            scorer.score(layer, inputs, out=out[layer])

    def all_layers(scorer: GateScorer) -> None:
        scorer.score_layers(states, out=out)

    def all_buffered(scorer: GateScorer) -> None:
        scorer.score_layers(buffered)

    cases: dict[str, tuple[int, Callable[[GateScorer], None]]] = {
        "chunk, layer by layer": (states.shape[1], by_layer),
        "chunk, all layers": (states.shape[1], all_layers),
        "buffered, all layers": (buffered.shape[1], all_buffered),
    }
    scorers = [GateScorer(gates, DTYPES[args.dtype], backend) for backend in BACKENDS]
    inside = {scorer.backend: PassScorer(scorer) for scorer in scorers}
    differences = {scorer.backend: _largest_difference(gates, scorer, states) for scorer in scorers}
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    forward_times: list[float] = []
    for repeat in range(WARM_UP + args.repeats):
        measured: dict[tuple[str, str], float] = {}
        forward_s = _seconds(forward)
        for scorer in scorers:
            # As while serving, between the large operations of a pass.
            measured[scorer.backend, INSIDE] = _scoring_inside(model, inside[scorer.backend], forward)
            for name, (_, case) in cases.items():
                measured[scorer.backend, name] = _seconds(functools.partial(case, scorer))
        if repeat >= WARM_UP:
            forward_times.append(forward_s)
            for turn, seconds in measured.items():
                times[turn].append(seconds)
    cases[INSIDE] = (states.shape[1], by_layer)
    forward_s = statistics.median(forward_times)
    return [
        {
            "case": name,
            "backend": backend,
            "tokens": cases[name][0],
            "layers": gates.config.num_layers,
            "gate_dim": gates.config.gate_dim,
            "sinks": gates.config.num_sinks,
            "dtype": args.dtype,
            "score_ms": 1e3 * statistics.median(seconds),
            "score_min_ms": 1e3 * min(seconds),
            "forward_ms": 1e3 * forward_s,
            "forward_min_ms": 1e3 * min(forward_times),
            "over_forward": statistics.median(seconds) / forward_s,
            "max_difference": differences[backend],
        }
        for (backend, name), seconds in times.items()
    ]


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _scoring_inside(model: Any, scorer: PassScorer, forward: Callable[[], object]) -> float:
    """Seconds of a forward pass that go into scoring its states, as the server does it."""
    seconds = 0.0

    def receive(layer: int, states: torch.Tensor) -> None:
        nonlocal seconds
        seconds += _seconds(lambda: scorer.add(layer, states))

    with attention_inputs(model, receive):
        forward()
    return seconds + _seconds(scorer.finish)


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


def _config(model: Any, args: argparse.Namespace) -> GateConfig:
    config = model.config.get_text_config(decoder=True)
    geometry = model_geometry(config)
    return GateConfig(
        GateKind.SINK_ATTENTION,
        GateInput.HIDDEN,
        num_layers=geometry.num_layers,
        input_features=config.hidden_size,
        num_kv_heads=geometry.num_kv_heads,
        group_size=config.num_attention_heads // geometry.num_kv_heads,
        gate_dim=args.gate_dim,
        num_sinks=args.sinks,
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
