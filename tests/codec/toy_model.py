"""Small artifacts of any geometry, and KV that suits them: a few strong directions and noise."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from sglang_kvtc.artifact.schema import (
    Artifact,
    Group,
    ModelFingerprint,
    Plan,
    RopeSpec,
    SideBasis,
    SidePlan,
)
from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.codec.rope import rotate
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.types import KVChunk, ModelGeometry, Side, TokenRange

Pair = tuple[torch.Tensor, torch.Tensor]

GEOMETRY = ModelGeometry(num_layers=3, num_kv_heads=2, head_dim=16, v_head_dim=12, dtype="bfloat16")
GROUPS = (Group(0, 1, 8), Group(1, 16, 5), Group(17, 16, 3), Group(34, 16, 1))
"""Four widths, two sizes, and component 33 is not kept."""
UNIFORM_GROUPS = (Group(0, 5, 12), Group(5, 21, 8), Group(26, 19, 4))
"""Of a plan of step STEP: two rows of symbols per component, one, and half of one."""
STEP = 0.1
RANK = 50
RATIO = 8.0


def rope_of(geometry: ModelGeometry, *, rotary_dim: int = 0, interleaved: bool = False, factor: float = 1) -> RopeSpec:
    rotary_dim = rotary_dim or geometry.head_dim
    inv_freq = tuple(float(10_000.0 ** (-2 * pair / rotary_dim)) for pair in range(rotary_dim // 2))
    return RopeSpec("default", rotary_dim, inv_freq, factor, interleaved)


def side_basis(geometry: ModelGeometry, side: Side, weighted: bool) -> SideBasis:
    num_features = geometry.features(side)
    rng = np.random.default_rng(1 + side)
    columns, _ = np.linalg.qr(rng.standard_normal((num_features, RANK)))
    variances = (4.0 * np.arange(1, RANK + 1) ** -1.0).astype(np.float32)
    return SideBasis(
        weights=head_weights(geometry, side, rng) if weighted else None,
        mean=rng.standard_normal(num_features).astype(np.float32),
        basis=columns.astype(np.float16),
        variances=variances,
        total_variance=float(variances.sum()),
    )


def head_weights(geometry: ModelGeometry, side: Side, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Symmetric matrices with eigenvalues from 0.5 to 2."""
    head_dim = geometry.features(side) // (geometry.num_layers * geometry.num_kv_heads)
    axes, _ = np.linalg.qr(rng.standard_normal((geometry.num_layers, geometry.num_kv_heads, head_dim, head_dim)))
    eigenvalues = rng.uniform(0.5, 2, axes.shape[:-1])
    weights = (axes * eigenvalues[..., None, :]) @ axes.swapaxes(-1, -2)
    return ((weights + weights.swapaxes(-1, -2)) / 2).astype(np.float32)


def make_artifact(
    geometry: ModelGeometry = GEOMETRY,
    rope: RopeSpec | None = None,
    groups: tuple[Group, ...] = GROUPS,
    *,
    step: float = 0.0,
    weighted: bool = True,
) -> Artifact:
    """One plan of ratio RATIO, the same for K and V; with a step it is uniform. weighted: features are, by
    `head_weights`.
    """
    plan = SidePlan(groups, predicted_error=0.1, step=step)
    return Artifact(
        geometry=geometry,
        rope=rope or rope_of(geometry),
        fingerprint=ModelFingerprint("Toy", "toy", "0" * 32),
        k=side_basis(geometry, Side.K, weighted),
        v=side_basis(geometry, Side.V, weighted),
        plans=(Plan(RATIO, plan, plan),),
        digest=bytes(range(16)),
    )


def make_uniform_artifact(geometry: ModelGeometry = GEOMETRY, rope: RopeSpec | None = None) -> Artifact:
    """The toy artifact with a uniform plan."""
    return make_artifact(geometry, rope, UNIFORM_GROUPS, step=STEP)


def with_a_finer_plan() -> Artifact:
    """The toy artifact with a plan of half its ratio, for windows."""
    finer = SidePlan((Group(0, 16, 6), Group(16, 16, 4)), 0.05)
    artifact = make_artifact()
    return dataclasses.replace(artifact, plans=(*artifact.plans, Plan(RATIO / 2, finer, finer)))


def make_chunk(artifact: Artifact, num_tokens: int, start_position: int = 100, seed: int = 0) -> KVChunk:
    """Random KV whose features follow the artifact's mean and variances, plus a little noise outside of the basis."""
    geometry = artifact.geometry
    rng = np.random.default_rng(seed)
    tensors = []
    for side in Side:
        basis = artifact.basis(side)
        if basis is None:
            raise ValueError("the artifact has no bases")
        coefficients = rng.standard_normal((num_tokens, RANK)) * np.sqrt(basis.variances)
        noise = 0.01 * rng.standard_normal((num_tokens, geometry.features(side)))
        head_dim = geometry.head_dim if side is Side.K else geometry.v_head_dim
        shape = (num_tokens, geometry.num_layers, geometry.num_kv_heads, head_dim)
        centred = (coefficients @ basis.basis.astype(float).T + noise).reshape(shape)
        if basis.weights is not None:
            centred = np.einsum("tlhd,lhde->tlhe", centred, np.linalg.inv(basis.weights.astype(float)))
        features = centred + basis.mean.reshape(shape[1:])
        tensors.append(torch.from_numpy(features).transpose(0, 1).contiguous())
    positions = torch.arange(start_position, start_position + num_tokens)
    dtype: torch.dtype = getattr(torch, geometry.dtype)
    return KVChunk(rotate(tensors[0].float(), positions, artifact.rope).to(dtype), tensors[1].to(dtype), start_position)


def rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def restore(
    codec: KVCodec, frame: bytes, start_position: int, num_tokens: int, tokens: TokenRange | None = None
) -> Pair:
    """K and V of the tokens (default: all), layer by layer."""
    opened = codec.open(frame, start_position, num_tokens)
    tokens = tokens or TokenRange(0, num_tokens)
    layers = [opened.reconstruct(range(layer, layer + 1), tokens) for layer in range(codec.geometry.num_layers)]
    return torch.cat([keys for keys, _ in layers]), torch.cat([values for _, values in layers])


def round_trip(artifact: Artifact, chunk: KVChunk, kind: FrameKind, config: CodecConfig | None = None) -> Pair:
    codec = KVCodec(artifact, config or CodecConfig())
    encoded = codec.encode(chunk, kind)
    assert encoded.kind is kind
    return restore(codec, encoded.frame, chunk.start_position, chunk.num_tokens)
