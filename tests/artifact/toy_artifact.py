"""A small artifact with every part filled in."""

from __future__ import annotations

import numpy as np

from sglang_kvtc.artifact.schema import Artifact, Group, ModelFingerprint, Plan, RopeSpec, SideBasis, SidePlan
from sglang_kvtc.types import ModelGeometry, Side

GEOMETRY = ModelGeometry(num_layers=2, num_kv_heads=2, head_dim=16, v_head_dim=8, dtype="bfloat16")
ROPE = RopeSpec(kind="default", rotary_dim=16, inv_freq=tuple(float(10_000 ** (-i / 8)) for i in range(8)))
FINGERPRINT = ModelFingerprint(architecture="ToyForCausalLM", name="toy", digest="0123456789abcdef" * 2)
PLAN = Plan(
    target_ratio=16.0,
    k=SidePlan((Group(0, 1, 6), Group(1, 16, 3)), predicted_error=0.125),
    v=SidePlan((Group(0, 16, 2),), predicted_error=0.25),
)


def basis(num_features: int, rank: int, seed: int) -> SideBasis:
    rng = np.random.default_rng(seed)
    head_size = num_features // (GEOMETRY.num_layers * GEOMETRY.num_kv_heads)
    factors = rng.standard_normal((GEOMETRY.num_layers, GEOMETRY.num_kv_heads, head_size, head_size))
    columns, _ = np.linalg.qr(rng.standard_normal((num_features, rank)))
    variances = np.sort(rng.random(rank))[::-1].astype(np.float32)
    return SideBasis(
        weights=(factors @ factors.swapaxes(2, 3) / head_size + np.eye(head_size)).astype(np.float32),
        mean=rng.standard_normal(num_features).astype(np.float32),
        basis=columns.astype(np.float16),
        variances=variances,
        total_variance=float(variances.sum()) + 1,
    )


def artifact(plans: tuple[Plan, ...] = (PLAN,)) -> Artifact:
    return Artifact(
        geometry=GEOMETRY,
        rope=ROPE,
        fingerprint=FINGERPRINT,
        k=basis(GEOMETRY.features(Side.K), 20, 0),
        v=basis(GEOMETRY.features(Side.V), 16, 1),
        plans=plans,
        provenance={"corpus": "builtin", "tokens": "1000"},
    )


def lossless_artifact() -> Artifact:
    return Artifact(geometry=GEOMETRY, rope=ROPE, fingerprint=FINGERPRINT, k=None, v=None, plans=())
