from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from calibrate.tiny_llama import save_tiny_llama
from gates.plain_gates import config, trained_like
from gates.published import layers_of, write

from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.cli import import_gates
from sglang_kvtc.errors import ArtifactError, ConfigError
from sglang_kvtc.gates.io import check_gates_fit, load_gates
from sglang_kvtc.gates.model import GateConfig

OF_THE_MODEL = {"num_layers": 2, "input_features": 64, "num_kv_heads": 2, "group_size": 2}


def convert(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    import_gates.add_arguments(parser)
    return import_gates.run(parser.parse_args([str(argument) for argument in arguments]))


def published(path: Path, **changes: int) -> tuple[Path, GateConfig]:
    made = config(**{**OF_THE_MODEL, **changes})
    return write(path, layers_of(trained_like(made), torch.bfloat16)), made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


def test_published_gates_become_a_gate_file_of_the_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, made = published(tmp_path / "q2_dim16_sink16.pt")
    out = tmp_path / "gates.safetensors"
    assert convert(checkpoint, "--model", model, "--out", out) == 0
    written = load_gates(out)
    assert written.gates.config == made
    fingerprint = fingerprint_model(model)
    check_gates_fit(written, made.shape, fingerprint)
    assert written.provenance["source"] == "q2_dim16_sink16.pt"
    text = capsys.readouterr().out
    assert "2 layers for 2 KV heads of 2 query heads, 64 features in, 16 channels, 16 sinks" in text
    assert fingerprint.digest in text
    assert written.digest.hex() in text
    # Nothing of a checkpoint in bfloat16 is lost.
    source = torch.load(checkpoint, weights_only=True)["module"]  # noqa: TID251 - written above
    for layer, published_layer in enumerate(source):
        found = dict(written.gates.named_parameters())
        torch.testing.assert_close(
            found["q_weight"][layer], published_layer["q_proj.weight"].float(), rtol=0, atol=3e-8
        )
        assert torch.equal(found["sinks"][layer], published_layer["k_base"][:, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "num_layers 3 instead of 2"),
        ({"input_features": 32}, "input_features 32 instead of 64"),
        ({"group_size": 1}, "group_size 1 instead of 2"),
        ({"num_kv_heads": 1}, "num_kv_heads 1 instead of 2"),
    ],
)
def test_gates_of_another_model_are_refused_by_name_and_nothing_is_written(
    changes: dict[str, int], message: str, model: Path, tmp_path: Path
) -> None:
    checkpoint, _ = published(tmp_path / "gates.pt", **changes)
    with pytest.raises(ArtifactError, match=message):
        convert(checkpoint, "--model", model, "--out", tmp_path / "gates.safetensors")
    assert not (tmp_path / "gates.safetensors").exists()


def test_what_is_no_model_or_no_checkpoint_is_refused(model: Path, tmp_path: Path) -> None:
    checkpoint, _ = published(tmp_path / "gates.pt")
    with pytest.raises(ConfigError, match="no Hugging Face model directory"):
        convert(checkpoint, "--model", tmp_path, "--out", tmp_path / "gates.safetensors")
    with pytest.raises(ArtifactError, match="there is no checkpoint at"):
        convert(tmp_path / "none.pt", "--model", model, "--out", tmp_path / "gates.safetensors")
