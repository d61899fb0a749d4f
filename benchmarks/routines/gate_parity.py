"""Our gates against the published class, on the same weights and hidden states, for many geometries.

The published class is the FastKVzipGate of kvpress, as it is installed. Importing kvpress puts functions of its own in
the place of transformers' attention, so nothing else should be measured in the same process.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
from itertools import product
from typing import Any

import torch

from sglang_kvtc import __version__
from sglang_kvtc.benchmarks.outside import published_gates
from sglang_kvtc.errors import KVTCError, UnsupportedError
from sglang_kvtc.gates.model import GateConfig, GateInput, GateKind, Gates, new_gates
from sglang_kvtc.gates.score import GateScorer

HELP = "largest difference between our gates and those of kvpress, over geometries"

MODULE = "kvpress.presses.fastkvzip_press"
INSTALL = "uv pip install --no-deps kvpress==0.5.5 'cachetools<6' 'fire<0.7' termcolor"
MAX_DIFFERENCE = 1e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Group sizes and widths are multiplied: one row for every pair."""
    parser.add_argument("--group-sizes", type=int, nargs="+", default=list(range(1, 9)), metavar="G")
    parser.add_argument("--features", type=int, nargs="+", default=[64, 576, 2048], metavar="N", help="hidden sizes")
    parser.add_argument("--kv-heads", type=int, default=3, help="KV heads (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="layers (default %(default)s)")
    parser.add_argument("--gate-dim", type=int, default=16, help="channels (default %(default)s)")
    parser.add_argument("--sinks", type=int, default=16, help="learned sinks (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="hidden states per layer (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and hidden states (default %(default)s)")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row per geometry. Raises KVTCError where fp32 scores differ by more than 1e-5."""
    gate_class, version = _published()
    rows: list[dict[str, object]] = []
    for group_size, features in product(args.group_sizes, args.features):
        config = GateConfig(
            GateKind.SINK_ATTENTION,
            GateInput.HIDDEN,
            num_layers=args.layers,
            input_features=features,
            num_kv_heads=args.kv_heads,
            group_size=group_size,
            gate_dim=args.gate_dim,
            num_sinks=args.sinks,
        )
        generator = torch.Generator().manual_seed(args.seed)
        gates = _varied(config, generator)
        states = torch.randn(args.layers, args.tokens, features, generator=generator)
        with torch.inference_mode():
            expected = _published_scores(gate_class, gates, states)
            differences = [
                float((scores - expected).abs().max())
                for scores in (gates(states), GateScorer(gates, torch.float32).score_layers(states))
            ]
        rows.append(
            {
                "group_size": group_size,
                "features": features,
                "kv_heads": args.kv_heads,
                "gate_dim": args.gate_dim,
                "sinks": args.sinks,
                "min_score": float(expected.min()),
                "max_score": float(expected.max()),
                "forward_max_difference": differences[0],
                "scorer_max_difference": differences[1],
                "sglang_kvtc": __version__,
                "kvpress": version,
            }
        )
        if not max(differences) <= MAX_DIFFERENCE:
            raise KVTCError(
                f"group size {group_size}, {features} features: scores differ from kvpress {version} by "
                f"{max(differences):.2g}, more than {MAX_DIFFERENCE:g}"
            )
    return rows


def _published() -> tuple[Any, str]:
    """The class and the version of its package."""
    try:
        module = importlib.import_module(MODULE)
        return module.FastKVzipGate, importlib.metadata.version("kvpress")
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"gate-parity needs kvpress with FastKVzipGate ({error}): {INSTALL}") from error


def _varied(config: GateConfig, generator: torch.Generator) -> Gates:
    """Gates without a parameter that is zero or one, so that no term can be forgotten."""
    gates = new_gates(config, 0)
    with torch.no_grad():
        for name, parameter in gates.named_parameters():
            scale = 2.0 if name.endswith("weight") else 0.5
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter * scale + (0 if name.endswith("weight") else noise * scale))
    return gates


def _published_scores(gate_class: Any, gates: Gates, states: torch.Tensor) -> torch.Tensor:
    modules = published_gates(gates, gate_class)
    # Each gives [1, num_kv_heads, num_tokens].
    return torch.stack([module(inputs[None])[0].T for module, inputs in zip(modules, states, strict=True)])
