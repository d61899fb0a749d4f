"""Rotary position embedding: reading its parameters from a model's configuration, undoing and redoing it on keys.

KVTC section 3.1: keys are coded without their rotation, which hides their low-rank structure.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.errors import ConfigError, UnsupportedError

Floats = npt.NDArray[np.float64]

_INTERLEAVED_MODEL_TYPES = frozenset({"cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4"})
"""Model types whose attention rotates neighbouring channels although their configuration does not say so. A wrong entry
costs compression, never correctness: undo and redo use the same pairs."""


def rope_spec_from_config(config: Mapping[str, Any]) -> RopeSpec:
    """Read the rotary embedding of a Hugging Face configuration (the content of config.json).

    Both spellings are read: `rope_scaling` with `rope_theta` beside it, and the `rope_parameters` of transformers 5.
    Types default, linear, llama3 and yarn. Raises UnsupportedError, naming it, for any other type, for multimodal
    positions and for layers with different embeddings; ConfigError for a missing or impossible number.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    nested = [key for key, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedError(f"rope parameters that differ between layers ({', '.join(nested)}) are not supported")
    for name in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(name) is None and config.get(name) is not None:
            parameters[name] = config[name]
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if "mrope_section" in parameters or kind == "mrope":
        raise UnsupportedError("multimodal rope (mrope) is not supported: its positions are not one number per token")
    if kind not in _SCALED:
        raise UnsupportedError(f"rope type {kind!r} is not supported: expected one of {', '.join(_SCALED)}")

    head_dim = config.get("head_dim") or _number(config, "hidden_size") // _number(config, "num_attention_heads")
    rotary_dim = int(head_dim * float(parameters.get("partial_rotary_factor", 1.0)))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(f"rope rotates {rotary_dim} of {head_dim} channels: expected an even number up to {head_dim}")
    base = _number(parameters, "rope_theta")
    inv_freq, attention_factor = _SCALED[kind](base ** -(np.arange(0, rotary_dim, 2) / rotary_dim), parameters, config)
    return RopeSpec(
        kind=kind,
        rotary_dim=rotary_dim,
        inv_freq=tuple(inv_freq.tolist()),
        attention_factor=attention_factor,
        interleaved=_is_interleaved(config),
    )


class Rotation:
    """The rotation of the keys at given positions, or its inverse, ready to be applied to any number of layers."""

    def __init__(
        self, positions: torch.Tensor, spec: RopeSpec, num_kv_heads: int = 1, *, inverse: bool = False
    ) -> None:
        """positions: i64[num_tokens], any values. num_kv_heads: heads to spread the tables over, which is faster."""
        # Angles reach hundreds of thousands of radians, where fp32 has lost hundredths of one.
        angles = positions.double()[:, None] * torch.tensor(spec.inv_freq, dtype=torch.float64)
        factor = 1 / spec.attention_factor if inverse else spec.attention_factor
        shape = (-1, num_kv_heads, -1)
        self._cos = (angles.cos() * factor).float()[:, None].expand(shape).contiguous()
        self._sin = (angles.sin() * (-factor if inverse else factor)).float()[:, None].expand(shape).contiguous()
        self._rotary_dim = spec.rotary_dim
        self._interleaved = spec.interleaved

    @classmethod
    def joined(cls, parts: Sequence[tuple[Rotation, slice]]) -> Rotation:
        """The rotation of some tokens of several rotations of one model, one after the other."""
        rotation = copy.copy(parts[0][0])
        rotation._cos = torch.cat([part._cos[tokens] for part, tokens in parts])
        rotation._sin = torch.cat([part._sin[tokens] for part, tokens in parts])
        return rotation

    def __call__(self, keys: torch.Tensor, tokens: slice = slice(None)) -> torch.Tensor:
        """Rotate keys: float[..., num_tokens, num_kv_heads, head_dim] to new f32 of the same shape.

        tokens: which of the positions these are. Channels from `rotary_dim` on are only converted.
        """
        rotated = keys.to(torch.float32, copy=True)
        if self._interleaved:
            first, second = rotated[..., : self._rotary_dim : 2], rotated[..., 1 : self._rotary_dim : 2]
        else:
            half = self._rotary_dim // 2
            first, second = rotated[..., :half], rotated[..., half : self._rotary_dim]
        cos, sin = self._cos[tokens], self._sin[tokens]
        turned = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).add_(turned)
        return rotated


def rotate(keys: torch.Tensor, positions: torch.Tensor, spec: RopeSpec, inverse: bool = False) -> torch.Tensor:
    """Apply the rotary embedding to keys, or undo it.

    keys: float[..., num_tokens, num_kv_heads, head_dim]. positions: i64[num_tokens], absolute, any values: there is no
    table to run out of. Computed in fp32 (angles in fp64); returns a new f32 tensor of the same shape. Undoing what was
    done gives the keys back up to fp32 rounding, attention factor included.
    """
    return Rotation(positions, spec, inverse=inverse)(keys)


def _unscaled(inv_freq: Floats, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Floats, float]:
    return inv_freq, 1.0


def _linear(inv_freq: Floats, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Floats, float]:
    return inv_freq / _number(parameters, "factor"), 1.0


def _llama3(inv_freq: Floats, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Floats, float]:
    """Long wavelengths are divided by the factor, short ones kept, those between are interpolated."""
    factor = _number(parameters, "factor")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    turns = _trained_positions(parameters, config) * inv_freq / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inv_freq * (kept + (1 - kept) / factor), 1.0


def _yarn(inv_freq: Floats, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Floats, float]:
    """YaRN (arXiv 2309.00071) as transformers reads its parameters."""
    trained = _trained_positions(parameters, config)
    factor = parameters.get("factor") or _number(config, "max_position_embeddings") / trained
    rotary_dim, base = 2 * len(inv_freq), _number(parameters, "rope_theta")

    def pair_with(turns: float) -> float:
        """The (fractional) pair that makes so many turns over the trained positions."""
        return rotary_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = pair_with(parameters.get("beta_fast") or 32)
    high = pair_with(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    span = high - low or 0.001
    kept = 1 - np.clip((np.arange(len(inv_freq)) - low) / span, 0.0, 1.0)
    return inv_freq * (kept + (1 - kept) / factor), _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    scale, scale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)


_SCALED: dict[str, Callable[[Floats, Mapping[str, Any], Mapping[str, Any]], tuple[Floats, float]]] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _trained_positions(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Positions the model was trained on before scaling; transformers looks in the same places in the same order."""
    key = "original_max_position_embeddings"
    for table in (config, parameters):
        if table.get(key) is not None:
            return _number(table, key)
    return _number(config, "max_position_embeddings")


def _is_interleaved(config: Mapping[str, Any]) -> bool:
    if "rope_interleave" in config:
        return bool(config["rope_interleave"])
    return not config.get("rope_is_neox_style", config.get("model_type") not in _INTERLEAVED_MODEL_TYPES)


def _number(table: Mapping[str, Any], key: str) -> float:
    """Raises ConfigError unless the key holds a number above 0."""
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"the model configuration has {key} = {value!r}: expected a number above 0")
    return value
