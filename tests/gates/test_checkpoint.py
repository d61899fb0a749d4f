from __future__ import annotations

import io
import os
import pickle  # noqa: TID251 - to show that it is refused
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gates.plain_gates import config, plain_scores, trained_like
from gates.published import layers_of, write

from sglang_kvtc.errors import ArtifactError
from sglang_kvtc.gates import checkpoint
from sglang_kvtc.gates.checkpoint import load_released
from sglang_kvtc.gates.model import BiasForm, GateInput, GateKind, GateShape

MADE = config(num_layers=2, input_features=24, num_kv_heads=2, group_size=3)
Layers = list[dict[str, Any]]


@pytest.mark.parametrize("group_size", [1, 3, 8])
@pytest.mark.parametrize("sizes", [{}, {"gate_dim": 8, "num_sinks": 4}, {"num_sinks": 0, "num_layers": 1}], ids=str)
def test_a_checkpoint_gives_the_gates_it_was_made_of(group_size: int, sizes: dict[str, int], tmp_path: Path) -> None:
    gates = trained_like(config(group_size=group_size, **sizes))
    # The published name would say sixteen sinks; the tensors decide.
    loaded = load_released(write(tmp_path / "q4_dim16_sink16.pt", layers_of(gates)))
    assert loaded.config == gates.config
    assert (loaded.config.kind, loaded.config.input) == (GateKind.SINK_ATTENTION, GateInput.HIDDEN)
    assert loaded.config.bias_form is BiasForm.RELEASED
    for (name, found), expected in zip(loaded.named_parameters(), gates.parameters(), strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, expected), name


def test_queries_are_ordered_by_head_then_group(tmp_path: Path) -> None:
    """Against the published class: q_proj's output is viewed as [tokens, heads, group, channels]."""
    gates = trained_like(config(num_layers=1))
    (layer,) = layers_of(gates)
    loaded = load_released(write(tmp_path / "gates.pt", [layer]))
    tokens = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 24)))
    w = {name: tensor.double() for name, tensor in layer.items()}

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    q = norm((tokens @ w["q_proj.weight"].T + w["q_proj.bias"]).reshape(5, 2, 3, 16), w["q_norm.weight"])
    k = norm((tokens @ w["k_proj.weight"].T).reshape(5, 2, 1, 16), w["k_norm.weight"])
    own = ((q * k).sum(-1) / 4 + w["b"][:, 0]).exp()
    others = (torch.einsum("nhgd,hrd->nhgr", q, w["k_base"][:, 0]) / 4).exp().sum(-1)
    expected = (own / (own + others)).mean(-1)
    torch.testing.assert_close(loaded.double()(tokens[None])[0].detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_projections_of_other_dtypes_are_taken_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    layers = layers_of(trained_like(MADE), dtype)
    loaded = load_released(write(tmp_path / "gates.pt", layers))
    found = dict(loaded.named_parameters())
    for index, layer in enumerate(layers):
        assert torch.equal(found["q_weight"][index], layer["q_proj.weight"].float())
        assert torch.equal(found["bias"][index], layer["b"][:, 0].float())


def test_numbers_and_parameters_beside_and_among_the_weights_do_not_matter(tmp_path: Path) -> None:
    gates = trained_like(MADE)
    layers = [OrderedDict((k, torch.nn.Parameter(v)) for k, v in layer.items()) for layer in layers_of(gates)]
    path = write(
        tmp_path / "gates.pt",
        layers,
        loss=np.float64(0.5),
        best=np.float32(0.25),
        losses=[np.arange(3.0), np.ones(2, np.float32)],
        step=5000,
        name="gates",
    )
    allowed = torch.serialization.get_safe_globals()
    loaded = load_released(path)
    assert set(torch.serialization.get_safe_globals()) == set(allowed), "what other files may ask for stays the same"
    tokens = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(0))
    expected = plain_scores(gates, tokens.double().numpy())
    np.testing.assert_allclose(loaded(tokens).detach().numpy(), expected, rtol=0, atol=1e-5)


def test_numpy_is_never_called_by_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands where numpy's functions are named is not looked at."""
    path = write(tmp_path / "gates.pt", layers_of(trained_like(MADE)), losses=np.arange(3.0))
    monkeypatch.setattr(checkpoint, "_IGNORED_GLOBALS", ())
    with pytest.raises(ArtifactError, match=r"nothing in it was run: it asks for numpy\.\w+\.multiarray\._reconstruct"):
        load_released(path)


class _Calls:
    """Pickled, it is a call of `function` with `arguments`."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def _archive(pickled: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """What torch.save would write around a pickle without tensors."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    return content.getvalue()


@pytest.mark.parametrize("place", ["top", "beside", "layer"])
@pytest.mark.parametrize("kind", ["touch", "system", "exec", "opcodes"])
def test_a_sec_01_a_malicious_checkpoint_is_refused_and_runs_no_code(kind: str, place: str, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    dangerous: Any = {
        "touch": _Calls(Path.touch, target),
        "system": _Calls(os.system, f"touch {target}"),
        "exec": _Calls(exec, f"open({str(target)!r}, 'w').close()"),
        "opcodes": None,
    }[kind]
    if kind == "opcodes":
        payload = f"cposix\nsystem\n(Vtouch {target}\ntR.".encode()
    else:
        payload = pickle.dumps(dangerous, protocol=2)
    pickle.loads(payload)
    assert target.exists(), "the pickle must be dangerous for this test to mean anything"
    target.unlink()

    path = tmp_path / "gates.pt"
    if kind == "opcodes":
        path.write_bytes(_archive(payload))
    elif place == "top":
        torch.save(dangerous, path)
    elif place == "beside":
        write(path, layers_of(trained_like(MADE)), loss=dangerous)
    else:
        write(path, [*layers_of(trained_like(MADE)), dangerous])
    with pytest.raises(ArtifactError, match="nothing in it was run"):
        load_released(path)
    assert not target.exists()


def test_a_sec_01_a_bare_pickle_and_a_compressed_archive_are_not_even_opened(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    payload = pickle.dumps(_Calls(Path.touch, target), protocol=2)
    path = tmp_path / "gates.pt"
    for content, message in (
        (payload, r"no checkpoint of torch\.save"),
        (b"", r"no checkpoint of torch\.save"),
        (_archive(payload, zipfile.ZIP_DEFLATED), r"data\.pkl is compressed"),
    ):
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=message):
            load_released(path)
    assert not target.exists()


@pytest.mark.parametrize("eighth", range(8))
def test_a_cut_checkpoint_is_refused(eighth: int, tmp_path: Path) -> None:
    path = write(tmp_path / "gates.pt", layers_of(trained_like(MADE)))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * eighth // 8])
    with pytest.raises(ArtifactError):
        load_released(path)


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_pickle_is_refused_or_gives_gates(seed: int, tmp_path: Path) -> None:
    """Mutations of data.pkl end in ArtifactError, or in gates where they hit nothing that matters."""
    path = write(tmp_path / "gates.pt", layers_of(trained_like(MADE)))
    rng = np.random.default_rng(seed)
    damaged = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(damaged, "w") as target:
        for part in source.infolist():
            content = bytearray(source.read(part))
            if part.filename.endswith("data.pkl"):
                for _ in range(3):
                    content[rng.integers(len(content))] = rng.integers(256)
            target.writestr(part.filename, bytes(content))
    path.write_bytes(damaged.getvalue())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            gates = load_released(path)
        except ArtifactError:
            return
    assert all(parameter.isfinite().all() for parameter in gates.parameters())


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="there is no checkpoint at"):
        load_released(tmp_path / "gates.pt")


def test_a_torchscript_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gates.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"module": []}, protocol=2))
        archive.writestr("archive/constants.pkl", pickle.dumps((), protocol=2))
        archive.writestr("archive/version", "3\n")
    with pytest.raises(ArtifactError, match="nothing in it was run"):
        load_released(path)


def test_sizes_beyond_those_of_any_gates_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "gates.pt", layers_of(trained_like(MADE)))
    size = sum(part.file_size for part in zipfile.ZipFile(path).infolist())
    monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", size - 1)
    with pytest.raises(ArtifactError, match=rf"holds {size} bytes, more than the {size - 1}"):
        load_released(path)


def test_a_small_file_that_names_its_tensors_many_times_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layers_of(trained_like(MADE))[0]
    path = write(tmp_path / "gates.pt", [layer] * 1000)
    assert path.stat().st_size < 50_000
    monkeypatch.setattr(checkpoint, "MAX_PARAMETERS", 2_000_000)
    with pytest.raises(ArtifactError, match=r"it holds \d+ parameters, more than the 2000000"):
        load_released(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "no dict with the key 'module'"),
        ({"state_dict": []}, "no dict with the key 'module'"),
        ({"module": {}}, "module is a dict, expected a list of 1 to 1024 layers"),
        ({"module": []}, "module is a list of 0"),
        ({"module": [{}] * 1025}, "module is a list of 1025"),
        ({"module": [torch.zeros(3)]}, "layer 0 is a Tensor, expected a dict"),
        ({"module": [{}]}, r"layer 0: missing \['b', 'k_base', 'k_norm\.weight'"),
    ],
)
def test_containers_of_other_types_are_refused(content: object, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "gates.pt")
    with pytest.raises(ArtifactError, match=message):
        load_released(tmp_path / "gates.pt")


def _expanded(layers: Layers) -> None:
    layers[1]["q_proj.weight"] = torch.zeros(1, 1).expand(96, 24)


def _huge(layers: Layers) -> None:
    layers[0]["q_proj.weight"] = torch.zeros(1, 1).expand(96 << 10, 1 << 20)
    layers[0]["k_proj.weight"] = torch.zeros(1, 1).expand(32 << 10, 1 << 20)


def _renamed(layers: Layers) -> None:
    layers[1]["bias"] = layers[1].pop("b")


def _set(index: int, name: str, value: object) -> Callable[[Layers], None]:
    def change(layers: Layers) -> None:
        layers[index][name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_renamed, r"layer 1: missing \['b'\], unknown \['bias'\]"),
        (_set(0, "extra", torch.zeros(1)), r"layer 0: missing nothing, unknown \['extra'\]"),
        (_set(1, "b", torch.zeros(2, 1, 4)), r"layer 1: b has shape \[2, 1, 4\], expected \[2, 1, 3\]"),
        (_set(1, "b", torch.zeros(2, 3)), r"layer 1: b has shape \[2, 3\], expected \[2, 1, 3\]"),
        (_set(1, "k_base", torch.zeros(2, 1, 15, 16)), r"layer 1: k_base has shape .*expected \[2, 1, 16, 16\]"),
        (_set(0, "k_base", torch.zeros(2, 16, 16)), r"layer 0: k_base has shape \[2, 16, 16\], expected 4 axes"),
        (_set(0, "k_base", torch.zeros(3, 1, 16, 16)), r"layer 0: k_base .*expected \[2, 1, 16, 16\]"),
        (_set(1, "q_proj.weight", torch.zeros(96, 25)), r"layer 1: q_proj\.weight .*expected \[96, 24\]"),
        (_set(0, "q_proj.weight", torch.zeros(90, 24)), r"q_proj\.weight has 90 rows, k_proj\.weight 32"),
        (_set(0, "q_proj.weight", torch.zeros(0, 24)), r"q_proj\.weight has shape \[0, 24\]"),
        (_set(0, "q_norm.weight", torch.zeros(())), r"q_norm\.weight has shape \[\], expected 1 axes"),
        (_set(0, "q_norm.weight", torch.zeros(0)), r"q_norm\.weight has shape \[0\]"),
        (_set(0, "q_norm.weight", torch.zeros(15)), r"q_norm\.weight 15: expected each to be a multiple"),
        (_set(0, "k_norm.weight", torch.zeros(15)), r"k_norm\.weight has shape \[15\], expected \[16\]"),
        (_set(1, "q_proj.bias", torch.full((96,), float("nan"))), r"layer 1: q_proj\.bias has values .* not finite"),
        (_set(0, "k_norm.weight", torch.full((16,), 1e300, dtype=torch.float64)), "not finite in fp32"),
        (_set(0, "b", [[[0.0]]]), "layer 0: b is a list, expected a tensor"),
        (_set(0, "b", torch.zeros(2, 1, 3, dtype=torch.int32)), r"layer 0: b is torch\.int32, expected one of"),
        (_set(0, "b", torch.zeros(2, 1, 3, dtype=torch.complex64)), r"layer 0: b is torch\.complex64"),
        (_set(0, "b", torch.zeros(2, 1, 3).to_sparse()), "layer 0: b is sparse, nested or quantised"),
        (_set(0, "b", torch.zeros(2, 1, 3, device="meta")), "layer 0: b is on the device meta"),
        (_expanded, r"layer 1: q_proj\.weight has shape \[96, 24\], but only 4 bytes"),
        (_huge, r"layer 0: q_proj\.weight has shape \[98304, 1048576\], but only 4 bytes"),
    ],
)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_a_sec_01_tensors_that_cannot_be_gates_are_refused_by_layer_and_name(
    change: Callable[[Layers], None], message: str, tmp_path: Path
) -> None:
    layers: Layers = [dict(layer) for layer in layers_of(trained_like(MADE))]
    change(layers)
    with pytest.raises(ArtifactError, match=message) as caught:
        load_released(write(tmp_path / "gates.pt", layers))
    assert str(tmp_path / "gates.pt") in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (GateShape(2, 24, 2, 3), None),
        (GateShape(3, 24, 2, 3), "num_layers 2 instead of 3"),
        (GateShape(2, 32, 2, 3), "input_features 24 instead of 32"),
        (GateShape(2, 24, 3, 2), "num_kv_heads 2 instead of 3, group_size 3 instead of 2"),
    ],
)
def test_gates_of_another_model_are_refused_by_name(shape: GateShape, message: str | None, tmp_path: Path) -> None:
    path = write(tmp_path / "gates.pt", layers_of(trained_like(MADE)))
    if message is None:
        assert load_released(path, shape).config.shape == shape
    else:
        with pytest.raises(ArtifactError, match=message):
            load_released(path, shape)
