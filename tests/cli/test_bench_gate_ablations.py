"""`sglang-kvtc bench gate-ablations` on a tiny model: every table, and what the rows say."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from calibrate.tiny_llama import save_tiny_llama
from safetensors import safe_open

from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.benchmarks.registry import load
from sglang_kvtc.benchmarks.retrieval import retrieval_tasks
from sglang_kvtc.benchmarks.routines.gate_ablations import REFERENCE, TABLES
from sglang_kvtc.calibrate.causal_lm import load_tokenizer
from sglang_kvtc.calibrate.progress import SilentProgress
from sglang_kvtc.distill.distillation import Distillation, distill
from sglang_kvtc.distill.train import TrainSettings
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.gates.io import save_gates

Row = dict[str, Any]
TRAINING = ("--tokens", "400", "--steps", "10", "--batch-tokens", "60")
EVALUATION = (
    "--documents",
    "2",
    "--contexts",
    "2",
    "--prefix-tokens",
    "120",
    "--suffix-tokens",
    "16",
    "--window",
    "24",
)
KEEP = ("--keep", "0.4")
SMALL = (*TRAINING, *EVALUATION, *KEEP)


def run(routine: str, *arguments: str) -> list[Row]:
    module = load(routine)
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args(arguments))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="module")
def work_dir(model_dir: Path) -> Path:
    return model_dir.parent / "work"


@pytest.fixture(scope="module")
def rows(model_dir: Path, work_dir: Path) -> list[Row]:
    """All tables."""
    plot = ("--plot", str(model_dir.parent / "tables.png"))
    return run("gate-ablations", "--model", str(model_dir), "--work-dir", str(work_dir), *plot, *SMALL)


def of_table(rows: list[Row], table: str) -> dict[str, Row]:
    return {row["variant"]: row for row in rows if row["table"] == table}


def numbers(row: Row) -> Row:
    """A row without what it is called."""
    return {name: value for name, value in row.items() if name not in ("table", "variant")}


def test_every_table_has_its_variants_and_the_same_base(rows: list[Row]) -> None:
    assert {table: list(of_table(rows, table)) for table in (*TABLES, REFERENCE)} == {
        "target": ["reconstruction", "next-token", "instruction"],
        "input": ["hidden", "keys", "keys-before-rope"],
        "architecture": ["sink-attention", "no learned denominator", "mlp", "linear", "bias as printed"],
        "sinks": ["2", "4", "8", "16"],
        "dimension": ["4", "8", "16", "32"],
        "recipe": ["adam on roots", "adam", "sgd on roots", "sgd (the paper's)"],
        "window": ["0", "20", "64", "128", "256"],
        "size": ["quarter", "half", "all"],
        "reference": ["teacher", "full cache"],
    }
    bases = {"target": "reconstruction", "input": "hidden", "architecture": "sink-attention", "sinks": "4"}
    bases |= {"dimension": "8", "recipe": "adam on roots", "size": "all"}
    first, *others = [numbers(of_table(rows, table)[variant]) for table, variant in bases.items()]
    assert all(other == first for other in others)


def test_every_training_of_its_own_gives_gates_of_its_own(rows: list[Row]) -> None:
    trained = [row for row in rows if row["table"] not in ("window", REFERENCE)]
    # Seven of them are the base.
    assert len({row["held_out_loss"] for row in trained}) == len(trained) - 6 == 20
    assert len({row["kl"] for row in trained}) > 10
    for row in trained:
        assert row["steps"] == 10
        assert row["held_out_loss"] > row["loss_floor"] > 0
        assert row["keep"] - 1 / 120 < row["kept"] <= row["keep"] == 0.4
        assert row["kl"] > 0 and row["kl_se"] > 0 and row["retrieval_total"] == 10
        assert (row["window"], row["retrieval_window"]) == (24, 8)


def test_a_share_of_the_text_is_judged_on_the_tokens_of_all(rows: list[Row]) -> None:
    sizes = of_table(rows, "size")
    whole = sizes["all"]["tokens"]
    assert 400 <= whole < 600
    assert [sizes[size]["tokens"] for size in ("quarter", "half")] == [whole // 4, whole // 2]
    assert len({row["loss_floor"] for row in sizes.values()}) == 1


def test_windows_use_the_same_gates_and_have_numbers_where_they_fit(rows: list[Row], model_dir: Path) -> None:
    base = of_table(rows, "size")["all"]
    windows = of_table(rows, "window")
    assert {row["held_out_loss"] for row in windows.values()} == {base["held_out_loss"]}
    shortest = min(len(task.context_ids) for task in retrieval_tasks(load_tokenizer(model_dir), count=2, seed=0))
    assert 4 + 128 < 0.4 * shortest < 4 + 256
    for window, row in windows.items():
        assert row["window"] == row["retrieval_window"] == int(window)
        assert ("kl" in row) == ("kept" in row) == (window in ("0", "20"))
        assert ("retrieval_correct" in row) == (window != "256")
    assert len({row["kl"] for row in (base, windows["0"], windows["20"])}) == 3


def test_teacher_and_full_cache_are_those_of_bench_gates(rows: list[Row], model_dir: Path) -> None:
    *expected, full = run("gates", "--model", str(model_dir), "--methods", "teacher", *KEEP, *EVALUATION)
    references = of_table(rows, REFERENCE)
    teacher = next(row for row in expected if row["window"] == 24)
    assert numbers(references["teacher"]) == {name: value for name, value in teacher.items() if name != "method"}
    assert numbers(references["full cache"]) == {name: value for name, value in full.items() if name != "method"}
    for row in rows:
        if "kl" in row and row is not references["full cache"]:
            assert row["kl_over_teacher"] == pytest.approx(row["kl"] / teacher["kl"])


def test_the_base_is_what_train_gates_makes_and_bench_gates_measures(
    rows: list[Row], model_dir: Path, tmp_path: Path
) -> None:
    settings, training = Distillation(model_dir, num_tokens=400), TrainSettings(10, 60)
    distilled = distill(settings, training, tmp_path / "work", SilentProgress())
    path = tmp_path / "gates.safetensors"
    save_gates(path, distilled.gates, fingerprint_model(model_dir), {})
    base = of_table(rows, "target")["reconstruction"]
    losses = distilled.curves.held_out[-1]
    assert base["held_out_loss"] == pytest.approx(sum(losses) / len(losses), 1e-6)
    arguments = ("--model", str(model_dir), "--gates", str(path), "--methods", "gates", *KEEP, *EVALUATION)
    measured = {row["window"]: row["kl"] for row in run("gates", *arguments) if row["method"] == "gates"}
    # The file's weights are 16-bit, so that a pair at the threshold may be another.
    assert base["kl"] == pytest.approx(measured[24], 0.02)
    windows = of_table(rows, "window")
    assert [windows[window]["kl"] for window in ("0", "20")] == pytest.approx([measured[0], measured[20]], 0.02)


def test_a_kept_folder_is_used_again_for_other_tables_and_never_for_other_text(
    rows: list[Row], model_dir: Path, work_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", str(model_dir), "--work-dir", str(work_dir), *SMALL)
    again = run("gate-ablations", *arguments, "--tables", "window,sinks")
    assert again == [row for row in rows if row["table"] == "window"] + [
        row for row in rows if row["table"] in ("sinks", REFERENCE)
    ]
    printed = capsys.readouterr().err
    assert "teacher: 0 tokens" in printed
    assert [f"training {number} of 4: 0 steps" in printed for number in (1, 2, 3, 4)] == [True] * 4
    run("gate-ablations", *arguments, "--tables", "window", "--steps", "11")
    assert "training 1 of 1: 11 steps" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="holds the activations of another run"):
        run("gate-ablations", *arguments, "--tables", "window", "--tokens", "401")


def test_only_what_the_tables_need_is_stored(model_dir: Path, tmp_path: Path) -> None:
    found = []
    for table in ("window", "input"):
        arguments = ("--model", str(model_dir), "--work-dir", str(tmp_path / table), "--tables", table, *SMALL)
        run("gate-ablations", *arguments)
        with safe_open(next((tmp_path / table).glob("*/sequence-00000.safetensors")), framework="pt") as shard:
            found.append(sorted(shard.keys()))
    assert found == [
        ["input.hidden", "target.reconstruction"],
        ["input.hidden", "input.keys", "input.keys-before-rope", "target.reconstruction"],
    ]


def test_the_picture_has_a_panel_per_table(rows: list[Row], model_dir: Path) -> None:
    header = (model_dir.parent / "tables.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(header[16:20], "big") == int(2.8 * 120) * len(TABLES)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tables", "size,colour"), "--tables colour: expected some of target, input"),
        (("--suffix-tokens", "1"), "--suffix-tokens 1: expected at least 2"),
        (("--window", "-1"), "--window -1: expected at least 0"),
        (("--steps", "0"), "--steps"),
        (("--batch-tokens", "100"), "--tokens 400: the smallest training has 99 of them"),
        (("--keep", "1"), "--keep 1.0: expected a share between 0 and 1"),
        (("--window", "45"), "--window 45: with 4 sinks it is more than --keep 0.4 of 120 tokens"),
        (("--retrieval-window", "400"), "--retrieval-window 400: with 4 sinks"),
        (("--plot", "tables.pdf"), "--plot tables.pdf: expected a file name that ends in .png"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_scored(
    model_dir: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run("gate-ablations", "--model", str(model_dir), "--work-dir", str(tmp_path), *SMALL, *flags)
    assert not list(tmp_path.iterdir())
