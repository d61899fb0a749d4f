"""What a calibration artifact holds. `artifact.io` writes it as one safetensors file with JSON metadata."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_kvtc.types import ModelGeometry, Side

SCHEMA_VERSION = 3
GROUP_SIZES = (1, 16, 64, 256, 1024)
"""Components that may share one shift and scale (KVTC section 3.2), in a grouped plan."""
MAX_WIDTH = 8
"""Of a grouped plan."""
LEVEL_BITS = (2, 16)
"""Least and largest width of a uniform plan."""
STEPS = (2.0**-64, 2.0**64)
"""Least and largest step of a uniform plan: those of its tokens are normal numbers then."""
PARAM_BITS = 32
"""A 16-bit shift and a 16-bit scale per group and token, in a grouped plan."""
TOKEN_SCALE_BITS = 8
"""The one parameter of a token in a uniform plan."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The model's rotary embedding, as far as undoing it needs.

    inv_freq: angular frequency of each rotated pair, f64[rotary_dim // 2], after any scaling.
    attention_factor: multiplier on cos and sin (yarn, longrope), 1 otherwise.
    interleaved: pairs are (2i, 2i+1) instead of NeoX (i, i + rotary_dim/2).
    position_limit: positions from here on may be rotated in another way (longrope); None if there is no such limit.
    """

    kind: str
    rotary_dim: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    interleaved: bool = False
    position_limit: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive principal components [start, start + size) quantised to `width` bits each, and in a grouped plan with
    a shift and scale in common.
    """

    start: int
    size: int
    width: int


@dataclass(frozen=True, slots=True)
class SidePlan:
    """What is kept of K or V: the coded groups in ascending order; components in no group are not stored.

    Either grouped (KVTC section 3.2, codec.quantize): every token has a shift and a scale for each group. Or uniform
    (codec.uniform): all components have one `step`, which a scale per token multiplies, and entropy coding makes the
    bits.
    """

    groups: tuple[Group, ...]
    predicted_error: float
    """Expected squared error per token divided by the variance per token, on the calibration sample."""
    step: float = 0.0
    """Of a uniform plan: distance of two levels of a token whose scale is 1, before rounding. 0 in a grouped plan."""
    stored_bits: float = 0.0
    """Of a uniform plan: bits of a token after entropy coding, on the calibration sample. 0 in a grouped plan."""

    @property
    def columns(self) -> npt.NDArray[np.int64]:
        """Principal components that are kept, ascending: the columns of the basis that are used."""
        if not self.groups:
            return np.zeros(0, dtype=np.int64)
        return np.concatenate([np.arange(g.start, g.start + g.size) for g in self.groups])

    @property
    def widths(self) -> npt.NDArray[np.uint8]:
        """Bit width of every kept component."""
        return np.repeat(np.array([g.width for g in self.groups], np.uint8), [g.size for g in self.groups])

    @property
    def bits_per_token(self) -> int:
        """Payload and parameter bits of one token, before entropy coding."""
        payload = sum(group.size * group.width for group in self.groups)
        return payload + (TOKEN_SCALE_BITS if self.step else PARAM_BITS * len(self.groups))

    @property
    def planned_bits(self) -> float:
        """What a token is expected to take: in a uniform plan after entropy coding, in a grouped one at most."""
        return self.stored_bits or self.bits_per_token


@dataclass(frozen=True, slots=True)
class Plan:
    """One target ratio: 16-bit bytes over the `planned_bits` of both sides."""

    target_ratio: float
    k: SidePlan
    v: SidePlan

    def side(self, side: Side) -> SidePlan:
        return self.k if side is Side.K else self.v


@dataclass(frozen=True, slots=True)
class SideBasis:
    """Linear transform of K or V: coefficients = (features - mean) @ W @ basis.

    mean: f32[p]. basis: f16[p, r], orthonormal columns by falling variance. variances: f32[r], per component.
    total_variance: mean squared norm of the centred, weighted features, what r components together approach.
    weights: f32[num_layers, num_kv_heads, head size, head size], the blocks of W, symmetric and positive definite; None
    in preset `paper`, where W is the identity.
    """

    mean: npt.NDArray[np.float32]
    basis: npt.NDArray[np.float16]
    variances: npt.NDArray[np.float32]
    total_variance: float
    weights: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """Which checkpoint the artifact was made for. `digest` is hex; the names are for messages only."""

    architecture: str
    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """A calibrated model. Ratio 1 (lossless) needs no bases: then `k` and `v` are None and `plans` is empty.

    Feature order is (layer, kv_head, channel). `provenance` records corpus, tokens, seed, preset and code version;
    `digest` is 16 bytes over everything else, and every frame carries it.
    """

    geometry: ModelGeometry
    rope: RopeSpec
    fingerprint: ModelFingerprint
    k: SideBasis | None
    v: SideBasis | None
    plans: tuple[Plan, ...]
    provenance: dict[str, str] = field(default_factory=dict)
    digest: bytes = b""

    def basis(self, side: Side) -> SideBasis | None:
        return self.k if side is Side.K else self.v
