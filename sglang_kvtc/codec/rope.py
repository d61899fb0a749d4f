"""Undoing and redoing rotary position embeddings at absolute positions.

PCA sees keys as they were before rotation (KVTC section 3.1). Angles are computed in float64, cos and sin are used in
float32, so that undo followed by redo is exact to the precision of the keys at any position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.errors import UnsupportedError

SUPPORTED = ("default", "linear", "llama3", "yarn")


def rope_spec_from_config(config: Mapping[str, Any]) -> RopeSpec:
    """Read the rotary embedding of a Hugging Face `config.json`.

    Both spellings are known: `rope_theta` with `rope_scaling`, and `rope_parameters`. Raises UnsupportedError for a
    rotary embedding that is not in SUPPORTED, per-layer ones, and ones with sections (multimodal).
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedError(
            f"rotary embeddings that differ between layers ({', '.join(parameters)}) are not supported"
        )
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind not in SUPPORTED or "mrope_section" in parameters:
        name = "mrope" if "mrope_section" in parameters else kind
        raise UnsupportedError(f"rotary embedding {name!r} is not supported; supported: {', '.join(SUPPORTED)}")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    rotary_dim = int(head_dim * partial)
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    base = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    inv_freq, attention_factor = base, 1.0
    if kind == "linear":
        inv_freq = base / float(parameters["factor"])
    elif kind == "llama3":
        inv_freq = _llama3(base, parameters)
    elif kind == "yarn":
        inv_freq, attention_factor = _yarn(base, theta, rotary_dim, parameters, config)
    return RopeSpec(
        kind=kind,
        rotary_dim=rotary_dim,
        inv_freq=tuple(float(value) for value in inv_freq),
        attention_factor=attention_factor,
    )


def rotate(keys: torch.Tensor, positions: torch.Tensor, spec: RopeSpec, inverse: bool = False) -> torch.Tensor:
    """Rotate keys to their positions, or back.

    keys: float[..., num_tokens, num_kv_heads, head_dim]. positions: i64[num_tokens], absolute. Channels beyond
    `spec.rotary_dim` pass through. Returns f32 of the same shape.
    """
    cos, sin = cos_sin(positions, spec, inverse)
    return apply_rotation(keys.float(), cos, sin, spec)


def cos_sin(positions: torch.Tensor, spec: RopeSpec, inverse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin f32[num_tokens, 1, rotary_dim / 2] of a rotation or of its inverse, attention factor included."""
    angles = positions.to(torch.float64)[:, None] * torch.tensor(spec.inv_freq, dtype=torch.float64)
    factor = 1 / spec.attention_factor if inverse else spec.attention_factor
    cos, sin = torch.cos(angles) * factor, torch.sin(angles) * factor
    return cos.float()[:, None], (-sin if inverse else sin).float()[:, None]


def apply_rotation(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Rotate f32 keys [..., num_tokens, num_kv_heads, head_dim] by prepared cos and sin (see `cos_sin`)."""
    out = torch.empty_like(keys)
    first, second = _pairs(keys, spec)
    out_first, out_second = _pairs(out, spec)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin)
    if spec.rotary_dim < keys.shape[-1]:
        out[..., spec.rotary_dim :] = keys[..., spec.rotary_dim :]
    return out


def _pairs(keys: torch.Tensor, spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    if spec.interleaved:
        return keys[..., 0 : spec.rotary_dim : 2], keys[..., 1 : spec.rotary_dim : 2]
    half = spec.rotary_dim // 2
    return keys[..., :half], keys[..., half : spec.rotary_dim]


def _llama3(base: np.ndarray, parameters: Mapping[str, Any]) -> np.ndarray:
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    original = float(parameters["original_max_position_embeddings"])
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * base / factor + smooth * base
    scaled = np.where(wavelength > original / low, base / factor, base)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return np.where(between, blended, scaled)


def _yarn(
    base: np.ndarray, theta: float, dim: int, parameters: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[np.ndarray, float]:
    factor = float(parameters["factor"])
    original = parameters.get("original_max_position_embeddings") or config["max_position_embeddings"]

    def mscale(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        weight, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention_factor = mscale(factor, weight) / mscale(factor, all_dim) if weight and all_dim else mscale(factor)

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = correction(float(parameters.get("beta_fast") or 32))
    high = correction(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return base / factor * ramp + base * (1 - ramp), float(attention_factor)
