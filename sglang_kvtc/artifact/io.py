"""Reading and writing a calibration artifact: one safetensors file, so that opening it runs no code.

Tensors: k.mean f32[p], k.basis f16[p, r], k.variances f32[r] and, where features are weighted, k.weights
f32[num_layers, num_kv_heads, head size, head size]; the same under `v`; an artifact without bases has none. Everything
else is one JSON text in the file's metadata; `digest` is XXH3-128 over that text and the tensors.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sglang_kvtc.artifact.container import check_metadata, content_digest, replace_file
from sglang_kvtc.artifact.schema import SCHEMA_VERSION, Artifact, ModelFingerprint, Plan, RopeSpec, SideBasis
from sglang_kvtc.artifact.validation import TENSOR_DTYPES, check_artifact
from sglang_kvtc.errors import ArtifactError
from sglang_kvtc.types import ModelGeometry, Side

FILE_NAME = "artifact.safetensors"
_SAFETENSORS_DTYPES = {"f16": "F16", "f32": "F32"}


class _Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of an artifact that is stored as JSON."""

    geometry: ModelGeometry
    rope: RopeSpec
    fingerprint: ModelFingerprint
    plans: tuple[Plan, ...]
    provenance: dict[str, str]
    k_total_variance: float | None
    v_total_variance: float | None


def save_artifact(artifact: Artifact, path: str | Path) -> Artifact:
    """Write `artifact` and return it with its digest filled in.

    path: a directory, created if need be, or a file name that ends in .safetensors. An existing artifact is replaced in
    one step: a reader sees the old one or the new one. Raises ArtifactError for content that `load_artifact` would
    refuse, or when the file cannot be written.
    """
    check_artifact(artifact)
    description = _describe(artifact)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in _tensors(artifact).items()}
    digest = _content_digest(description, tensors)
    metadata = {"schema_version": str(SCHEMA_VERSION), "description": description, "digest": digest.hex()}

    target = Path(path)
    if target.suffix != ".safetensors":
        target = target / FILE_NAME
    replace_file(target, lambda unfinished: save_file(tensors, unfinished, metadata), "artifact")
    return dataclasses.replace(artifact, digest=digest)


def load_artifact(path: str | Path) -> Artifact:
    """Read and check an artifact; `path` is its directory or its file.

    Raises ArtifactError, naming the tensor or key, when the file is missing, damaged, of another schema version, or
    holds values that cannot be right. Nothing in the file is run as code.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    if not file.is_file():
        raise ArtifactError(f"there is no artifact at {file}: run `sglang-kvtc calibrate` to make one")
    try:
        with safe_open(file, framework="numpy") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
            check_metadata(metadata, "description", SCHEMA_VERSION, "calibration artifact", "calibrate again")
            tensors = {name: _read_tensor(opened, name) for name in sorted(opened.keys())}
    except ArtifactError as error:
        raise ArtifactError(f"{file}: {error}") from error
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{file} is not a readable safetensors file: {error}") from error

    description = metadata["description"]
    digest = _content_digest(description, tensors)
    if digest.hex() != metadata["digest"]:
        raise ArtifactError(f"{file} changed after it was written (its digest does not match): calibrate again")
    try:
        parsed = _parse(description)
        artifact = Artifact(
            geometry=parsed.geometry,
            rope=parsed.rope,
            fingerprint=parsed.fingerprint,
            k=_side_basis(tensors, Side.K, parsed.k_total_variance),
            v=_side_basis(tensors, Side.V, parsed.v_total_variance),
            plans=parsed.plans,
            provenance=parsed.provenance,
            digest=digest,
        )
        check_artifact(artifact)
    except ArtifactError as error:
        raise ArtifactError(f"{file}: {error}") from error
    return artifact


def _describe(artifact: Artifact) -> str:
    description = _Description(
        geometry=artifact.geometry,
        rope=artifact.rope,
        fingerprint=artifact.fingerprint,
        plans=artifact.plans,
        provenance=artifact.provenance,
        k_total_variance=None if artifact.k is None else artifact.k.total_variance,
        v_total_variance=None if artifact.v is None else artifact.v.total_variance,
    )
    try:
        text = msgspec.json.encode(description, order="sorted", enc_hook=_plain_number).decode()
    except TypeError as error:
        raise ArtifactError(f"the artifact cannot be written as JSON: {error}") from error
    # Python does not hold the fields to their types; the reader does.
    _parse(text)
    return text


def _plain_number(value: object) -> object:
    """Calibration hands in numpy scalars as well as Python numbers."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _parse(description: str) -> _Description:
    try:
        return msgspec.json.decode(description, type=_Description)
    except msgspec.MsgspecError as error:
        raise ArtifactError(f"description: {error}") from error


def _tensors(artifact: Artifact) -> dict[str, npt.NDArray[Any]]:
    """All tensors by name, sorted."""
    return {
        f"{side.name.lower()}.{field}": tensor
        for side in Side
        if (basis := artifact.basis(side)) is not None
        for field in sorted(TENSOR_DTYPES)
        if (tensor := getattr(basis, field)) is not None
    }


def _content_digest(description: str, tensors: dict[str, npt.NDArray[Any]]) -> bytes:
    parts = ((name, tensor.dtype.str, tensor.shape, tensor.data) for name, tensor in tensors.items())
    return content_digest(SCHEMA_VERSION, description, parts)


def _read_tensor(opened: Any, name: str) -> npt.NDArray[Any]:
    side, _, field = name.partition(".")
    if side not in ("k", "v") or field not in TENSOR_DTYPES:
        raise ArtifactError(f"unknown tensor {name}")
    found, expected = opened.get_slice(name).get_dtype(), _SAFETENSORS_DTYPES[TENSOR_DTYPES[field]]
    if found != expected:
        raise ArtifactError(f"{name} is {found}, expected {expected}")
    tensor: npt.NDArray[Any] = opened.get_tensor(name)
    return tensor


def _side_basis(tensors: dict[str, npt.NDArray[Any]], side: Side, total_variance: float | None) -> SideBasis | None:
    prefix = side.name.lower()
    present = {field: tensors[name] for field in TENSOR_DTYPES if (name := f"{prefix}.{field}") in tensors}
    if not present and total_variance is None:
        return None
    missing = [f"{prefix}.{field}" for field in TENSOR_DTYPES if field not in (*present, "weights")]
    if total_variance is None:
        missing.append(f"{prefix}_total_variance")
    if missing or total_variance is None:
        raise ArtifactError(f"{', '.join(missing)} missing")
    return SideBasis(**present, total_variance=total_variance)
