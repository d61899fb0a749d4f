"""`sglang-kvtc bench`: rows on the terminal, and a record that says where they come from."""

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_kvtc import __version__
from sglang_kvtc.benchmarks.registry import ROUTINES
from sglang_kvtc.cli import bench
from sglang_kvtc.cli.main import main
from sglang_kvtc.errors import KVTCError


@pytest.fixture
def routine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for the routine `codec`."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--tokens", type=int, default=4)

    def run(args: argparse.Namespace) -> list[dict[str, object]]:
        return [{"case": "first", "tokens": args.tokens, "ms": 12.34567}, {"case": "second", "note": "slow"}]

    module = SimpleNamespace(HELP="times nothing", add_arguments=add_arguments, run=run)
    monkeypatch.setitem(sys.modules, "sglang_kvtc.benchmarks.routines.codec", module)
    return module


@pytest.mark.usefixtures("routine")
def test_rows_are_printed_aligned_with_the_command_that_repeats_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codec", "--tokens", "128"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "case    tokens     ms  note",
        "first      128  12.35",
        "second                 slow",
        "reproduce: sglang-kvtc bench codec --tokens 128",
    ]


@pytest.mark.usefixtures("routine")
def test_the_record_names_command_commit_versions_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "codec.json"
    assert main(["bench", "codec", "--json", str(path)]) == 0
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["routine"] == "codec"
    assert record["command"] == f"sglang-kvtc bench codec --json {path}"
    assert record["commit"] == bench.commit()
    assert record["versions"]["sglang_kvtc"] == __version__
    assert record["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert record["versions"]["numpy"] == np.__version__
    assert record["machine"].keys() == {"cpu", "cores", "memory_bytes", "accelerator"}
    assert record["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert record["rows"] == [{"case": "first", "tokens": 4, "ms": 12.34567}, {"case": "second", "note": "slow"}]


def test_a_routine_that_disagrees_with_its_oracle_fails_the_command_and_writes_no_record(
    routine: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> list[dict[str, object]]:
        raise KVTCError("decoded values differ from the oracle")

    routine.run = run
    assert main(["bench", "codec", "--json", str(tmp_path / "codec.json")]) == 1
    assert capsys.readouterr().err == "sglang-kvtc: decoded values differ from the oracle\n"
    assert not list(tmp_path.iterdir())


def test_a_record_that_could_not_be_written_is_refused_before_the_routine_runs(
    routine: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    routine.run = lambda args: pytest.fail("the routine ran")
    assert main(["bench", "codec", "--json", str(tmp_path / "missing" / "codec.json")]) == 1
    assert f"{tmp_path / 'missing'} does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["bench"], ["bench", "no-such-routine"], ["bench", "codec", "--no-such-option"]])
@pytest.mark.usefixtures("routine")
def test_bad_usage_is_exit_code_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2


@pytest.mark.parametrize("name", ROUTINES)
def test_every_routine_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", name, "--help"])
    assert stop.value.code == 0
    assert "--json FILE" in capsys.readouterr().out
