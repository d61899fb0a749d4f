from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
import torch
from artifact.toy_artifact import FINGERPRINT
from gates.plain_gates import config, trained_like
from safetensors import safe_open
from safetensors.torch import save_file

from sglang_kvtc.errors import ArtifactError
from sglang_kvtc.gates.io import check_gates_fit, load_gates, save_gates
from sglang_kvtc.gates.model import BiasForm, GateConfig, GateInput, GateKind, Gates, SinkAttentionGates, new_gates

PROVENANCE = {"corpus": "builtin", "steps": "2000"}
VARIANTS = [
    config(),
    dataclasses.replace(config(bias_form=BiasForm.PAPER, num_sinks=4), input=GateInput.KEYS_BEFORE_ROPE),
    config(num_sinks=0),
    config(GateKind.LINEAR),
    config(GateKind.MLP, input_features=40),
]


def parameters(gates: Gates) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in gates.named_parameters()}


def assert_equal(found: Gates, expected: Gates) -> None:
    assert found.config == expected.config
    ours, theirs = parameters(found), parameters(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, theirs[name]), name


def rewrite(file: Path, tensors: dict[str, torch.Tensor | None] | None = None, **changes: str) -> None:
    """Write a gate file again with other tensors (None drops one) or metadata (an empty text drops one)."""
    with safe_open(file, framework="pt") as opened:
        content = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        metadata = {**opened.metadata(), **changes}
    kept = {name: tensor for name, tensor in (content | (tensors or {})).items() if tensor is not None}
    save_file(kept, file, {key: text for key, text in metadata.items() if text})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "gates.safetensors"
    save_gates(path, trained_like(config()), FINGERPRINT, PROVENANCE)
    return path


@pytest.mark.parametrize("made", VARIANTS, ids=range(len(VARIANTS)))
def test_gates_come_back_as_they_were_saved(made: GateConfig, tmp_path: Path) -> None:
    gates = trained_like(made)
    saved = save_gates(tmp_path / "deep" / "gates.safetensors", gates, FINGERPRINT, PROVENANCE)
    assert os.listdir(tmp_path / "deep") == ["gates.safetensors"]
    loaded = load_gates(tmp_path / "deep" / "gates.safetensors")
    assert_equal(loaded.gates, saved.gates)
    assert (loaded.fingerprint, loaded.provenance, loaded.digest) == (FINGERPRINT, PROVENANCE, saved.digest)
    assert len(saved.digest) == 16
    for name, tensor in parameters(loaded.gates).items():
        original = parameters(gates)[name]
        # Projections lose what float16 cannot hold: half a unit of 11 bits. All else is exact.
        bound = original.abs() * 2.0**-11 + 2.0**-25 if name.endswith("weight") else torch.zeros(())
        assert ((tensor - original).abs() <= bound).all(), name


def test_saving_loaded_gates_loses_nothing_more(file: Path) -> None:
    loaded = load_gates(file)
    again = save_gates(file, loaded.gates, loaded.fingerprint, loaded.provenance)
    assert again.digest == loaded.digest
    assert_equal(load_gates(file).gates, loaded.gates)


def test_projections_that_are_bf16_stay_exact(tmp_path: Path) -> None:
    gates = trained_like(config())
    assert isinstance(gates, SinkAttentionGates)
    with torch.no_grad():
        # Of these, float16 would make 0 and infinity.
        gates.q_weight.copy_(gates.q_weight.bfloat16())
        gates.q_weight[0, 0, :2] = torch.tensor([2.0**-40, 2.0**40])
        gates.k_weight.copy_(gates.k_weight.half())
    save_gates(tmp_path / "gates.safetensors", gates, FINGERPRINT, {})
    assert_equal(load_gates(tmp_path / "gates.safetensors").gates, gates)


def test_the_gates_of_the_demo_model_are_small(tmp_path: Path) -> None:
    made = config(num_layers=30, input_features=576, num_kv_heads=3, group_size=3)
    save_gates(tmp_path / "gates.safetensors", new_gates(made, 0), FINGERPRINT, PROVENANCE)
    assert (tmp_path / "gates.safetensors").stat().st_size < 8_000_000


def test_the_digest_covers_every_parameter_and_everything_else(tmp_path: Path) -> None:
    path = tmp_path / "gates.safetensors"
    gates = trained_like(config())
    digests = [save_gates(path, gates, FINGERPRINT, PROVENANCE).digest]
    for parameter in gates.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] += 1
        digests.append(save_gates(path, gates, FINGERPRINT, PROVENANCE).digest)
    other_model = dataclasses.replace(FINGERPRINT, digest="0" * 32)
    digests.append(save_gates(path, gates, other_model, PROVENANCE).digest)
    digests.append(save_gates(path, gates, FINGERPRINT, {}).digest)
    assert len(set(digests)) == 10
    assert save_gates(path, gates, FINGERPRINT, {}).digest == digests[-1]


def test_a_failed_save_keeps_the_old_gates_and_leaves_nothing_behind(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_gates(file)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ArtifactError, match="disk full"):
        save_gates(file, new_gates(config(), 9), FINGERPRINT, {})
    monkeypatch.undo()
    assert os.listdir(file.parent) == [file.name]
    assert load_gates(file).digest == before.digest


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "q_weight has values that are not finite"),
        (float("inf"), "q_weight has values that are not finite"),
        (70001.0, "q_weight reaches 70001: more than its float16 can hold"),
    ],
)
def test_parameters_that_cannot_be_stored_are_refused(value: float, message: str, tmp_path: Path) -> None:
    gates = trained_like(config())
    assert isinstance(gates, SinkAttentionGates)
    with torch.no_grad():
        gates.q_weight[1, 2, 3] = value
    with pytest.raises(ArtifactError, match=message):
        save_gates(tmp_path / "gates.safetensors", gates, FINGERPRINT, {})
    assert os.listdir(tmp_path) == []


def test_provenance_of_other_types_and_other_file_names_are_refused_when_saving(tmp_path: Path) -> None:
    gates = new_gates(config(), 0)
    for value in (1000, tmp_path):
        with pytest.raises(ArtifactError):
            save_gates(tmp_path / "gates.safetensors", gates, FINGERPRINT, {"tokens": value})  # type: ignore[dict-item]
    with pytest.raises(ArtifactError, match=r"to a \.safetensors file, not to .*gates\.pt"):
        save_gates(tmp_path / "gates.pt", gates, FINGERPRINT, {})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("sixteenth", range(16))
def test_cut_gates_are_refused(sixteenth: int, file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * sixteenth // 16])
    with pytest.raises(ArtifactError, match="not a readable safetensors file"):
        load_gates(file)


def test_missing_gates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="there are no gates at"):
        load_gates(tmp_path / "gates.safetensors")
    with pytest.raises(ArtifactError, match="there are no gates at"):
        load_gates(tmp_path)


def test_changed_bytes_are_found_by_the_digest(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(whole)
    with pytest.raises(ArtifactError, match="digest does not match"):
        load_gates(file)


def test_changed_metadata_are_found_by_the_digest(file: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        text = opened.metadata()["gates"]
    rewrite(file, gates=text.replace("builtin", "another"))
    with pytest.raises(ArtifactError, match="digest does not match"):
        load_gates(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("gates", "", "holds no gates: its metadata lack gates"),
        ("schema_version", "2", "has schema version 2, this version reads 1"),
        ("gates", "{}", "description of the gates is wrong"),
        ("gates", "not JSON", "description of the gates is wrong"),
    ],
)
def test_wrong_metadata_are_refused_by_key(key: str, value: str, message: str, file: Path) -> None:
    rewrite(file, None, **{key: value})
    with pytest.raises(ArtifactError, match=message):
        load_gates(file)


@pytest.mark.parametrize(
    ("field", "old", "new", "message"),
    [
        ("num_layers", "2", "5000000", "num_layers is 5000000, expected 1 to 1024"),
        ("num_layers", "2", "3", r"has shape \[2, .*\], expected \[3, "),
        ("input_features", "24", "25", r"_weight has shape \[2, \d+, 24\], expected \[2, \d+, 25\]"),
        ("kind", '"sink-attention"', '"linear"', r"missing tensors \['weight'\], unknown tensors \['k_norm'"),
        ("kind", '"sink-attention"', '"oracle"', "description of the gates is wrong: Invalid enum value 'oracle'"),
    ],
)
def test_a_sec_01_tensors_that_do_not_fit_the_description_are_refused_by_name(
    field: str, old: str, new: str, message: str, file: Path
) -> None:
    with safe_open(file, framework="pt") as opened:
        text = opened.metadata()["gates"]
    changed = text.replace(f'"{field}":{old}', f'"{field}":{new}')
    assert changed != text
    rewrite(file, gates=changed)
    with pytest.raises(ArtifactError, match=message):
        load_gates(file)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"bias": None}, r"missing tensors \['bias'\], unknown tensors none"),
        ({"extra": torch.zeros(1)}, r"missing tensors none, unknown tensors \['extra'\]"),
        ({"bias": torch.zeros(2, 2, 3, dtype=torch.float16)}, "bias is F16, expected F32"),
        ({"q_weight": torch.zeros(2, 96, 24)}, "q_weight is F32, expected F16 or BF16"),
        ({"sinks": torch.zeros(2, 2, 15, 16)}, re.escape("sinks has shape [2, 2, 15, 16], expected [2, 2, 16, 16]")),
    ],
)
def test_other_tensors_are_refused_by_name(tensors: dict[str, torch.Tensor | None], message: str, file: Path) -> None:
    rewrite(file, tensors)
    with pytest.raises(ArtifactError, match=message):
        load_gates(file)


def test_values_that_are_not_finite_are_refused_even_with_a_matching_digest(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who writes files by hand can also compute their digest."""
    gates = trained_like(config())
    with torch.no_grad():
        next(iter(gates.parameters()))[0, 0, 0] = float("nan")
    with monkeypatch.context() as patch:
        patch.setattr("sglang_kvtc.gates.io._stored", lambda name, value: _unchecked(name, value))
        save_gates(file, gates, FINGERPRINT, {})
    with pytest.raises(ArtifactError, match="q_weight has values that are not finite"):
        load_gates(file)


def _unchecked(name: str, value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(torch.float16 if name.endswith("weight") else torch.float32)


def test_gates_that_fit_are_accepted(file: Path) -> None:
    check_gates_fit(load_gates(file), config().shape, FINGERPRINT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "they have num_layers 2 instead of 3$"),
        ({"input_features": 576}, "they have input_features 24 instead of 576$"),
        ({"num_kv_heads": 1}, "they have num_kv_heads 2 instead of 1$"),
        ({"group_size": 4, "num_layers": 1}, "they have num_layers 2 instead of 1, group_size 3 instead of 4$"),
    ],
)
def test_gates_of_another_geometry_are_refused_by_name(changes: dict[str, int], message: str, file: Path) -> None:
    with pytest.raises(ArtifactError, match=message):
        check_gates_fit(load_gates(file), dataclasses.replace(config().shape, **changes), FINGERPRINT)


def test_gates_of_another_checkpoint_are_refused_by_name(file: Path) -> None:
    other = dataclasses.replace(FINGERPRINT, name="other", digest="f" * 32)
    with pytest.raises(ArtifactError, match=rf"made for toy \({FINGERPRINT.digest}\), the model is other \(f+\)"):
        check_gates_fit(load_gates(file), config().shape, other)
