"""`sglang-kvtc bench gates` on a tiny model: every method, and what the rows say."""

import argparse
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrate.tiny_llama import save_tiny_llama

from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.benchmarks import eviction_cases
from sglang_kvtc.benchmarks.registry import load
from sglang_kvtc.benchmarks.routines import gates as routine
from sglang_kvtc.errors import ArtifactError, ConfigError, KVTCError, UnsupportedError
from sglang_kvtc.gates.io import save_gates
from sglang_kvtc.gates.model import GateConfig, GateInput, GateKind, new_gates

Row = dict[str, Any]
SMALL = ("--documents", "2", "--contexts", "2", "--prefix-tokens", "120", "--suffix-tokens", "16", "--window", "24")
CONFIG = GateConfig(
    GateKind.SINK_ATTENTION, GateInput.HIDDEN, num_layers=2, input_features=64, num_kv_heads=2, group_size=2
)


def run(*arguments: str) -> list[Row]:
    module = load("gates")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args(arguments))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="module")
def gate_file(model_dir: Path) -> Path:
    return write_gates(model_dir, model_dir.parent / "gates.safetensors", CONFIG)


def write_gates(model_dir: Path, path: Path, config: GateConfig) -> Path:
    save_gates(path, new_gates(config, seed=0), fingerprint_model(model_dir), {})
    return path


def test_rows_hold_every_method_share_and_window(model_dir: Path, gate_file: Path) -> None:
    rows = run("--model", str(model_dir), "--gates", str(gate_file), "--keep", "0.6,0.3", *SMALL)
    *rows, full = rows
    assert full["method"] == "full cache"
    assert (full["kl"], full["dnll"], full["top1"], full["kept"]) == (0, 0, 1, 1)

    windowed = {(row["method"], row["window"], row["retrieval_window"]) for row in rows if "window" in row}
    assert windowed == {
        ("random", 24, 8),
        *((method, *windows) for method in ("teacher", "gates") for windows in ((24, 8), (0, 0), (20, 20))),
    }
    assert {row["method"] for row in rows} == set(routine.SCOPES)
    assert len(rows) == 2 * (len(routine.SCOPES) + 4)
    teachers = {(row["keep"], row["window"]): row["kl"] for row in rows if row["method"] == "teacher"}
    for row in rows:
        # Whole pairs are kept: of the context, of a layer with 240, or of a head with 120.
        assert row["keep"] - 1 / 120 < row["kept"] <= row["keep"]
        assert row["kl"] > 0 and row["kl_se"] > 0
        assert row["kl_over_teacher"] == pytest.approx(row["kl"] / teachers[row["keep"], row.get("window", 24)])
        assert row["retrieval_total"] == 10
        assert 0 <= row["retrieval_correct"] <= 10


def test_everything_kept_changes_nothing_in_any_method(model_dir: Path, gate_file: Path) -> None:
    for row in run("--model", str(model_dir), "--gates", str(gate_file), "--keep", "1", *SMALL):
        assert (row["kl"], row["top1"], row["kept"]) == (0, 1, 1)
        assert "kl_over_teacher" not in row


@pytest.mark.parametrize("source", [GateInput.KEYS, GateInput.KEYS_BEFORE_ROPE])
def test_gates_are_fed_what_they_were_trained_on(model_dir: Path, tmp_path: Path, source: GateInput) -> None:
    config = dataclasses.replace(CONFIG, kind=GateKind.LINEAR, input=source)
    path = write_gates(model_dir, tmp_path / "gates.safetensors", config)
    arguments = ("--model", str(model_dir), "--gates", str(path), "--methods", "gates", "--keep", "0.5", *SMALL)
    kl = [row["kl"] for row in run(*arguments)]
    other = [row["kl"] for row in run("--model", str(model_dir), "--methods", "random", "--keep", "0.5", *SMALL)]
    assert kl[0] > 0
    assert kl[0] != other[0]


def test_attention_that_differs_from_the_models_own_fails(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_the_first_token(context: Any) -> torch.Tensor:
        kept = torch.ones(context.keys.shape[:3], dtype=torch.bool)
        kept[:, 0] = False
        return kept

    monkeypatch.setattr(eviction_cases, "all_kept", forgets_the_first_token)
    with pytest.raises(KVTCError, match="our attention and the model's own differ by a KL of"):
        run("--model", str(model_dir), "--methods", "random", *SMALL)


def test_methods_and_gates_are_checked_before_anything_runs(model_dir: Path, gate_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--methods snap: expected some of teacher, gates, snapkv"):
        run("--model", str(model_dir), "--methods", "random,snap")
    with pytest.raises(ConfigError, match="--suffix-tokens 1: expected at least 2"):
        run("--model", str(model_dir), "--methods", "random", "--suffix-tokens", "1")
    with pytest.raises(ConfigError, match="--model needs gates of its own"):
        run("--model", str(model_dir), "--methods", "gates")
    other = save_tiny_llama(tmp_path / "other", seed=1)
    with pytest.raises(ArtifactError, match="the gates were made for"):
        run("--model", str(other), "--gates", str(gate_file), "--methods", "gates")
    narrow = write_gates(model_dir, tmp_path / "narrow.safetensors", dataclasses.replace(CONFIG, input_features=32))
    with pytest.raises(ArtifactError, match="input_features 32 instead of 64"):
        run("--model", str(model_dir), "--gates", str(narrow), "--methods", "gates")


@pytest.mark.skipif(importlib.util.find_spec("kvpress") is not None, reason="kvpress is installed")
def test_kvpress_that_is_missing_is_asked_for(model_dir: Path, gate_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"kvpress cannot be imported .*pip install --no-deps kvpress==0\.5\.5"):
        run("--model", str(model_dir), "--gates", str(gate_file), "--kvpress", *SMALL)


@pytest.mark.filterwarnings("ignore")
def test_kvpress_evicts_what_we_evict(model_dir: Path, gate_file: Path, tmp_path: Path) -> None:
    """Its own scorers, its own cache and its own masking, against ours."""
    pytest.importorskip("kvpress", reason="kvpress is not installed")
    rows = run("--model", str(model_dir), "--gates", str(gate_file), "--keep", "0.6", "--kvpress", *SMALL)
    ours = {row["method"]: row["kl"] for row in reversed(rows) if row.get("window", 0) == 0}
    theirs = {row["method"].split(" ", 2)[2]: row["kl"] for row in rows if row["method"].startswith("kvpress ")}
    pairs = {
        "KVzip": "teacher",
        "SnapKV": "snapkv",
        "StreamingLLM": "streaming-llm",
        "AdaKV, expected attention": "expected-attention",
        "KeyDiff": "key-difference",
        "Knorm": "key-norm",
    }
    assert {name: theirs[name] for name in pairs} == pytest.approx(
        {name: ours[our] for name, our in pairs.items()}, 1e-3
    )
    # It has a window of its own, 2 percent of the context.
    assert theirs["FastKVzip, our gates"] == pytest.approx(ours["gates"], rel=0.3)

    linear = write_gates(model_dir, tmp_path / "linear.safetensors", dataclasses.replace(CONFIG, kind=GateKind.LINEAR))
    with pytest.raises(UnsupportedError, match="its gates are sink attention in the released form"):
        run("--model", str(model_dir), "--gates", str(linear), "--kvpress", *SMALL)
