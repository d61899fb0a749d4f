"""Seeded stand-ins for calibration results: spectra that fall as real ones do, and KV that follows them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sglang_kvtc.artifact.schema import Artifact, ModelFingerprint, RopeSpec
from sglang_kvtc.calibrate.fit import SideFit
from sglang_kvtc.calibrate.progress import SilentProgress
from sglang_kvtc.calibrate.uniform_plans import plans_at_ratios
from sglang_kvtc.codec.allocate import SAMPLE_TOKENS
from sglang_kvtc.codec.rope import rope_spec_from_config, rotate
from sglang_kvtc.types import KVChunk, ModelGeometry, Side

Floats = npt.NDArray[np.float32]

SMOLLM2 = ModelGeometry(num_layers=30, num_kv_heads=3, head_dim=64, v_head_dim=64, dtype="bfloat16")
"""SmolLM2-135M, whose spectra are imitated."""
_ROPE_THETA = 100_000.0
# Variance of component i (from 1) ~ i^-head (1 + i / (bend p))^-tail, fitted to SmolLM2-135M's K and V.
_SPECTRA = {Side.K: (0.9, 0.07, 1.3), Side.V: (0.5, 0.026, 1.6)}


def variances(side: Side, num_features: int, rank: int) -> Floats:
    """Falling variances of the first `rank` components, f32[rank]."""
    head, bend, tail = _SPECTRA[side]
    index = np.arange(1, rank + 1)
    falling: Floats = (100 * index**-head * (1 + index / (bend * num_features)) ** -tail).astype(np.float32)
    return falling


def coefficients(side: Side, num_features: int, rank: int, num_tokens: int, seed: int) -> Floats:
    """Gaussian coefficients f32[num_tokens, rank] whose energy varies between tokens, as it does in text."""
    rng = np.random.default_rng([seed, side])
    energy = rng.lognormal(0, 0.3, (num_tokens, 1))
    drawn: Floats = (
        rng.standard_normal((num_tokens, rank)) * energy * np.sqrt(variances(side, num_features, rank))
    ).astype(np.float32)
    return drawn


def artifact(geometry: ModelGeometry, ratio: float, seed: int) -> Artifact:
    """An artifact with random orthonormal bases and one uniform plan for the spectrum of each side."""
    fits: dict[Side, SideFit] = {}
    for side in Side:
        num_features = geometry.features(side)
        rank = min(num_features, max(64, int(num_features * 6.4 / ratio)))
        generator = torch.Generator().manual_seed(seed + side)
        columns = torch.linalg.qr(torch.randn(num_features, rank, generator=generator)).Q
        spectrum = variances(side, num_features, rank)
        sample = coefficients(side, num_features, rank, SAMPLE_TOKENS, seed)
        fits[side] = SideFit(
            side=side,
            weights=None,
            mean=torch.randn(num_features, generator=generator).numpy(),
            basis=columns.half().numpy(),
            variances=spectrum,
            total_variance=float(spectrum.sum()),
            coefficients=sample,
            sample_variance=float(np.square(sample, dtype=np.float64).sum(axis=1).mean()),
        )
    plans = plans_at_ratios(fits, geometry, [(ratio, ratio)], SilentProgress())
    return Artifact(
        geometry=geometry,
        rope=_rope(geometry),
        fingerprint=ModelFingerprint("Synthetic", "synthetic", "0" * 32),
        k=fits[Side.K].side_basis([plan.k for plan in plans]),
        v=fits[Side.V].side_basis([plan.v for plan in plans]),
        plans=plans,
        digest=bytes(16),
    )


def chunk(artifact: Artifact, num_tokens: int, start_position: int, seed: int) -> KVChunk:
    """KV whose features follow the spectra and the bases of an artifact, `artifact`'s or a calibrated one's."""
    geometry = artifact.geometry
    dtype: torch.dtype = getattr(torch, geometry.dtype)
    sides = []
    for side in Side:
        basis = artifact.basis(side)
        if basis is None:
            raise ValueError("a lossless artifact has no spectra to draw from")
        rank = len(basis.variances)
        drawn = torch.from_numpy(coefficients(side, geometry.features(side), rank, num_tokens, seed + 1))
        drawn *= torch.from_numpy(np.sqrt(basis.variances / variances(side, geometry.features(side), rank)))
        features = drawn @ torch.from_numpy(basis.basis).float().T + torch.from_numpy(basis.mean)
        shaped = features.view(num_tokens, geometry.num_layers, geometry.num_kv_heads, -1).transpose(0, 1).contiguous()
        sides.append(shaped)
    positions = torch.arange(start_position, start_position + num_tokens)
    return KVChunk(rotate(sides[0], positions, artifact.rope).to(dtype), sides[1].to(dtype), start_position)


def _rope(geometry: ModelGeometry) -> RopeSpec:
    return rope_spec_from_config({"head_dim": geometry.head_dim, "rope_theta": _ROPE_THETA})
