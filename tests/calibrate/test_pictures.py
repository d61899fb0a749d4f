"""Pictures of an artifact and of benchmark records: what is drawn, and that `sglang-kvtc plot` draws it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifact.toy_artifact import PLAN, artifact, lossless_artifact
from matplotlib.figure import Figure

from sglang_kvtc.artifact.io import save_artifact
from sglang_kvtc.artifact.schema import Artifact, Group, SidePlan
from sglang_kvtc.calibrate.pictures import (
    plot_allocation,
    plot_held_out,
    plot_positions,
    plot_rate_distortion,
    plot_spectrum,
    plot_stages,
    read_records,
    stage_ratios,
)
from sglang_kvtc.cli.main import main
from sglang_kvtc.errors import ConfigError

HELD_OUT = {
    "target_ratio": 16.0,
    "ratio": 8.0,
    "ratio_range": [7.0, 10.0],
    "k": 0.1,
    "v": 0.2,
    "k_layers": [0.05, 0.15],
    "v_layers": [0.1, 0.3],
}
PNG = b"\x89PNG\r\n\x1a\n"


def checked_artifact() -> Artifact:
    plans = (PLAN, dataclasses.replace(PLAN, target_ratio=32.0))
    return dataclasses.replace(artifact(plans), provenance={"held_out_error": json.dumps([HELD_OUT])})


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """Every figure that is saved, with what was drawn in it."""
    saved: list[Figure] = []
    save = Figure.savefig

    def record(self: Figure, path: Path, **options: Any) -> None:
        saved.append(self)
        save(self, path, **options)

    monkeypatch.setattr(Figure, "savefig", record)
    yield saved


def points(figure: Figure, axis: int) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in figure.axes[axis].get_lines()
    }


def test_the_spectrum_is_that_of_both_bases(figures: list[Figure], tmp_path: Path) -> None:
    made = checked_artifact()
    plot_spectrum(made, tmp_path / "new" / "spectrum.png")
    assert (tmp_path / "new" / "spectrum.png").read_bytes().startswith(PNG)
    falling, held = (points(figures[0], axis) for axis in (0, 1))
    for name, basis in (("K", made.k), ("V", made.v)):
        assert basis is not None
        np.testing.assert_array_equal(falling[name][1], basis.variances)
        assert held[name][0][-1] == len(basis.variances)
        assert held[name][1][-1] == pytest.approx(float(basis.variances.sum()) / basis.total_variance)


def test_the_allocation_shows_the_width_of_every_component(figures: list[Figure], tmp_path: Path) -> None:
    plot_allocation(checked_artifact(), tmp_path / "bits.png")
    assert points(figures[0], 0)["16x"] == (list(range(1, 19)), [6, *[3] * 16, 0])
    assert points(figures[0], 1)["32x"] == (list(range(1, 18)), [*[2] * 16, 0])


def test_the_allocation_of_a_uniform_plan_shows_the_entropy_of_every_component(
    figures: list[Figure], tmp_path: Path
) -> None:
    plan = dataclasses.replace(PLAN, k=SidePlan((Group(0, 2, 8), Group(2, 3, 4)), 0.1, step=0.01, stored_bits=1.0))
    made = artifact((plan,))
    plot_allocation(made, tmp_path / "bits.png")
    numbers, bits = points(figures[0], 0)["16x"]
    assert numbers == list(range(1, 7))
    assert made.k is not None
    levels = np.sqrt(made.k.variances[:5]) / 0.01
    # The entropy of a Gaussian of that many steps, summed over its levels.
    for found, deviation in zip(bits, levels, strict=False):
        level = np.arange(-5000, 5001)
        share = np.exp(-np.square(level / deviation) / 2)
        share = (share / share.sum())[share > 1e-300]
        assert found == pytest.approx(-(share * np.log2(share)).sum(), rel=1e-3)
    assert bits[5] == 0


def test_held_out_errors_are_drawn_by_layer(figures: list[Figure], tmp_path: Path) -> None:
    plot_held_out(checked_artifact(), tmp_path / "errors.png")
    assert points(figures[0], 0) == {"16x": ([0, 1], [0.05, 0.15])}
    assert points(figures[0], 1) == {"16x": ([0, 1], [0.1, 0.3])}


def test_the_stages_multiply_to_the_measured_ratio(figures: list[Figure], tmp_path: Path) -> None:
    (row,) = stage_ratios(checked_artifact())
    # 64 features of K and 32 of V; 17 and 16 components; 6 + 48 + 64 and 32 + 32 bits.
    assert row["PCA"] == pytest.approx(96 / 33)
    assert row["quantisation"] == pytest.approx(16 * 33 / 182)
    assert row["PCA"] * row["quantisation"] * row["entropy coding"] == pytest.approx(8.0)
    plot_stages(checked_artifact(), tmp_path / "stages.png")
    heights = [patch.get_height() for patch in figures[0].axes[0].patches]
    assert sum(heights) == pytest.approx(3.0)
    assert heights[0] == pytest.approx(np.log2(96 / 33))


def test_rate_and_distortion_have_a_line_per_method_in_order_of_the_ratio(
    figures: list[Figure], tmp_path: Path
) -> None:
    rows = [
        {"method": "kvtc", "target_ratio": 16.0, "ratio": 17.0, "kl": 0.01},
        {"method": "kvtc", "target_ratio": 8.0, "ratio": 9.0, "kl": 0.003},
        {"method": "int4", "target_ratio": 4.0, "ratio": 3.2, "kl": 0.002},
        {"method": "kvtc", "target_ratio": 16.0, "position": 5, "ratio": 17.0, "kl": 0.5},
        {"features": 32768},
    ]
    assert plot_rate_distortion(rows, tmp_path / "kl.png")
    assert points(figures[0], 0) == {"kvtc": ([9.0, 17.0], [0.003, 0.01]), "int4": ([3.2], [0.002])}
    assert not plot_rate_distortion([{"features": 1}], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_errors_by_position_have_a_line_per_method_and_ratio(figures: list[Figure], tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"method": "kvtc", "target_ratio": ratio, "position": position, "k": 0.1 * ratio / (position + 1)}
        for ratio in (8.0, 16.0)
        for position in (4, 0)
    ]
    rows.append({"method": "fp8", "position": 3, "kl": 0.01})
    assert plot_positions(rows, tmp_path / "positions.png")
    of_output, of_keys = (points(figures[0], axis) for axis in (0, 1))
    assert of_output == {"fp8": ([3.0], [0.01])}
    assert of_keys["kvtc 16x"] == ([0.0, 4.0], [1.6, pytest.approx(0.32)])
    assert len(of_keys) == 2
    assert not plot_positions([{"method": "kvtc", "kl": 1.0}], tmp_path / "none.png")


def test_plot_draws_an_artifact_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_artifact(checked_artifact(), tmp_path / "artifact")
    record = {"routine": "quality", "rows": [{"method": "kvtc", "ratio": 17.0, "kl": 0.01}]}
    (tmp_path / "quality.json").write_text(json.dumps(record))
    out = tmp_path / "pictures"
    command = ["plot", str(tmp_path / "artifact"), "--out", str(out), "--records", str(tmp_path / "quality.json")]
    assert main(command) == 0
    names = ["bit-allocation", "held-out-error", "rate-distortion", "spectrum", "stages"]
    assert sorted(path.stem for path in out.iterdir()) == names
    assert sorted(Path(line).stem for line in capsys.readouterr().out.splitlines()) == names
    assert all(path.read_bytes().startswith(PNG) for path in out.iterdir())


@pytest.mark.parametrize("content", ["{", "[]", '{"rows": 1}', '{"rows": [1]}'])
def test_files_that_are_no_records_are_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ConfigError, match=r"--records .*a\.json"):
        read_records([tmp_path / "a.json"])
    with pytest.raises(ConfigError, match=r"--records .*absent"):
        read_records([tmp_path / "absent"])


def test_what_cannot_be_drawn_is_said_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_artifact(lossless_artifact(), tmp_path / "lossless")
    assert main(["plot", str(tmp_path / "lossless"), "--out", str(tmp_path / "out")]) == 1
    assert "lossless only" in capsys.readouterr().err
    save_artifact(checked_artifact(), tmp_path / "artifact")
    (tmp_path / "allocate.json").write_text('{"rows": [{"features": 1}]}')
    command = ["plot", str(tmp_path / "artifact"), "--out", str(tmp_path / "out")]
    assert main([*command, "--records", str(tmp_path / "allocate.json")]) == 1
    assert "no row has method" in capsys.readouterr().err
