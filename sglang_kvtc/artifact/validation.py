"""What values an artifact may hold. Both writer and reader check, so that a bad calibration fails where it is made."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_kvtc.artifact.schema import (
    GROUP_SIZES,
    LEVEL_BITS,
    MAX_WIDTH,
    STEPS,
    Artifact,
    Group,
    RopeSpec,
    SideBasis,
    SidePlan,
)
from sglang_kvtc.artifact.shard import check_shard
from sglang_kvtc.bitstream.header import plan_code
from sglang_kvtc.errors import ArtifactError
from sglang_kvtc.types import ModelGeometry, Side

TENSOR_DTYPES = {"basis": "f16", "mean": "f32", "variances": "f32", "weights": "f32"}
"""Tensors of one side (K or V) and their dtypes; `weights` may be missing."""
CACHE_DTYPES = ("bfloat16", "float16", "float32")
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {"f16": np.dtype("<f2"), "f32": np.dtype("<f4")}
_F16_MAGNITUDE = np.uint16(0x7FFF)
_F16_INFINITY = 0x7C00


def check_artifact(artifact: Artifact) -> None:
    """Raise ArtifactError, naming the tensor or key, unless every value of the artifact is usable."""
    _check_geometry(artifact.geometry)
    check_shard(artifact.provenance, artifact.geometry)
    _check_rope(artifact.rope, artifact.geometry)
    if (artifact.k is None) != (artifact.v is None):
        raise ArtifactError("an artifact has bases for both K and V, or for neither")
    if artifact.k is None and artifact.plans:
        raise ArtifactError("plans: an artifact without bases cannot have plans")
    for side in Side:
        basis = artifact.basis(side)
        if basis is not None:
            prefix = side.name.lower()
            _check_basis(basis, prefix, artifact.geometry, side)
            for index, plan in enumerate(artifact.plans):
                _check_side_plan(plan.side(side), f"plans[{index}].{prefix}", len(basis.variances))
    codes = [plan_code(plan.target_ratio) if math.isfinite(plan.target_ratio) else 0 for plan in artifact.plans]
    for index, code in enumerate(codes):
        if not 0 < code < 2**32 or code in codes[:index]:
            ratio = artifact.plans[index].target_ratio
            raise ArtifactError(f"plans[{index}].target_ratio is {ratio}: expected a positive ratio, each only once")


def _check_geometry(geometry: ModelGeometry) -> None:
    for key in ("num_layers", "num_kv_heads", "head_dim", "v_head_dim"):
        if getattr(geometry, key) < 1:
            raise ArtifactError(f"geometry.{key} is {getattr(geometry, key)}: expected at least 1")
    if geometry.dtype not in CACHE_DTYPES:
        raise ArtifactError(f"geometry.dtype is {geometry.dtype!r}: expected one of {', '.join(CACHE_DTYPES)}")


def _check_rope(rope: RopeSpec, geometry: ModelGeometry) -> None:
    if not 0 <= rope.rotary_dim <= geometry.head_dim or rope.rotary_dim % 2:
        raise ArtifactError(f"rope.rotary_dim is {rope.rotary_dim}: expected an even number up to {geometry.head_dim}")
    if len(rope.inv_freq) != rope.rotary_dim // 2:
        raise ArtifactError(f"rope.inv_freq has {len(rope.inv_freq)} numbers for rotary_dim {rope.rotary_dim}")
    for index, frequency in enumerate(rope.inv_freq):
        if not math.isfinite(frequency):
            raise ArtifactError(f"rope.inv_freq[{index}] is {frequency}: expected a finite number")
    if not (math.isfinite(rope.attention_factor) and rope.attention_factor > 0):
        raise ArtifactError(f"rope.attention_factor is {rope.attention_factor}: expected a positive number")
    if rope.position_limit is not None and rope.position_limit < 1:
        raise ArtifactError(f"rope.position_limit is {rope.position_limit}: expected at least 1, or none")


def _check_basis(basis: SideBasis, prefix: str, geometry: ModelGeometry, side: Side) -> None:
    rank, num_features = len(basis.variances), geometry.features(side)
    if not 1 <= rank <= num_features:
        raise ArtifactError(f"{prefix}.variances has {rank} components: expected 1 to {num_features}")
    shapes: dict[str, tuple[int, ...]] = {
        "mean": (num_features,),
        "basis": (num_features, rank),
        "variances": (rank,),
    }
    for field, shape in shapes.items():
        _check_tensor(getattr(basis, field), f"{prefix}.{field}", _NUMPY_DTYPES[TENSOR_DTYPES[field]], shape)
    if basis.weights is not None:
        _check_weights(basis.weights, f"{prefix}.weights", geometry, side)
    _check_all(basis.variances >= 0, basis.variances, f"{prefix}.variances", "not negative")
    falling = np.append(True, basis.variances[1:] <= basis.variances[:-1])
    _check_all(falling, basis.variances, f"{prefix}.variances", "at most the one before it")
    if not (math.isfinite(basis.total_variance) and basis.total_variance >= 0):
        raise ArtifactError(f"{prefix}_total_variance is {basis.total_variance}: expected a number of at least 0")


def _check_weights(weights: npt.NDArray[np.float32], name: str, geometry: ModelGeometry, side: Side) -> None:
    head_size = geometry.head_dim if side is Side.K else geometry.v_head_dim
    shape = (geometry.num_layers, geometry.num_kv_heads, head_size, head_size)
    _check_tensor(weights, name, _NUMPY_DTYPES[TENSOR_DTYPES["weights"]], shape)
    resolution, tiny = np.finfo(np.float32).eps, np.finfo(np.float32).tiny
    asymmetry = np.abs(weights.astype(np.float64) - weights.swapaxes(2, 3)).max(axis=(2, 3))
    eigenvalues = np.linalg.eigvalsh(weights.astype(np.float64))
    least, largest = eigenvalues[..., 0], eigenvalues[..., -1]
    # Decoding multiplies by the inverse, which must be neither rounding noise in fp32 nor subnormal nor infinite.
    usable = (least >= np.maximum(resolution * largest, tiny)) & (largest <= 1 / tiny)
    usable &= asymmetry <= 8 * resolution * largest
    if not usable.all():
        layer, head = (int(position) for position in np.argwhere(~usable)[0])
        raise ArtifactError(f"{name}[{layer}, {head}] is no symmetric, positive definite matrix that fp32 can invert")


def _check_tensor(tensor: npt.NDArray[Any], name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ArtifactError(f"{name} is {tensor.dtype}{list(tensor.shape)}, expected {dtype}{list(shape)}")
    if dtype.itemsize == 2:
        # As integers: numpy has no fast isfinite for float16, and a basis has hundreds of millions of elements.
        bits = tensor.view(np.uint16)
        if all(int((row & _F16_MAGNITUDE).max()) < _F16_INFINITY for row in bits):
            return
    _check_all(np.isfinite(tensor), tensor, name, "finite")


def _check_all(holds: npt.NDArray[np.bool_], tensor: npt.NDArray[Any], name: str, wanted: str) -> None:
    if not holds.all():
        index = tuple(int(position) for position in np.argwhere(~holds)[0])
        raise ArtifactError(f"{name}{list(index)} is {tensor[index]}: expected it to be {wanted}")


def _check_side_plan(plan: SidePlan, name: str, rank: int) -> None:
    for field in ("predicted_error", "step", "stored_bits"):
        value = getattr(plan, field)
        if not (math.isfinite(value) and value >= 0):
            raise ArtifactError(f"{name}.{field} is {value}: expected a number of at least 0")
    least, most = STEPS
    if plan.step and not least <= plan.step <= most:
        raise ArtifactError(f"{name}.step is {plan.step}: expected 0, or {least:g} to {most:g}")
    for index, group in enumerate(plan.groups):
        _check_group(group, f"{name}.groups[{index}]", plan.step > 0, rank)
    for index, (before, after) in enumerate(pairwise(plan.groups), start=1):
        if after.start < before.start + before.size:
            raise ArtifactError(f"{name}.groups[{index}].start is {after.start}: overlaps or precedes the group before")


def _check_group(group: Group, name: str, is_uniform: bool, rank: int) -> None:
    least, most = LEVEL_BITS if is_uniform else (0, MAX_WIDTH)
    if group.size < 1 or not (is_uniform or group.size in GROUP_SIZES):
        raise ArtifactError(
            f"{name}.size is {group.size}: expected {'1 or more' if is_uniform else f'one of {GROUP_SIZES}'}"
        )
    if not least <= group.width <= most:
        raise ArtifactError(f"{name}.width is {group.width}: expected {least} to {most}")
    if not 0 <= group.start <= rank - group.size:
        stop = group.start + group.size
        raise ArtifactError(f"{name} is [{group.start}, {stop}): outside the {rank} components")
