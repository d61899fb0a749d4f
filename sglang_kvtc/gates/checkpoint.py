"""The published gates of Fast KVzip: a `.pt` file, which is a pickle, read without running anything in it.

Torch's restricted unpickler builds tensors and plain containers only. The published files carry numpy numbers beside
the weights (losses of the training run); whatever the pickle calls for to make those is replaced by an object that
ignores its arguments. The geometry is that of the tensors, whatever the file is called.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.serialization import safe_globals

from sglang_kvtc.errors import ArtifactError, ConfigError
from sglang_kvtc.gates.io import check_shape_fits
from sglang_kvtc.gates.model import (
    MAX_LAYERS,
    GateConfig,
    GateInput,
    GateKind,
    Gates,
    GateShape,
    SinkAttentionGates,
    parameters_per_layer,
)

MAX_FILE_BYTES = 2 << 30
"""The largest published gates, those of a 14B model, have 0.3 GB."""
MAX_PARAMETERS = MAX_FILE_BYTES // 2
_WEIGHTS = "module"
RELEASED_NAMES = {
    "q_proj.weight": "q_weight",
    "q_proj.bias": "q_bias",
    "k_proj.weight": "k_weight",
    "q_norm.weight": "q_norm",
    "k_norm.weight": "k_norm",
    "k_base": "sinks",
    "b": "bias",
}
"""Tensors of one layer in the published files and our parameters."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_IGNORED_GLOBALS = (
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.dtypes.Float64DType",
    "numpy.dtypes.Float32DType",
)


class _Ignored:
    """Stands in for numpy objects that are not needed."""

    def __new__(cls, *args: object) -> _Ignored:
        return super().__new__(cls)

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def load_released(path: str | Path, expected: GateShape | None = None) -> Gates:
    """Read a published checkpoint; the gates are f32 on the CPU, in the released form, fed hidden states.

    expected: what the model asks for; any gates that are consistent in themselves by default. Raises ArtifactError,
    naming the layer and the tensor, for a file that is missing, damaged, asks for code, or holds anything but one set
    of gates.
    """
    file = Path(path)
    _check_archive(file)
    content = _unpickle(file)
    try:
        layers = _layers(content)
        config = _config(layers)
        if expected is not None:
            check_shape_fits(config.shape, expected, "the gates")
        gates = SinkAttentionGates(config)
        for index, layer in enumerate(layers):
            _copy_layer(layer, index, gates)
    except (ArtifactError, ConfigError) as error:
        raise ArtifactError(f"{file}: {error}") from error
    return gates


def _check_archive(file: Path) -> None:
    """Only the zip archives of torch.save, whose parts are not compressed and so cannot grow."""
    if not file.is_file():
        raise ArtifactError(f"there is no checkpoint at {file}: expected a published .pt file")
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise ArtifactError(f"{file} is no checkpoint of torch.save: {error}") from error
    for part in parts:
        if part.compress_type != zipfile.ZIP_STORED:
            raise ArtifactError(f"{file}: {part.filename} is compressed, which torch.save never does")
    if (size := sum(part.file_size for part in parts)) > MAX_FILE_BYTES:
        raise ArtifactError(f"{file} holds {size} bytes, more than the {MAX_FILE_BYTES} that gates may take")


def _unpickle(file: Path) -> Any:
    try:
        with safe_globals([(_Ignored, name) for name in _IGNORED_GLOBALS]):
            # The one format in which these gates are published.
            return torch.load(file, map_location="cpu", weights_only=True, mmap=False)  # noqa: TID251
    except Exception as error:
        # A hand-made pickle can make the unpickler and what it calls fail in any way.
        asked = re.search(r"GLOBAL (\S+)", str(error))
        cause = f"it asks for {asked[1]}" if asked else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ArtifactError(f"{file} cannot be loaded as plain tensors, and nothing in it was run: {cause}") from error


def _layers(content: Any) -> list[dict[str, torch.Tensor]]:
    """The tensors of every layer, each of them dense, of a real dtype, and no larger than its storage."""
    if not isinstance(content, dict) or _WEIGHTS not in content:
        raise ArtifactError(f"it holds no dict with the key {_WEIGHTS!r}, so it is no checkpoint of gates")
    layers = content[_WEIGHTS]
    if not isinstance(layers, list) or not 0 < len(layers) <= MAX_LAYERS:
        found = f"a list of {len(layers)}" if isinstance(layers, list) else f"a {type(layers).__name__}"
        raise ArtifactError(f"{_WEIGHTS} is {found}, expected a list of 1 to {MAX_LAYERS} layers")
    for index, layer in enumerate(layers):
        if not isinstance(layer, dict):
            raise ArtifactError(f"layer {index} is a {type(layer).__name__}, expected a dict of tensors")
        missing = sorted(RELEASED_NAMES.keys() - layer.keys())
        unknown = sorted(str(key)[:80] for key in layer.keys() - RELEASED_NAMES.keys())
        if missing or unknown:
            raise ArtifactError(f"layer {index}: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}")
        for name, tensor in layer.items():
            _check_tensor(f"layer {index}: {name}", tensor)
    return layers


def _check_tensor(name: str, tensor: object) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise ArtifactError(f"{name} is a {type(tensor).__name__}, expected a tensor")
    assert isinstance(tensor, torch.Tensor)
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ArtifactError(f"{name} is sparse, nested or quantised, expected a dense tensor")
    if tensor.device.type != "cpu":
        raise ArtifactError(f"{name} is on the device {tensor.device}, expected numbers in the file")
    if tensor.dtype not in _DTYPES:
        raise ArtifactError(f"{name} is {tensor.dtype}, expected one of {', '.join(map(str, _DTYPES))}")
    stored = tensor.untyped_storage().nbytes()
    if tensor.numel() * tensor.element_size() > stored:
        raise ArtifactError(f"{name} has shape {list(tensor.shape)}, but only {stored} bytes in the file")


def _config(layers: list[dict[str, torch.Tensor]]) -> GateConfig:
    """The geometry of the first layer, to which every layer is then held."""
    first = layers[0]
    for name, num_axes in (("q_proj.weight", 2), ("k_proj.weight", 2), ("q_norm.weight", 1), ("k_base", 4)):
        if first[name].dim() != num_axes or 0 in first[name].shape[:2]:
            raise ArtifactError(f"layer 0: {name} has shape {list(first[name].shape)}, expected {num_axes} axes")
    gate_dim = len(first["q_norm.weight"])
    q_rows, input_features = first["q_proj.weight"].shape
    k_rows = len(first["k_proj.weight"])
    if k_rows % gate_dim or q_rows % k_rows:
        raise ArtifactError(
            f"layer 0: q_proj.weight has {q_rows} rows, k_proj.weight {k_rows}, q_norm.weight {gate_dim}: expected "
            "each to be a multiple of the next"
        )
    config = GateConfig(
        kind=GateKind.SINK_ATTENTION,
        input=GateInput.HIDDEN,
        num_layers=len(layers),
        input_features=input_features,
        num_kv_heads=k_rows // gate_dim,
        group_size=q_rows // k_rows,
        gate_dim=gate_dim,
        num_sinks=first["k_base"].shape[2],
    )
    # A file may name the same tensors for every layer, which then are no longer bounded by its size.
    num_parameters = config.num_layers * parameters_per_layer(config.kind, config)
    if num_parameters > MAX_PARAMETERS:
        raise ArtifactError(f"it holds {num_parameters} parameters, more than the {MAX_PARAMETERS} that gates may have")
    return config


def _copy_layer(layer: dict[str, torch.Tensor], index: int, gates: SinkAttentionGates) -> None:
    """Copy one layer; the order of rows and heads is the same."""
    parameters = dict(gates.named_parameters())
    for name, tensor in layer.items():
        target = parameters[RELEASED_NAMES[name]].detach()[index]
        shape = target.shape
        if name in ("k_base", "b"):
            # These carry an axis of one for the token.
            shape = torch.Size((shape[0], 1, *shape[1:]))
        if tensor.shape != shape:
            raise ArtifactError(f"layer {index}: {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        target.copy_(tensor.detach().view(target.shape))
        if not target.isfinite().all():
            raise ArtifactError(f"layer {index}: {name} has values that are not finite in fp32")
