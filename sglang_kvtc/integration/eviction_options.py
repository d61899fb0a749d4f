"""What `[eviction]` of the configuration means: the budget, the gates, and how many slots a pool has."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.config import EvictionConfig
from sglang_kvtc.errors import ConfigError, UnsupportedError
from sglang_kvtc.eviction.budget import Budget, as_written
from sglang_kvtc.gates.io import GateFile, check_gates_fit, load_gates
from sglang_kvtc.gates.model import GateInput, GateShape

FIXED_BUDGET_SLOTS = 8
"""Slots per token of memory under `keep_tokens`, whose share depends on the contexts to come."""


def budget_of(config: EvictionConfig) -> Budget:
    """Raises ConfigError naming the key that is wrong."""
    try:
        return msgspec.convert(config.budget, Budget)
    except msgspec.ValidationError as error:
        raise ConfigError(f"[eviction.budget]: {error}") from error


def slots_per_token(config: EvictionConfig) -> int:
    """Slots per token of memory: as many tokens as fit when all requests are at their budget."""
    if config.slots_per_token:
        return config.slots_per_token
    budget = budget_of(config)
    if budget.keep_tokens is not None:
        return FIXED_BUDGET_SLOTS
    share = budget.least_fraction if budget.keep_fraction is None else budget.keep_fraction
    return math.ceil(1 / as_written(share))


def load_gates_for(config: EvictionConfig, model_dir: Path, shape: GateShape | None = None) -> GateFile:
    """The configured gates, checked against the checkpoint and, if it is known, the model's shape.

    Raises ArtifactError for a damaged file or one of another model, UnsupportedError for gates that are fed keys.
    """
    gates = load_gates(config.gates)
    if gates.gates.config.input is not GateInput.HIDDEN:
        raise UnsupportedError(
            f"{config.gates} holds gates fed with {gates.gates.config.input}: only gates fed with hidden states can "
            "score before K and V are written; train them with --input hidden"
        )
    check_gates_fit(gates, shape or gates.gates.config.shape, fingerprint_model(model_dir))
    return gates


def describe_budget(budget: Budget) -> str:
    """The budget in words, defaults left out."""
    defaults = {name: getattr(Budget(keep_tokens=1), name) for name in Budget.__struct_fields__}
    defaults["keep_tokens"] = None
    changed = {
        name: getattr(budget, name) for name in Budget.__struct_fields__ if getattr(budget, name) != defaults[name]
    }
    return ", ".join(f"{name} {value}" for name, value in changed.items())
