"""Checkpoints with the content of the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sglang_kvtc.gates.model import Gates

NAMES = {
    "q_proj.weight": "q_weight",
    "q_proj.bias": "q_bias",
    "k_proj.weight": "k_weight",
    "q_norm.weight": "q_norm",
    "k_norm.weight": "k_norm",
    "k_base": "sinks",
    "b": "bias",
}


def layers_of(gates: Gates, dtype: torch.dtype = torch.float32) -> list[dict[str, torch.Tensor]]:
    """State dicts of the published gate class: projections and bias in `dtype`, norms and sinks in fp32."""
    layers = []
    parameters = dict(gates.named_parameters())
    for index in range(gates.config.num_layers):
        layer = {name: parameters[ours].detach()[index].clone() for name, ours in NAMES.items()}
        layer["k_base"] = layer["k_base"].unsqueeze(1)
        layer["b"] = layer["b"].unsqueeze(1)
        layers.append({name: t if "norm" in name or name == "k_base" else t.to(dtype) for name, t in layer.items()})
    return layers


def write(path: Path, layers: Any, **beside: Any) -> Path:
    torch.save({"module": layers, **beside}, path)
    return path
