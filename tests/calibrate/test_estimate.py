"""What `--dry-run` says, against tensors and parameters that really exist."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from calibrate.test_statistics import held_bytes

from sglang_kvtc.artifact.shard import shards_of
from sglang_kvtc.calibrate import estimate as estimates
from sglang_kvtc.calibrate.calibration import calibrate
from sglang_kvtc.calibrate.causal_lm import load_model
from sglang_kvtc.calibrate.collect import Collection
from sglang_kvtc.calibrate.estimate import Estimate, Rates, describe_estimate, estimate, measure_rates
from sglang_kvtc.calibrate.progress import SilentProgress
from sglang_kvtc.calibrate.settings import Calibration
from sglang_kvtc.codec.allocate import Allocator
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import ModelGeometry, Side

RATES = Rates(forward=1e12, gemm=1e11, eigh=1e10, table=1e7, allocator=1e8, trial=1e7)
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "measure_rates", lambda settings: RATES)


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


@pytest.mark.parametrize("changes", [{}, {"pca": "randomized"}, {"tp_size": 4, "pp_size": 2}], ids=str)
def test_planned_statistics_are_the_tensors_that_a_run_allocates(changes: dict[str, object], tiny_llama: Path) -> None:
    settings = dataclasses.replace(Calibration(tiny_llama, num_tokens=500), **changes)
    planned = estimate(settings)
    shards = shards_of(planned.geometry, settings.tp_size, settings.pp_size)
    collection = Collection.empty(
        planned.geometry, shards, pca_rows=planned.pca_rows, seed=0, device=torch.device("cpu")
    )
    found = sum(
        held_bytes(statistics[side].moments) + held_bytes(statistics[side].allocation)
        for statistics in collection.statistics
        for side in Side
    )
    assert planned.statistics_bytes == found


def test_planned_weights_are_those_of_the_model(tiny_llama: Path) -> None:
    model = load_model(tiny_llama, "bfloat16")
    found = sum(parameter.nbytes for parameter in model.parameters())
    assert estimate(Calibration(tiny_llama)).model_bytes == found


def test_planned_artifact_is_that_of_a_plan_that_codes_every_component(tiny_llama: Path) -> None:
    settings = Calibration(tiny_llama, num_tokens=2000, ratios=(2.0,), max_length=128, max_error=1.0)
    artifact = calibrate(settings, SilentProgress())
    size = 0
    for side in Side:
        basis = artifact.basis(side)
        assert basis is not None and basis.weights is not None
        size += sum(tensor.nbytes for tensor in (basis.basis, basis.mean, basis.variances, basis.weights))
        # Columns and variances of components that this plan does not code.
        size += (artifact.geometry.features(side) - len(basis.variances)) * (2 * artifact.geometry.features(side) + 4)
    assert estimate(settings).artifact_bytes == size


def test_planned_allocator_is_the_table_of_choices_that_is_allocated(llama_8b: Path, tiny_llama: Path) -> None:
    tiny, large = (
        stage_bytes(estimate(Calibration(tiny_llama, preset="paper", ratios=(ratio,), window_ratio=0)), "K: plans")
        for ratio in (16.0, 4.0)
    )
    # 128 components of 128 features: four times the budget of 128 bits.
    assert large - tiny == 128 * 3 * 128
    table = estimates.error_table(torch.randn(16, 128).numpy())
    assert Allocator(table, 512)._choices.nbytes - Allocator(table, 128)._choices.nbytes == 128 * 3 * 128


def stage_bytes(planned: Estimate, name: str) -> int:
    (found,) = (stage.peak_bytes for stage in planned.stages if stage.name == name)
    return found


def test_160k_tokens_of_llama_8b_are_planned_from_its_configuration(llama_8b: Path) -> None:
    planned = estimate(Calibration(llama_8b))
    assert planned.geometry == ModelGeometry(32, 8, 128, 128, "bfloat16")
    assert planned.geometry.features(Side.K) == 32_768
    assert planned.pca_rows == 65_536
    # The checkpoint has 8.03e9 parameters, and its bases 328 million each (KVTC table 17).
    assert planned.model_bytes == pytest.approx(2 * 8.03e9, rel=0.001)
    # Basis, mean and variances, and a matrix for each of 256 heads.
    assert planned.artifact_bytes == 2 * (32_768 * 10_000 * 2 + (32_768 + 10_000) * 4 + 256 * 128 * 128 * 4)
    assert planned.statistics_bytes == 2 * 32_768 * (65_536 * 2 + 256 * 4)
    assert planned.peak_bytes == max(stage.peak_bytes for stage in planned.stages) > planned.model_bytes
    passes = next(stage for stage in planned.stages if stage.name == "forward passes")
    # Two FLOP per parameter that is no embedding, and a little attention.
    floor = 160_000 * 2 * (8.03e9 - 2 * 128_256 * 4096) / RATES.forward
    assert floor < passes.seconds < 1.1 * floor
    text = "\n".join(describe_estimate(planned))
    for expected in ("32,768 features of K", "randomized, on 65,536 sampled rows", "at most 1.34 GB"):
        assert expected in text


def test_shards_and_groups_make_the_pca_smaller(llama_8b: Path) -> None:
    whole = estimate(Calibration(llama_8b))
    groups = estimate(Calibration(llama_8b, layers_per_group=2))
    ranks = estimate(Calibration(llama_8b, tp_size=2, pp_size=4))
    assert groups.statistics_bytes == whole.statistics_bytes
    assert groups.seconds < whole.seconds
    assert groups.peak_bytes < whole.peak_bytes
    # 4096 features each: exact covariances.
    assert ranks.pca_rows is None
    assert ranks.ranks == 8
    assert ranks.statistics_bytes == 16 * 4096 * (8 * 4096 + 8 + 4 * 2048 + 4 * 256)


def test_time_grows_with_tokens_and_plans(llama_8b: Path) -> None:
    paper = Calibration(llama_8b, preset="paper")
    base = estimate(paper).seconds
    assert estimate(dataclasses.replace(paper, num_tokens=320_000)).seconds > base
    assert estimate(dataclasses.replace(paper, ratios=(16.0, 32.0))).seconds > base
    assert estimate(dataclasses.replace(paper, split="optimal")).seconds > base
    assert estimate(dataclasses.replace(paper, target_errors=(0.1,))).seconds > base
    default = estimate(Calibration(llama_8b))
    assert "sensitivity" in {stage.name for stage in default.stages}
    more_plans = estimate(Calibration(llama_8b, ratios=(16.0, 32.0, 64.0)))
    assert seconds_of(more_plans, "K: plans") == pytest.approx(2 * seconds_of(default, "K: plans"))
    # 16 trials for each of 2 plans, on 256 tokens.
    assert seconds_of(default, "K: plans") == pytest.approx(16 * 2 * 256 * 10_000 / RATES.trial)


def seconds_of(planned: Estimate, name: str) -> float:
    (found,) = (stage.seconds for stage in planned.stages if stage.name == name)
    return found


def test_rates_are_measured() -> None:
    rates = measure_rates(Calibration(Path()))
    assert all(value > 0 for value in dataclasses.astuple(rates))


def test_a_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        estimate(Calibration(tmp_path))


@pytest.mark.parametrize("changes", [{"ratios": (1.0,)}, {"merge": (Path("a"),)}], ids=str)
def test_what_runs_no_model_over_text_is_not_planned(changes: dict[str, object], tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="--dry-run plans passes over text"):
        estimate(dataclasses.replace(Calibration(tiny_llama), **changes))
