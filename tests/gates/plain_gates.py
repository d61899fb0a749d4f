"""The gates once more, written from their formulas: loops over tokens, heads and queries in double precision."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sglang_kvtc.gates.model import BiasForm, GateConfig, GateInput, GateKind, Gates, new_gates

Array = npt.NDArray[np.float64]


def config(kind: GateKind = GateKind.SINK_ATTENTION, **changes: object) -> GateConfig:
    """A small configuration; `changes` are fields of GateConfig."""
    fields: dict[str, object] = {"num_layers": 2, "input_features": 24, "num_kv_heads": 2, "group_size": 3, **changes}
    return GateConfig(kind, GateInput.HIDDEN, **fields)  # type: ignore[arg-type]


def trained_like(config: GateConfig, seed: int = 0) -> Gates:
    """Gates none of whose parameters still has its first value."""
    gates = new_gates(config, seed)
    rng = np.random.default_rng(seed)
    for parameter in gates.parameters():
        noise = parameter.detach().new_tensor(rng.standard_normal(tuple(parameter.shape)))
        parameter.detach().add_(noise * 0.5)
    return gates


def plain_scores(gates: Gates, inputs: Array) -> Array:
    """inputs: [num_layers, num_tokens, input_features] -> scores [num_layers, num_tokens, num_kv_heads]."""
    config = gates.config
    of_kind = {GateKind.SINK_ATTENTION: _sink_attention, GateKind.LINEAR: _linear, GateKind.MLP: _mlp}[config.kind]
    scores = np.zeros((*inputs.shape[:2], config.num_kv_heads))
    for layer in range(config.num_layers):
        weights = {name: value.detach().double().numpy()[layer] for name, value in gates.named_parameters()}
        for token in range(inputs.shape[1]):
            for head in range(config.num_kv_heads):
                scores[layer, token, head] = of_kind(config, weights, inputs[layer, token], head)
    return scores


def _sink_attention(config: GateConfig, w: dict[str, Array], h: Array, head: int) -> float:
    dim, group = config.gate_dim, config.group_size
    paper = config.bias_form is BiasForm.PAPER
    c = 1.0 if paper else math.sqrt(dim)
    k = _norm(w["k_weight"][head * dim : (head + 1) * dim] @ h, w["k_norm"])
    total = 0.0
    for g in range(group):
        first = (head * group + g) * dim
        q = _norm(w["q_weight"][first : first + dim] @ h + w["q_bias"][first : first + dim], w["q_norm"])
        bias = w["bias"][head, g]
        own = math.exp(q @ k / c + (0 if paper else bias))
        others = sum(math.exp(q @ w["sinks"][head, r] / c) for r in range(config.num_sinks))
        if paper:
            others += math.exp(bias)
        elif not config.num_sinks:
            others = 1.0
        total += own / (own + others)
    return total / group


def _linear(config: GateConfig, w: dict[str, Array], h: Array, head: int) -> float:
    return _sigmoid(w["weight"][head] @ h + w["bias"][head])


def _mlp(config: GateConfig, w: dict[str, Array], h: Array, head: int) -> float:
    units = [gate * _sigmoid(gate) * up for gate, up in zip(w["gate_weight"] @ h, w["up_weight"] @ h, strict=True)]
    return _sigmoid(w["down_weight"][head] @ np.array(units) + w["bias"][head])


def _norm(x: Array, weight: Array) -> Array:
    return x / math.sqrt(sum(v * v for v in x) / len(x) + 1e-6) * weight


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))
