"""Reading and writing gates: one safetensors file, so that opening it runs no code.

Tensors are the parameters by name (gates.model), their first axis the layer. Projections are 16-bit, since the scorer
computes with no more and the gates of a small model then take a few megabytes. They are f16, which rounds weights of
ordinary size eight times finer than bf16, except where bf16 holds a projection exactly and f16 does not, as in
checkpoints in bf16; everything else is f32. Rounding happens once: gates that were loaded are saved without loss.
All else is one JSON text in the file's metadata; `digest` is XXH3-128 over that text and the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_kvtc.artifact.container import check_metadata, content_digest, replace_file
from sglang_kvtc.artifact.schema import ModelFingerprint
from sglang_kvtc.errors import ArtifactError, ConfigError
from sglang_kvtc.gates.model import GATES, GateConfig, Gates, GateShape

SCHEMA_VERSION = 1
PROJECTION_SUFFIX = "weight"
_PROJECTION_DTYPES = ("F16", "BF16")


@dataclass(frozen=True, slots=True)
class GateFile:
    """Gates with the checkpoint they were made for. `digest`: 16 bytes over everything else in the file."""

    gates: Gates
    fingerprint: ModelFingerprint
    provenance: dict[str, str] = field(default_factory=dict)
    digest: bytes = b""


class _Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a gate file that is stored as JSON."""

    config: GateConfig
    fingerprint: ModelFingerprint
    provenance: dict[str, str]


def save_gates(path: str | Path, gates: Gates, fingerprint: ModelFingerprint, provenance: dict[str, str]) -> GateFile:
    """Write `gates` and return them as `load_gates` will, with the digest of the file.

    path: a file name that ends in .safetensors; its folder is created if need be, and an existing file is replaced in
    one step. provenance: how the gates came about (corpus, tokens, seed, steps, versions). Raises ArtifactError for
    parameters that are not finite or too large for their dtype, or when the file cannot be written.
    """
    target = Path(path)
    if target.suffix != ".safetensors":
        raise ArtifactError(f"gates are written to a .safetensors file, not to {target}")
    text = _describe(_Description(gates.config, fingerprint, provenance))
    tensors = {name: _stored(name, parameter) for name, parameter in sorted(gates.named_parameters())}
    digest = _content_digest(text, tensors)
    metadata = {"schema_version": str(SCHEMA_VERSION), "gates": text, "digest": digest.hex()}
    replace_file(target, lambda unfinished: save_file(tensors, unfinished, metadata), "gates")
    return GateFile(_gates(gates.config, tensors), fingerprint, provenance, digest)


def load_gates(path: str | Path) -> GateFile:
    """Read and check a gate file; the gates are f32 on the CPU.

    Raises ArtifactError, naming the tensor or key, when the file is missing, damaged, of another schema version, or
    holds values that cannot be right. Nothing in the file is run as code.
    """
    file = Path(path)
    if not file.is_file():
        raise ArtifactError(f"there are no gates at {file}: expected a .safetensors file of trained or imported gates")
    try:
        with safe_open(file, framework="pt") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
            check_metadata(metadata, "gates", SCHEMA_VERSION, "gates", "train or import the gates again")
            description = _parse(metadata["gates"])
            _check_tensors(opened, description.config)
            tensors = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
    except ArtifactError as error:
        raise ArtifactError(f"{file}: {error}") from error
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{file} is not a readable safetensors file: {error}") from error
    digest = _content_digest(metadata["gates"], tensors)
    if digest.hex() != metadata["digest"]:
        raise ArtifactError(f"{file} changed after it was written (its digest does not match): make the gates again")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ArtifactError(f"{file}: {name} has values that are not finite")
    gates = _gates(description.config, tensors)
    return GateFile(gates, description.fingerprint, description.provenance, digest)


def check_shape_fits(found: GateShape, model: GateShape, what: str) -> None:
    """Raise ArtifactError, naming every value that differs, unless gates of one shape serve a model of the other."""
    differences = [
        f"{name} {value} instead of {expected}"
        for name in ("num_layers", "input_features", "num_kv_heads", "group_size")
        if (value := getattr(found, name)) != (expected := getattr(model, name))
    ]
    if differences:
        raise ArtifactError(f"{what} do not fit the model: they have {', '.join(differences)}")


def check_gates_fit(file: GateFile, model: GateShape, fingerprint: ModelFingerprint) -> None:
    """Raise ArtifactError unless the gates have the model's shape and were made for this checkpoint."""
    check_shape_fits(file.gates.config.shape, model, f"the gates for {file.fingerprint.name}")
    if file.fingerprint.digest != fingerprint.digest:
        raise ArtifactError(
            f"the gates were made for {file.fingerprint.name} ({file.fingerprint.digest}), the model is "
            f"{fingerprint.name} ({fingerprint.digest}): train or import gates for this checkpoint"
        )


def _describe(description: _Description) -> str:
    try:
        text = msgspec.json.encode(description, order="sorted").decode()
    except TypeError as error:
        raise ArtifactError(f"the gates cannot be described as JSON: {error}") from error
    # Python does not hold the fields to their types; the reader does.
    _parse(text)
    return text


def _parse(text: str) -> _Description:
    try:
        return msgspec.json.decode(text, type=_Description)
    except (msgspec.MsgspecError, ConfigError) as error:
        raise ArtifactError(f"the description of the gates is wrong: {error}") from error


def _stored(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that goes into the file. Raises ArtifactError for values it cannot hold."""
    value = parameter.detach().to("cpu", torch.float32).contiguous()
    if not value.isfinite().all():
        raise ArtifactError(f"{name} has values that are not finite: gates like these cannot be saved")
    if not name.endswith(PROJECTION_SUFFIX):
        return value
    f16, bf16 = value.half(), value.bfloat16()
    if torch.equal(bf16.float(), value) and not torch.equal(f16.float(), value):
        return bf16
    if not f16.isfinite().all():
        raise ArtifactError(f"{name} reaches {float(value.abs().max()):g}: more than its float16 can hold, 65504")
    return f16


def _gates(config: GateConfig, tensors: dict[str, torch.Tensor]) -> Gates:
    gates = GATES[config.kind](config)
    gates.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return gates


def _content_digest(text: str, tensors: dict[str, torch.Tensor]) -> bytes:
    parts = (
        (name, str(tensor.dtype), tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().data)
        for name, tensor in tensors.items()
    )
    return content_digest(SCHEMA_VERSION, text, parts)


def _check_tensors(opened: Any, config: GateConfig) -> None:
    """Names, dtypes and shapes, before anything is read or allocated."""
    shapes = GATES[config.kind].parameter_shapes(config)
    found = set(opened.keys())
    if found != shapes.keys():
        missing, unknown = sorted(shapes.keys() - found), sorted(found - shapes.keys())
        raise ArtifactError(f"missing tensors {missing or 'none'}, unknown tensors {unknown or 'none'}")
    for name, shape in shapes.items():
        stored = opened.get_slice(name)
        dtypes = _PROJECTION_DTYPES if name.endswith(PROJECTION_SUFFIX) else ("F32",)
        if stored.get_dtype() not in dtypes:
            raise ArtifactError(f"{name} is {stored.get_dtype()}, expected {' or '.join(dtypes)}")
        expected = [config.num_layers, *shape]
        if list(stored.get_shape()) != expected:
            raise ArtifactError(f"{name} has shape {list(stored.get_shape())}, expected {expected}")
