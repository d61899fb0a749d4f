"""What benchmarks/results say of eviction on the demo model can be had again, by the command that stands there."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import pytest

from sglang_kvtc.benchmarks.registry import load

RECORD = Path(__file__).parents[2] / "benchmarks/results/gates-smoke.json"
POINTS = 0.02


def test_b_ev_14_a_smoke_subset_gives_the_published_scores_again(tmp_path: Path) -> None:
    """One document and two retrieval contexts by the teacher's scores, in fp32, on prompts without a chat template."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    program, bench, name, *arguments = shlex.split(record["command"])
    assert (program, bench, name) == ("sglang-kvtc", "bench", "gates") and record["routine"] == name
    routine = load(name)
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    routine.add_arguments(parser)
    rows = routine.run(parser.parse_args(arguments))
    assert [row["method"] for row in rows] == [row["method"] for row in record["rows"]]
    for row, published in zip(rows, record["rows"], strict=True):
        assert row["retrieval_total"] == published["retrieval_total"] == 10
        for found, expected in (
            (row["retrieval_correct"] / row["retrieval_total"], published["retrieval_correct"] / 10),
            (row["top1"], published["top1"]),
            (row["kept"], published["kept"]),
        ):
            assert found == pytest.approx(expected, abs=POINTS)
