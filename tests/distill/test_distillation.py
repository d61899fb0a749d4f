"""`sglang-kvtc train-gates` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.cli.main import main
from sglang_kvtc.gates.io import load_gates
from sglang_kvtc.gates.model import GateInput, GateKind

SIZES = ["--tokens", "3000", "--longest", "200", "--steps", "40", "--batch-tokens", "200"]


def command(model_dir: Path, out: Path, *more: str) -> list[str]:
    return ["train-gates", "--model", str(model_dir), "--out", str(out), *SIZES, *more]


def test_gates_are_trained_saved_and_drawn(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gates.safetensors"
    assert main(command(tiny_llama, out)) == 0
    file = load_gates(out)
    assert file.fingerprint == fingerprint_model(tiny_llama)
    config = file.gates.config
    assert (config.num_layers, config.input_features, config.num_kv_heads, config.group_size) == (2, 64, 2, 2)
    losses = json.loads(file.provenance["held_out_loss"])
    assert all(last < first for first, last in zip(losses["first"], losses["last"], strict=True))
    assert file.provenance["corpus"] == "builtin"
    assert float(file.provenance["teacher_s"]) > 0
    captured = capsys.readouterr()
    assert "held-out loss fell in 2 of 2 layers" in captured.out
    assert any(line.startswith("teacher: 3,") for line in captured.err.split("\n"))
    assert "training: 40 steps" in captured.err
    # The activations are gone, the picture is there.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gates.png", "gates.safetensors"]


def test_the_seed_decides_every_byte_of_the_weights(tiny_llama: Path, tmp_path: Path) -> None:
    files = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert main(command(tiny_llama, tmp_path / f"{name}.safetensors", "--seed", seed)) == 0
        files.append(load_gates(tmp_path / f"{name}.safetensors").gates.state_dict())
    one, same, other = files
    assert all((one[name] == same[name]).all() for name in one)
    assert not all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize(
    ("flags", "kind", "source"),
    [
        (["--kind", "linear"], GateKind.LINEAR, GateInput.HIDDEN),
        (["--kind", "mlp", "--target", "next-token"], GateKind.MLP, GateInput.HIDDEN),
        (["--input", "keys-before-rope", "--sinks", "0"], GateKind.SINK_ATTENTION, GateInput.KEYS_BEFORE_ROPE),
    ],
    ids=["linear", "mlp", "keys"],
)
def test_the_ablations_are_trained_by_flags(
    tiny_llama: Path, tmp_path: Path, flags: list[str], kind: GateKind, source: GateInput
) -> None:
    out = tmp_path / "gates.safetensors"
    assert main(command(tiny_llama, out, *flags)) == 0
    config = load_gates(out).gates.config
    assert (config.kind, config.input) == (kind, source)


def test_a_kept_work_folder_is_used_again_and_never_for_other_text(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work, out = tmp_path / "work", tmp_path / "gates.safetensors"
    assert main(command(tiny_llama, out, "--work-dir", str(work))) == 0
    before = load_gates(out).gates.state_dict()
    capsys.readouterr()
    assert main(command(tiny_llama, out, "--work-dir", str(work))) == 0
    assert "teacher: 0 tokens" in capsys.readouterr().err
    after = load_gates(out).gates.state_dict()
    assert all((before[name] == after[name]).all() for name in before)
    assert main(command(tiny_llama, out, "--work-dir", str(work), "--seed", "3")) == 1
    assert "holds the activations of another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--tokens", "0"], "--tokens"),
        (["--dtype", "int8"], "--dtype"),
        (["--steps", "0"], "--steps"),
        (["--batch-tokens", "100000"], "--tokens"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    assert main(command(tiny_llama, tmp_path / "gates.safetensors", *flags)) == 1
    assert named in capsys.readouterr().err


def test_another_file_name_is_refused(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tiny_llama, tmp_path / "gates.pt")) == 1
    assert ".safetensors" in capsys.readouterr().err
