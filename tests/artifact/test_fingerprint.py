from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from sglang_kvtc.artifact.fingerprint import SAMPLE_BYTES, fingerprint_model
from sglang_kvtc.errors import ArtifactError, UnsupportedError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 64,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "rope_parameters": {"rope_theta": 100000, "rope_type": "default"},
    "torch_dtype": "bfloat16",
}


def checkpoint(directory: Path, config: dict[str, Any] | None = None, seed: int = 0, rows: int = 64) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config), encoding="utf-8")
    rng = np.random.default_rng(seed)
    for shard in range(2):
        weight = rng.standard_normal((rows, 32)).astype(np.float32)
        save_file({f"layer.{shard}.weight": weight}, directory / f"model-{shard}.safetensors")
    return directory


def changed(directory: Path, **change: object) -> str:
    return fingerprint_model(checkpoint(directory, {**CONFIG, **change})).digest


def test_the_same_checkpoint_has_the_same_fingerprint_wherever_it_lies(tmp_path: Path) -> None:
    first, second = (fingerprint_model(checkpoint(tmp_path / name)) for name in ("first", "second"))
    assert first.architecture == "LlamaForCausalLM"
    assert (first.name, second.name) == ("first", "second")
    assert first.digest == second.digest
    assert len(bytes.fromhex(first.digest)) == 16


def test_a_checkpoint_is_called_what_it_calls_itself(tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "snapshot", {**CONFIG, "_name_or_path": "org/model"})
    assert fingerprint_model(made).name == "org/model"


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 31},
        {"hidden_size": 577},
        {"head_dim": 32},
        {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
        {"architectures": ["MistralForCausalLM"]},
        {"vocab_size": 1},
    ],
)
def test_the_digest_changes_with_the_shape_of_the_kv_cache(change: dict[str, object], tmp_path: Path) -> None:
    assert changed(tmp_path / "a", **change) != changed(tmp_path / "b")


def test_the_digest_does_not_change_with_fields_that_leave_the_kv_cache_alone(tmp_path: Path) -> None:
    assert changed(tmp_path / "a", transformers_version="9", torch_dtype="float16") == changed(tmp_path / "b")


def test_the_digest_changes_with_other_weights_of_the_same_shape(tmp_path: Path) -> None:
    first, second = (fingerprint_model(checkpoint(tmp_path / str(seed), seed=seed)) for seed in range(2))
    assert first.digest != second.digest


@pytest.mark.parametrize("place", ["start", "end"])
def test_the_digest_covers_both_ends_of_a_large_shard(place: str, tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "model", rows=(3 * SAMPLE_BYTES) // 128)
    before = fingerprint_model(made).digest
    shard = made / "model-1.safetensors"
    content = bytearray(shard.read_bytes())
    header_bytes = int.from_bytes(content[:8], "little")
    content[8 + header_bytes if place == "start" else -1] ^= 1
    shard.write_bytes(content)
    assert fingerprint_model(made).digest != before


@pytest.mark.parametrize("file", ["model-0.safetensors", "model-1.safetensors"])
def test_the_digest_changes_with_a_missing_or_renamed_shard(file: str, tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "model")
    whole = fingerprint_model(made).digest
    (made / file).rename(made / f"other-{file}")
    renamed = fingerprint_model(made).digest
    (made / f"other-{file}").unlink()
    assert len({whole, renamed, fingerprint_model(made).digest}) == 3


def test_a_directory_without_config_or_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"there is no .*config\.json"):
        fingerprint_model(tmp_path / "nothing")
    made = checkpoint(tmp_path / "model")
    for shard in made.glob("*.safetensors"):
        shard.rename(shard.with_suffix(".bin"))
    with pytest.raises(ArtifactError, match=r"has no \*\.safetensors files"):
        fingerprint_model(made)


@pytest.mark.parametrize("text", ["", "{", "[]", '"text"', "\xff"])
def test_a_config_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "model")
    (made / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ArtifactError, match=r"config\.json (is not JSON|holds a)"):
        fingerprint_model(made)


@pytest.mark.parametrize("architectures", [None, [], "Llama", [3]])
def test_a_config_without_architecture_is_refused(architectures: object, tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "model", {**CONFIG, "architectures": architectures})
    with pytest.raises(UnsupportedError, match="names no architecture"):
        fingerprint_model(made)


@pytest.mark.parametrize("content", [b"", b"\x05", b"\xff" * 8 + b"{}"])
def test_a_damaged_shard_is_refused_without_reading_what_it_claims(content: bytes, tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "model")
    (made / "model-1.safetensors").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"model-1\.safetensors is damaged"):
        fingerprint_model(made)
