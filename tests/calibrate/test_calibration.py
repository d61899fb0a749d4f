"""The whole calibration on a tiny model: what the artifact holds, and when it is refused."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from calibrate.tiny_llama import save_tiny_llama

from sglang_kvtc.artifact.io import FILE_NAME, load_artifact, save_artifact
from sglang_kvtc.artifact.schema import Artifact
from sglang_kvtc.artifact.shard import SHARD_KEY, shard_of
from sglang_kvtc.calibrate import calibration, collect
from sglang_kvtc.calibrate.calibration import cached_calibration, calibrate, calibrate_shards
from sglang_kvtc.calibrate.plans import budget_bits
from sglang_kvtc.calibrate.progress import SilentProgress
from sglang_kvtc.calibrate.settings import Calibration
from sglang_kvtc.errors import ArtifactError, ConfigError
from sglang_kvtc.types import Side

TOKENS = 3000


def settings(model_dir: Path, **changes: object) -> Calibration:
    defaults = Calibration(model_dir, "paper", num_tokens=TOKENS, ratios=(2.0, 4.0, 8.0), max_length=128, max_error=1.0)
    return dataclasses.replace(defaults, **changes)


@pytest.fixture(scope="module")
def artifact(tiny_llama: Path) -> Artifact:
    return calibrate(settings(tiny_llama), SilentProgress())


def test_one_basis_serves_a_plan_per_ratio_and_each_fits_its_budget(artifact: Artifact) -> None:
    assert [plan.target_ratio for plan in artifact.plans] == [2, 4, 8]
    for side in Side:
        basis = artifact.basis(side)
        assert basis is not None
        for plan in artifact.plans:
            bits = plan.side(side).bits_per_token
            assert 0 < bits <= budget_bits(artifact.geometry.features(side), plan.target_ratio)


def test_basis_ends_at_the_last_component_that_a_plan_codes(artifact: Artifact) -> None:
    for side in Side:
        basis = artifact.basis(side)
        assert basis is not None
        last = max(int(plan.side(side).columns[-1]) for plan in artifact.plans)
        assert basis.basis.shape == (artifact.geometry.features(side), last + 1)
        assert basis.variances.shape == (last + 1,)


def test_paper_preset_leaves_the_features_unweighted(artifact: Artifact) -> None:
    assert artifact.provenance["preset"] == "paper"
    for side in Side:
        basis = artifact.basis(side)
        assert basis is not None
        assert basis.weights is None


def test_default_preset_weighs_features_and_has_uniform_plans_of_one_step(tiny_llama: Path) -> None:
    artifact = calibrate(settings(tiny_llama, preset=Calibration(tiny_llama).preset), SilentProgress())
    assert artifact.provenance["preset"] == "sensitivity"
    assert "Fisher information on 20 sequences" in artifact.provenance["sensitivity"]
    geometry = artifact.geometry
    for plan in artifact.plans:
        bits = sum(plan.side(side).planned_bits for side in Side)
        total = sum(budget_bits(geometry.features(side), plan.target_ratio) for side in Side)
        assert 0.99 * total < bits <= total
        assert plan.k.step == plan.v.step > 0
    for side in Side:
        basis = artifact.basis(side)
        assert basis is not None and basis.weights is not None
        assert basis.weights.shape == (2, 2, 32, 32)


def test_smaller_budgets_lose_more_both_in_prediction_and_on_held_out_text(artifact: Artifact) -> None:
    measured = json.loads(artifact.provenance["held_out_error"])
    assert [error["target_ratio"] for error in measured] == [2, 4, 8]
    for side in Side:
        predicted = [plan.side(side).predicted_error for plan in artifact.plans]
        assert predicted == sorted(predicted)
        assert predicted[0] > 0
        found = [error[side.name.lower()] for error in measured]
        assert found == sorted(found)
        assert 0 < found[0] < found[-1] < 1
    assert [error["ratio"] for error in measured] == sorted(error["ratio"] for error in measured)


def test_provenance_says_what_the_artifact_was_made_from(artifact: Artifact) -> None:
    expected = {"corpus": "builtin", "tokens": str(TOKENS), "seed": "0", "dtype": "bfloat16", "pca": "exact"}
    assert expected.items() <= artifact.provenance.items()
    assert artifact.fingerprint.architecture == "LlamaForCausalLM"


def test_same_seed_gives_the_same_digest_and_another_seed_another(
    artifact: Artifact, tiny_llama: Path, tmp_path: Path
) -> None:
    digest = save_artifact(artifact, tmp_path / "first").digest
    again = calibrate(settings(tiny_llama), SilentProgress())
    assert save_artifact(again, tmp_path / "second").digest == digest
    other = calibrate(settings(tiny_llama, seed=1), SilentProgress())
    assert save_artifact(other, tmp_path / "third").digest != digest


def test_randomized_pca_respects_the_rank_cap(tiny_llama: Path) -> None:
    artifact = calibrate(settings(tiny_llama, pca="randomized", rank=16, ratios=(2.0,)), SilentProgress())
    for side in Side:
        basis = artifact.basis(side)
        assert basis is not None
        assert basis.basis.shape[1] == 16
    assert artifact.provenance["pca"].startswith("randomized")


def test_randomized_pca_gives_about_the_error_of_the_exact_one(artifact: Artifact, tiny_llama: Path) -> None:
    randomized = calibrate(settings(tiny_llama, pca="randomized"), SilentProgress())
    for exact_plan, plan in zip(artifact.plans, randomized.plans, strict=True):
        for side in Side:
            # Both are fitted to the same rows; a basis within one per cent of the best is what Halko et al. promise
            # for 8 iterations (1 + 9 sqrt(p)) ** (2 / 17) - 1 at worst, far less on a falling spectrum.
            limit = (1 + 9 * artifact.geometry.features(side) ** 0.5) ** (2 / 17)
            assert plan.side(side).predicted_error <= exact_plan.side(side).predicted_error * limit


def test_lossless_artifact_is_written_without_running_the_model(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "load_model", lambda *args: pytest.fail("the model was loaded"))
    artifact = calibrate(settings(tiny_llama, ratios=(1.0,)), SilentProgress())
    assert artifact.k is None
    assert artifact.v is None
    assert load_artifact(save_artifact_path(artifact, tmp_path)).plans == ()


def save_artifact_path(artifact: Artifact, directory: Path) -> Path:
    save_artifact(artifact, directory)
    return directory


@pytest.mark.parametrize("key_outlier", [1.0, 30.0])
def test_a_num_09_errors_are_given_by_layer_and_a_ratio_beyond_the_bound_is_refused(
    tmp_path: Path, key_outlier: float
) -> None:
    model_dir = save_tiny_llama(tmp_path, key_outlier=key_outlier)
    artifact = calibrate(settings(model_dir), SilentProgress())
    measured = json.loads(artifact.provenance["held_out_error"])
    for error in measured:
        assert len(error["k_layers"]) == len(error["v_layers"]) == artifact.geometry.num_layers
    worst = max(measured[-1]["k"], measured[-1]["v"])
    with pytest.raises(ArtifactError, match=r"ratio 8 loses .* more than --max-error"):
        calibrate(settings(model_dir, max_error=worst * 0.999), SilentProgress())
    assert calibrate(settings(model_dir, max_error=worst * 1.001), SilentProgress()).plans == artifact.plans


def test_a_num_09_a_ratio_beyond_the_bound_can_be_forced_and_says_so(
    tiny_llama: Path, artifact: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    worst = {ratio: max(error["k"], error["v"]) for ratio, error in zip((2, 4, 8), held_out(artifact), strict=True)}
    bound = (worst[4] + worst[8]) / 2
    forced = calibrate(settings(tiny_llama, max_error=bound, force=True), SilentProgress())
    assert forced.plans == artifact.plans
    assert f"ratio 8 loses {worst[8]:.3f}" in forced.provenance["forced"]
    assert "ratio 4" not in forced.provenance["forced"]
    assert "written because of --force" in caplog.text
    assert "forced" not in artifact.provenance


def held_out(artifact: Artifact) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads(artifact.provenance["held_out_error"])
    return found


def test_held_out_ratios_lie_between_those_of_single_sequences(artifact: Artifact) -> None:
    for error in json.loads(artifact.provenance["held_out_error"]):
        low, high = error["ratio_range"]
        assert low <= error["ratio"] <= high
        assert low < high


def test_provenance_names_the_domains_of_the_text(artifact: Artifact) -> None:
    domains = json.loads(artifact.provenance["domains"])
    assert {domain["name"] for domain in domains} == {"builtin prose", "builtin code"}
    assert sum(domain["tokens"] for domain in domains) == TOKENS
    assert sum(domain["documents"] for domain in domains) == int(artifact.provenance["documents"])


def test_k_and_v_may_have_ratios_of_their_own(tiny_llama: Path) -> None:
    found = calibrate(settings(tiny_llama, k_ratios=(8.0, 2.0), v_ratios=(2.0, 4.0)), SilentProgress())
    features = found.geometry.features(Side.K)
    for plan, (k_ratio, v_ratio) in zip(found.plans, ((8, 2), (2, 4)), strict=True):
        assert plan.target_ratio == pytest.approx(2 / (1 / k_ratio + 1 / v_ratio))
        assert plan.k.bits_per_token <= budget_bits(features, k_ratio)
        assert plan.v.bits_per_token <= budget_bits(features, v_ratio)
    assert found.provenance["split"] == "8:2 2:4"


def test_pairs_of_ratios_that_are_one_ratio_in_all_are_refused_before_the_model_runs(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "load_model", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=r"--k-ratio 2 with --v-ratio 8 is ratio 3\.2 in all"):
        calibrate(settings(tiny_llama, k_ratios=(8.0, 2.0), v_ratios=(2.0, 8.0)), SilentProgress())


def test_the_best_split_predicts_no_more_error_than_equal_ratios(artifact: Artifact, tiny_llama: Path) -> None:
    found = calibrate(settings(tiny_llama, split="optimal"), SilentProgress())
    for plan, fixed in zip(found.plans, artifact.plans, strict=True):
        assert plan.target_ratio == fixed.target_ratio
        assert plan.k.predicted_error + plan.v.predicted_error <= fixed.k.predicted_error + fixed.v.predicted_error
    assert found.provenance["split"] == "optimal"


def test_the_largest_ratio_within_an_error_becomes_the_plans_name(tiny_llama: Path, tmp_path: Path) -> None:
    found = calibrate(settings(tiny_llama, target_errors=(0.1, 0.02)), SilentProgress())
    loose, tight = found.plans
    assert loose.target_ratio > tight.target_ratio > 1
    for plan, error in ((loose, 0.1), (tight, 0.02)):
        assert max(plan.k.predicted_error, plan.v.predicted_error) <= error
    assert load_artifact(save_artifact_path(found, tmp_path)).plans == found.plans


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ratios": (16.0,)}, [16, 4]),
        ({"ratios": (16.0,), "split": "optimal"}, [16, 4]),
        ({"ratios": (16.0, 3.0)}, [16, 3]),
        ({"ratios": (16.0,), "window_ratio": 0.0}, [16]),
        ({"k_ratios": (8.0,), "v_ratios": (2.0,)}, [3.2]),
        ({"k_ratios": (8.0,), "v_ratios": (4.0,)}, [16 / 3, 4]),
    ],
    ids=str,
)
def test_windows_get_a_plan_unless_another_is_as_fine(
    tiny_llama: Path, changes: dict[str, object], expected: list[float]
) -> None:
    found = calibrate(settings(tiny_llama, **{"window_ratio": 4.0} | changes), SilentProgress())
    assert [plan.target_ratio for plan in found.plans] == pytest.approx(expected)
    assert len(held_out(found)) == len(expected)


def test_plans_within_an_error_get_one_for_windows_too(tiny_llama: Path) -> None:
    alone = calibrate(settings(tiny_llama, target_errors=(0.1,), window_ratio=0.0), SilentProgress()).plans
    finer = settings(tiny_llama, target_errors=(0.1,), window_ratio=alone[0].target_ratio / 2)
    assert [plan.target_ratio for plan in calibrate(finer, SilentProgress()).plans] == [
        alone[0].target_ratio,
        alone[0].target_ratio / 2,
    ]
    coarser = settings(tiny_llama, target_errors=(0.1,), window_ratio=alone[0].target_ratio)
    assert calibrate(coarser, SilentProgress()).plans == alone


def test_a_window_ratio_that_compresses_nothing_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="--window-ratio 1: expected"):
        settings(tiny_llama, window_ratio=1.0)


def test_layers_per_group_makes_a_block_diagonal_basis(artifact: Artifact, tiny_llama: Path) -> None:
    found = calibrate(settings(tiny_llama, layers_per_group=1), SilentProgress())
    assert found.provenance["layers_per_group"] == "1"
    whole = calibrate(settings(tiny_llama, layers_per_group=2), SilentProgress())
    for side in Side:
        basis, plain, grouped = found.basis(side), artifact.basis(side), whole.basis(side)
        assert basis is not None
        assert plain is not None
        assert grouped is not None
        first, second = np.split(basis.basis, 2)
        assert not ((first != 0).any(axis=0) & (second != 0).any(axis=0)).any()
        np.testing.assert_array_equal(grouped.basis, plain.basis)


def test_a_rank_06_ranks_get_artifacts_of_their_parts_from_one_pass_over_the_text(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    prefill = collect.prefill
    monkeypatch.setattr(collect, "prefill", lambda *args: (lengths.append(len(args[1])), prefill(*args))[1])
    found = calibrate_shards(settings(tiny_llama, tp_size=4, pp_size=2), SilentProgress())
    assert sum(lengths) == TOKENS
    assert len(found) == 8
    for number, artifact in enumerate(found):
        shard = shard_of(load_artifact(save_artifact_path(artifact, tmp_path / str(number))).provenance)
        assert shard is not None
        assert (shard.pp_rank, shard.tp_rank) == divmod(number, 4)
        # One of two layers, and one of two KV heads, each on two ranks.
        assert shard.layers == (shard.pp_rank, shard.pp_rank + 1)
        assert shard.kv_heads == (shard.tp_rank // 2, shard.tp_rank // 2 + 1)
        assert (artifact.geometry.num_layers, artifact.geometry.num_kv_heads) == (1, 1)
        assert len(json.loads(artifact.provenance["held_out_error"])[0]["k_layers"]) == 1
    assert found[0].k is found[1].k
    assert found[0].k is not found[2].k


def test_the_artifact_of_one_rank_knows_nothing_of_shards(artifact: Artifact, tiny_llama: Path) -> None:
    assert SHARD_KEY not in artifact.provenance
    with pytest.raises(ConfigError, match="--tp 2 --pp 1: one artifact is for one rank"):
        calibrate(settings(tiny_llama, tp_size=2), SilentProgress())


def test_data_without_a_held_out_part_is_checked_on_builtin_text(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("All work and no play makes Jack a dull boy.\n" * 200)
    artifact = calibrate(settings(tiny_llama, data=(str(tmp_path / "one.txt"),)), SilentProgress())
    assert artifact.provenance["held_out_corpus"] == "builtin"
    assert artifact.provenance["corpus"] == str(tmp_path / "one.txt")


def test_data_with_too_little_text_says_how_much_it_yields(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("x" * 1000)
    with pytest.raises(ConfigError, match=r"yields 1,000 tokens beside its held-out part, --tokens asks for 3,000"):
        calibrate(settings(tiny_llama, data=(str(tmp_path / "one.txt"),)), SilentProgress())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratios": ()}, "--ratio"),
        ({"ratios": (16.0, 16.0)}, "--ratio 16,16"),
        ({"ratios": (0.5,)}, "--ratio 0.5"),
        ({"ratios": (float("nan"),)}, "--ratio nan"),
        ({"ratios": (1.0, 16.0)}, "--ratio 1 is lossless"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"device": "gpu"}, "--device gpu"),
        ({"device": "xpu"}, "--device xpu: torch finds no such device"),
        ({"num_tokens": 0}, "--tokens 0"),
        ({"max_length": 8}, "--max-length 8"),
        ({"rank": -1}, "--rank -1"),
        ({"max_error": 0.0}, "--max-error"),
        ({"layers_per_group": -1}, "--layers-per-group -1"),
        ({"save_every": 0}, "--save-every 0"),
        ({"k_ratios": (8.0,)}, "--k-ratio 8 and --v-ratio : expected as many"),
        ({"k_ratios": (8.0,), "v_ratios": (0.0,)}, "--v-ratio 0"),
        ({"target_errors": (1.0,)}, "--target-error 1"),
        ({"target_errors": (0.1,), "k_ratios": (8.0,), "v_ratios": (8.0,)}, "--target-error finds"),
        ({"target_errors": (0.1,), "split": "optimal"}, "--split optimal"),
        ({"merge": (Path("a"),), "work_dir": Path("b")}, "--merge"),
    ],
)
def test_unusable_settings_are_refused_by_flag(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(Path(), **changes)


def test_cached_calibration_runs_once_per_settings_and_repairs_damage(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Calibration] = []

    def counted(wanted: Calibration, progress: SilentProgress) -> Artifact:
        runs.append(wanted)
        return calibrate(wanted, progress)

    monkeypatch.setattr(calibration, "calibrate", counted)
    wanted = settings(tiny_llama)
    path = cached_calibration(wanted, tmp_path, SilentProgress())
    digest = load_artifact(path).digest
    assert cached_calibration(wanted, tmp_path, SilentProgress()) == path
    assert len(runs) == 1

    assert cached_calibration(settings(tiny_llama, ratios=(2.0,)), tmp_path, SilentProgress()) != path
    assert len(runs) == 2

    content = bytearray((path / FILE_NAME).read_bytes())
    content[-1] ^= 1
    (path / FILE_NAME).write_bytes(content)
    assert cached_calibration(wanted, tmp_path, SilentProgress()) == path
    assert load_artifact(path).digest == digest
    assert len(runs) == 3


def test_only_builtin_data_is_cached(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only a calibration on builtin data is cached"):
        cached_calibration(settings(tiny_llama, data=("a.txt",)), tmp_path, SilentProgress())


def test_plans_of_the_cached_artifact_survive_the_round_trip(artifact: Artifact, tmp_path: Path) -> None:
    loaded = load_artifact(save_artifact_path(artifact, tmp_path))
    assert loaded.plans == artifact.plans
    for side in Side:
        before, after = artifact.basis(side), loaded.basis(side)
        assert before is not None
        assert after is not None
        np.testing.assert_array_equal(after.basis, before.basis)
