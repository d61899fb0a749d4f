"""Calibrations that are interrupted and continued, and runs over different text that are merged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sglang_kvtc.artifact.io import save_artifact
from sglang_kvtc.artifact.schema import Artifact
from sglang_kvtc.calibrate import collect, sensitivity
from sglang_kvtc.calibrate.calibration import calibrate, calibrate_shards
from sglang_kvtc.calibrate.progress import SilentProgress
from sglang_kvtc.calibrate.settings import Calibration
from sglang_kvtc.calibrate.work_dir import FILE_NAME
from sglang_kvtc.errors import ArtifactError, ConfigError
from sglang_kvtc.types import Side


def settings(model_dir: Path, **changes: object) -> Calibration:
    defaults = Calibration(
        model_dir, "paper", num_tokens=2000, ratios=(4.0,), max_length=128, max_error=1.0, save_every=3
    )
    return dataclasses.replace(defaults, **changes)


class Interrupted(Exception):
    """Stands for whatever ends a process."""


@pytest.fixture
def forward_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], list[int]]:
    """Count the forward passes over calibration text from now on, and interrupt the run at one of them."""
    heads_before_rope = collect._heads_before_rope

    def watch(stop_at: int | None) -> list[int]:
        lengths: list[int] = []

        def counted(model: object, token_ids: tuple[int, ...], rope: object) -> object:
            if len(lengths) == stop_at:
                raise Interrupted
            lengths.append(len(token_ids))
            return heads_before_rope(model, token_ids, rope)

        monkeypatch.setattr(collect, "_heads_before_rope", counted)
        return lengths

    return watch


def digest(artifact: Artifact, directory: Path) -> bytes:
    return save_artifact(artifact, directory).digest


@pytest.mark.parametrize("changes", [{}, {"pca": "randomized", "rank": 20}, {"tp_size": 2, "pp_size": 2}], ids=str)
def test_an_interrupted_calibration_continues_and_gives_the_identical_artifact(
    changes: dict[str, object],
    tiny_llama: Path,
    tmp_path: Path,
    forward_passes: Callable[[int | None], list[int]],
) -> None:
    expected = forward_passes(None)
    whole = calibrate_shards(settings(tiny_llama, **changes), SilentProgress())
    kept = settings(tiny_llama, work_dir=tmp_path / "work", **changes)
    forward_passes(8)
    with pytest.raises(Interrupted):
        calibrate_shards(kept, SilentProgress())
    lengths = forward_passes(None)
    continued = calibrate_shards(kept, SilentProgress())
    # The last write was after the sixth of the eight sequences.
    assert lengths == expected[6:]
    for number, (ours, theirs) in enumerate(zip(continued, whole, strict=True)):
        assert digest(ours, tmp_path / f"a{number}") == digest(theirs, tmp_path / f"b{number}")


def test_finished_statistics_are_fitted_again_without_running_the_model_over_the_text(
    tiny_llama: Path, tmp_path: Path, forward_passes: Callable[[int | None], list[int]]
) -> None:
    calibrate(settings(tiny_llama, work_dir=tmp_path), SilentProgress())
    lengths = forward_passes(None)
    found = calibrate(settings(tiny_llama, work_dir=tmp_path, ratios=(8.0, 2.0), layers_per_group=1), SilentProgress())
    assert lengths == []
    assert [plan.target_ratio for plan in found.plans] == [8, 2]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed, digest"),
        ({"num_tokens": 1500}, "digest"),
        ({"max_length": 64}, "max_length"),
        ({"dtype": "float32"}, "dtype"),
        ({"pca": "randomized"}, "pca"),
        ({"tp_size": 2}, "shards"),
    ],
    ids=str,
)
def test_statistics_of_other_settings_are_not_continued(
    changes: dict[str, object], named: str, tiny_llama: Path, tmp_path: Path
) -> None:
    calibrate(settings(tiny_llama, work_dir=tmp_path), SilentProgress())
    with pytest.raises(ConfigError, match=rf"holds the statistics of another calibration \(other .*{named}"):
        calibrate_shards(settings(tiny_llama, work_dir=tmp_path, **changes), SilentProgress())


def test_an_interrupted_sensitivity_continues_and_gives_the_identical_artifact(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = sensitivity._information
    measured: list[int] = []

    def stop_at(limit: int) -> None:
        def counted(model: object, token_ids: tuple[int, ...], *rest: object) -> object:
            if len(measured) == limit:
                raise Interrupted
            measured.append(len(token_ids))
            return information(model, token_ids, *rest)

        measured.clear()
        monkeypatch.setattr(sensitivity, "_information", counted)

    whole = calibrate(settings(tiny_llama, preset="sensitivity"), SilentProgress())
    kept = settings(tiny_llama, preset="sensitivity", work_dir=tmp_path / "work")
    stop_at(5)
    with pytest.raises(Interrupted):
        calibrate(kept, SilentProgress())
    stop_at(1000)
    continued = calibrate(kept, SilentProgress())
    assert len(measured) + 5 == int(continued.provenance["sensitivity"].split(" sequences")[0].split()[-1])
    assert digest(continued, tmp_path / "a") == digest(whole, tmp_path / "b")
    # A finished one is not measured again.
    stop_at(0)
    assert digest(calibrate(kept, SilentProgress()), tmp_path / "c") == digest(whole, tmp_path / "d")


def test_the_sensitivity_of_other_settings_is_not_continued(tiny_llama: Path, tmp_path: Path) -> None:
    calibrate(settings(tiny_llama, preset="sensitivity", work_dir=tmp_path), SilentProgress())
    (tmp_path / FILE_NAME).unlink()
    with pytest.raises(
        ConfigError, match=r"the sensitivity of another calibration \(other seed, text\).*sensitivity\.safe"
    ):
        calibrate(settings(tiny_llama, preset="sensitivity", work_dir=tmp_path, seed=1), SilentProgress())


def test_a_damaged_work_file_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    calibrate(settings(tiny_llama, work_dir=tmp_path), SilentProgress())
    content = bytearray((tmp_path / FILE_NAME).read_bytes())
    content[-1] ^= 1
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(ArtifactError, match=rf"{FILE_NAME}: it changed after it was written"):
        calibrate(settings(tiny_llama, work_dir=tmp_path), SilentProgress())
    (tmp_path / FILE_NAME).write_bytes(content[:100])
    with pytest.raises(ArtifactError, match="not a readable file of statistics"):
        calibrate(settings(tiny_llama, work_dir=tmp_path), SilentProgress())


def texts(directory: Path, name: str, seed: int, count: int = 12) -> str:
    """A folder of documents of random letters."""
    generator = np.random.default_rng(seed)
    (directory / name).mkdir(parents=True)
    for number in range(count):
        letters = generator.integers(97, 123, 700).astype(np.uint8).tobytes().decode()
        (directory / name / f"{name}{number}.txt").write_text(letters)
    return str(directory / name)


@pytest.mark.parametrize("pca", ["exact", "randomized"])
def test_runs_over_different_text_merge_into_the_artifact_of_all_of_it(
    pca: str, tiny_llama: Path, tmp_path: Path
) -> None:
    both = [texts(tmp_path, name, seed) for seed, name in enumerate(("first", "second"))]
    common = {"pca": pca, "num_tokens": 1400}
    for number, source in enumerate(both):
        work_dir = tmp_path / f"work{number}"
        calibrate(settings(tiny_llama, data=(source,), work_dir=work_dir, **common), SilentProgress())
    work_dirs = (tmp_path / "work0", tmp_path / "work1")
    merged = calibrate(settings(tiny_llama, data=tuple(both), merge=work_dirs, **common), SilentProgress())

    assert merged.provenance["tokens"] == "2800"
    assert merged.provenance["merged_runs"] == "2"
    assert merged.provenance["corpus"] == " ".join(both)
    assert [domain["name"] for domain in json.loads(merged.provenance["domains"])] == both
    # The moments are those of all rows, so the first components hold what they hold in both runs together.
    rows = [merged_rows(work_dir, pca) for work_dir in work_dirs]
    for side in Side:
        basis = merged.basis(side)
        assert basis is not None
        covariance, mean = pooled(rows, side)
        # Sums of fp32 rows in fp32.
        resolution = float(np.finfo(np.float32).eps) * 2800**0.5
        np.testing.assert_allclose(basis.mean, mean, rtol=0, atol=resolution * np.abs(mean).max())
        assert basis.total_variance == pytest.approx(float(np.trace(covariance)), rel=resolution)


def merged_rows(work_dir: Path, pca: str) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Count, mean and covariance (fp64) of the rows in a work file, by side."""
    found = []
    with safe_open(work_dir / FILE_NAME, framework="pt") as opened:
        for side in ("k", "v"):
            tensors = {
                name.removeprefix(f"0.{side}.moments."): opened.get_tensor(name)
                for name in opened.keys()  # noqa: SIM118 - not a dict
                if name.startswith(f"0.{side}.moments.")
            }
            if pca == "randomized":
                rows = tensors["rows"].double().numpy()
                found.append((len(rows), rows.mean(axis=0), np.cov(rows.T, bias=True)))
                continue
            # Fewer rows than a block: nothing has been summed up yet.
            rows = tensors["block"].double().numpy()
            assert int(tensors["flushed_rows"]) == 0
            found.append((len(rows), rows.mean(axis=0), np.cov(rows.T, bias=True)))
    return found


def pooled(runs: list[list[tuple[int, np.ndarray, np.ndarray]]], side: Side) -> tuple[np.ndarray, np.ndarray]:
    parts = [run[side] for run in runs]
    total = sum(count for count, _, _ in parts)
    mean = sum(count * part_mean for count, part_mean, _ in parts) / total
    within = sum(count * covariance for count, _, covariance in parts) / total
    between = sum(count * np.outer(part_mean - mean, part_mean - mean) for count, part_mean, _ in parts) / total
    return within + between, mean


def test_the_same_text_twice_an_unfinished_run_and_other_settings_do_not_merge(
    tiny_llama: Path, tmp_path: Path, forward_passes: Callable[[int | None], list[int]]
) -> None:
    done = tmp_path / "done"
    calibrate(settings(tiny_llama, work_dir=done), SilentProgress())
    with pytest.raises(ConfigError, match="its text was already merged"):
        calibrate(settings(tiny_llama, merge=(done, done)), SilentProgress())
    with pytest.raises(ConfigError, match=r"made with another dtype"):
        calibrate(settings(tiny_llama, merge=(done,), dtype="float32"), SilentProgress())
    with pytest.raises(ArtifactError, match="there are no statistics at"):
        calibrate(settings(tiny_llama, merge=(done, tmp_path / "absent")), SilentProgress())
    forward_passes(4)
    with pytest.raises(Interrupted):
        calibrate(settings(tiny_llama, work_dir=tmp_path / "half", seed=1), SilentProgress())
    with pytest.raises(ConfigError, match=r"half: only 3 of \d+ sequences are done"):
        calibrate(settings(tiny_llama, merge=(done, tmp_path / "half")), SilentProgress())


def test_another_file_of_tensors_is_no_work_file(tiny_llama: Path, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / FILE_NAME)
    with pytest.raises(ArtifactError, match="no calibration statistics"):
        calibrate(settings(tiny_llama, work_dir=tmp_path), SilentProgress())
