"""Rotary position embedding: reading its parameters from a model's configuration, undoing and redoing it on keys.

KVTC section 3.1: keys are coded without their rotation, which hides their low-rank structure. The keys are SGLang's, so
where SGLang rotates otherwise than transformers, SGLang is followed; `integration.compat.check_rope` compares the
result with the rotary modules of the loaded model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.errors import ConfigError, UnsupportedError

Floats = npt.NDArray[np.float64]

_INTERLEAVED_MODEL_TYPES = frozenset({"chatglm", "cohere", "cohere2", "cohere2_moe", "glm", "glm4", "gptj"})
"""Model types whose attention rotates neighbouring channels although their configuration does not say so. A wrong entry
costs compression, never correctness: undo and redo use the same pairs."""
_INTERLEAVED_UNLESS_TOLD = frozenset({"ernie4_5", "ernie4_5_moe"})

_PER_LAYER = "layers with different rotary embeddings"
_FOURIER = "Fourier rope (fope)"
_REFUSED_FIELDS = {
    "alibi": "positions by attention bias (ALiBi)",
    "dual_chunk_attention_config": "dual chunk attention",
    "fope_init_factor": _FOURIER,
    "fope_sep_head": _FOURIER,
    "layer_rope_theta": _PER_LAYER,
    "local_rope_theta": _PER_LAYER,
    "mrope_section": "multimodal rope (mrope), whose positions are not one number per token,",
    "num_inv_freq": _FOURIER,
    "partial_rotary_factors": _PER_LAYER,
    "rope_local_base_freq": _PER_LAYER,
    "swa_rope_scaling": _PER_LAYER,
    "swa_rope_theta": _PER_LAYER,
    "use_fope": _FOURIER,
}
"""Fields of a configuration or of its rope parameters, and what it means that they are set."""
_NO_ROPE_MODEL_TYPES = frozenset({"llama4", "llama4_text"})
_NO_ROPE_BESIDE_SLIDING_MODEL_TYPES = frozenset({"cohere2", "cohere2_moe", "exaone4", "exaone_moe"})
"""Where some layers see a sliding window, SGLang rotates in those only."""


def rope_spec_from_config(config: Mapping[str, Any]) -> RopeSpec:
    """Read the rotary embedding of a Hugging Face configuration (the content of config.json).

    Both spellings are read: `rope_scaling` with `rope_theta` beside it, and the `rope_parameters` of transformers 5.
    Types default, linear, dynamic, llama3, yarn and longrope (also spelled su). Raises UnsupportedError, naming it, for
    any other type, for multimodal positions and for layers with different embeddings or none; ConfigError for a missing
    or impossible number.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    nested = [key for key, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedError(f"rope parameters that differ between layers ({', '.join(nested)}) are not supported")
    for name in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(name) is None and config.get(name) is not None:
            parameters[name] = config[name]
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    # Phi-3's configuration renames its first spelling before SGLang sees it.
    kind = "longrope" if kind == "su" else kind
    _check_is_one_rope(kind, parameters, config)
    if kind not in _SCALED:
        raise UnsupportedError(f"rope type {kind!r} is not supported: expected one of {', '.join(_SCALED)}")

    head_dim = config.get("head_dim") or _number(config, "hidden_size") // _number(config, "num_attention_heads")
    rotary_dim = _rotary_dim(int(head_dim), parameters, config)
    base = _number(parameters, "rope_theta")
    inv_freq, attention_factor = _SCALED[kind](base ** -(np.arange(0, rotary_dim, 2) / rotary_dim), parameters, config)
    interleaved = _is_interleaved(config)
    if kind == "longrope" and interleaved:
        raise UnsupportedError("rope type 'longrope' with interleaved pairs is not supported: SGLang has none either")
    return RopeSpec(
        kind=kind,
        rotary_dim=rotary_dim,
        inv_freq=tuple(inv_freq.tolist()),
        attention_factor=attention_factor,
        interleaved=interleaved,
        position_limit=int(_trained_positions(parameters, config)) if kind == "longrope" else None,
    )


class Rotation:
    """The rotation of the keys at given positions, or its inverse, ready to be applied to any number of layers."""

    def __init__(
        self, positions: torch.Tensor, spec: RopeSpec, num_kv_heads: int = 1, *, inverse: bool = False
    ) -> None:
        """positions: i64[num_tokens], any values. num_kv_heads: heads to spread the tables over, which is faster.

        Raises UnsupportedError for a position at or beyond the `position_limit` of `spec`.
        """
        if spec.position_limit is not None and len(positions) and int(positions.max()) >= spec.position_limit:
            raise UnsupportedError(
                f"rope type {spec.kind!r} is known up to position {spec.position_limit - 1} only, not at "
                f"{int(positions.max())}: use at most {spec.position_limit} tokens"
            )
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

    keys: float[..., num_tokens, num_kv_heads, head_dim]. positions: i64[num_tokens], absolute, any values below the
    `position_limit` of `spec`: there is no table to run out of. Computed in fp32 (angles in fp64); returns a new f32
    tensor of the same shape. Undoing what was done gives the keys back up to fp32 rounding, attention factor included.
    Raises UnsupportedError beyond the limit.
    """
    return Rotation(positions, spec, inverse=inverse)(keys)


def _unscaled(inv_freq: Floats, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Floats, float]:
    return inv_freq, 1.0


def _linear(inv_freq: Floats, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Floats, float]:
    return inv_freq / _number(parameters, "factor"), 1.0


def _dynamic(inv_freq: Floats, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Floats, float]:
    """NTK scaling of the base, the same for all positions.

    transformers scales it by the length of a sequence, once that passes the trained length. SGLang builds one table at
    start, as for a sequence of factor times the trained length, or for the growth `alpha`.
    """
    if parameters.get("alpha") is not None:
        growth = _number(parameters, "alpha")
    else:
        factor = _number(parameters, "factor")
        growth = factor * factor - (factor - 1)
    num_pairs = len(inv_freq)
    if num_pairs < 2:
        raise ConfigError("rope type 'dynamic' cannot scale a single pair: expected at least 4 rotary channels")
    # The base grows by growth ** (rotary_dim / (rotary_dim - 2)), and pair i turns at base ** -(i / num_pairs).
    return inv_freq * growth ** -(np.arange(num_pairs) / (num_pairs - 1)), 1.0


def _llama3(inv_freq: Floats, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Floats, float]:
    """Long wavelengths are divided by the factor, short ones kept, those between are interpolated."""
    factor = _number(parameters, "factor")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    if high <= low:
        raise ConfigError(
            f"the model configuration has high_freq_factor = {high}: expected more than {low}, the low one"
        )
    turns = _trained_positions(parameters, config) * inv_freq / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inv_freq * (kept + (1 - kept) / factor), 1.0


def _yarn(inv_freq: Floats, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Floats, float]:
    """YaRN (arXiv 2309.00071) as SGLang reads its parameters.

    Unlike transformers it knows `extrapolation_factor` and `attn_factor`, but not `attention_factor`, and takes
    `mscale` and `mscale_all_dim` of 0 at their word. Without a factor the two assume different ones: then refused.
    """
    trained, factor = _trained_positions(parameters, config), _number(parameters, "factor")
    rotary_dim, base = 2 * len(inv_freq), _number(parameters, "rope_theta")

    def pair_with(turns: float) -> float:
        """The (fractional) pair that makes so many turns over the trained positions."""
        return rotary_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    low = pair_with(parameters.get("beta_fast") or 32)
    high = pair_with(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    span = high - low or 0.001
    kept = 1 - np.clip((np.arange(len(inv_freq)) - low) / span, 0.0, 1.0)
    kept *= parameters.get("extrapolation_factor", 1.0)

    attention_factor = float(parameters.get("attn_factor", 1.0))
    scale, scale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if scale is None or scale_all is None:
        attention_factor *= magnitude(1.0)
    else:
        attention_factor *= magnitude(scale) / magnitude(scale_all)
    return inv_freq * (kept + (1 - kept) / factor), attention_factor


def _longrope(inv_freq: Floats, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Floats, float]:
    """LongRoPE (arXiv 2402.13753) up to the trained length, where the short factors hold.

    SGLang looks at every forward pass: a position above the trained length turns all tokens of the batch, those of
    other requests too, to the long factors, and the position equal to it reads the long table's first row. How a key
    was rotated can then be told neither from its position nor from its request, hence the spec's `position_limit`.
    """
    factors = np.array(parameters.get("short_factor"), dtype=object)
    if factors.shape != inv_freq.shape or not all(_is_positive(factor) for factor in factors):
        raise ConfigError(
            f"the model configuration has short_factor = {parameters.get('short_factor')!r}: expected "
            f"{len(inv_freq)} numbers above 0"
        )
    scaled = inv_freq / factors.astype(np.float64)
    if parameters.get("short_mscale") is not None:
        return scaled, float(_number(parameters, "short_mscale"))
    # transformers prefers `factor` and `attention_factor` if they are there; SGLang does not read them.
    trained = _trained_positions(parameters, config)
    growth = _number(config, "max_position_embeddings") / trained
    return scaled, math.sqrt(1 + math.log(growth) / math.log(trained)) if growth > 1 else 1.0


_SCALED: dict[str, Callable[[Floats, Mapping[str, Any], Mapping[str, Any]], tuple[Floats, float]]] = {
    "default": _unscaled,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _check_is_one_rope(kind: str, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError unless every layer turns every token by one position."""
    for name, meaning in _REFUSED_FIELDS.items():
        if any(table.get(name) not in (None, False) for table in (parameters, config)):
            raise UnsupportedError(f"{meaning} is not supported: the model configuration has {name}")
    if kind == "mrope":
        raise UnsupportedError("multimodal rope (mrope) is not supported: its positions are not one number per token")
    if isinstance(parameters.get("rope_theta"), Sequence):
        raise UnsupportedError(f"{_PER_LAYER} is not supported: the model configuration lists several rope_theta")
    embedding = config.get("position_embedding_type") or "rope"
    if embedding != "rope":
        raise UnsupportedError(f"position_embedding_type {embedding!r} is not supported: expected 'rope'")

    model_type = config.get("model_type")
    rotated_layers = config.get("no_rope_layers") or [0 if config.get("no_rope_layer_interval") else 1]
    lacks_rope = model_type in _NO_ROPE_MODEL_TYPES or any(is_rotated != 1 for is_rotated in rotated_layers)
    if model_type in _NO_ROPE_BESIDE_SLIDING_MODEL_TYPES:
        lacks_rope = lacks_rope or bool(config.get("sliding_window"))
    if lacks_rope:
        raise UnsupportedError(f"layers without rotary embedding (NoPE) are not supported: model type {model_type!r}")


def _rotary_dim(head_dim: int, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Rotated channels of a head; some model types give them as a number or under an older name."""
    shares = [parameters.get("partial_rotary_factor"), config.get("rope_pct"), config.get("rotary_pct")]
    found = {int(head_dim * float(share)) for share in shares if share is not None}
    if config.get("rotary_dim") is not None:
        found.add(int(config["rotary_dim"]))
    if len(found) > 1:
        raise ConfigError(f"the model configuration gives several numbers of rotary channels: {sorted(found)}")
    rotary_dim = found.pop() if found else head_dim
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(f"rope rotates {rotary_dim} of {head_dim} channels: expected an even number up to {head_dim}")
    return rotary_dim


def _trained_positions(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Positions the model was trained on before scaling; transformers looks in the same places in the same order."""
    key = "original_max_position_embeddings"
    for table in (config, parameters):
        if table.get(key) is not None:
            return _number(table, key)
    return _number(config, "max_position_embeddings")


def _is_interleaved(config: Mapping[str, Any]) -> bool:
    """`rope_interleave` is not looked at: SGLang reads it for latent attention (MLA) only."""
    model_type = config.get("model_type")
    if model_type in _INTERLEAVED_MODEL_TYPES:
        return True
    return not config.get("rope_is_neox_style", model_type not in _INTERLEAVED_UNLESS_TOLD)


def _number(table: Mapping[str, Any], key: str) -> float:
    """Raises ConfigError unless the key holds a number above 0."""
    value = table.get(key)
    if not _is_positive(value):
        raise ConfigError(f"the model configuration has {key} = {value!r}: expected a number above 0")
    return value


def _is_positive(value: object) -> TypeGuard[float]:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf
