"""The benchmark routines `codec` and `allocate`, on something small."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from codec.toy_model import RATIO, make_artifact

from sglang_kvtc.artifact.io import save_artifact
from sglang_kvtc.benchmarks.memory import peak_memory
from sglang_kvtc.benchmarks.registry import load
from sglang_kvtc.codec.transform import SideTransform
from sglang_kvtc.errors import KVTCError

Row = dict[str, object]


def run(name: str, *arguments: str) -> list[Row]:
    routine = load(name)
    parser = argparse.ArgumentParser()
    routine.add_arguments(parser)
    return routine.run(parser.parse_args(arguments))


def test_allocate_reports_what_it_took_and_what_came_out() -> None:
    (row,) = run("allocate", "--features", "400", "--rank", "200", "--ratio", "8")
    assert row["budget_bits"] == 800
    assert 0 < float(str(row["table_seconds"])) < float(str(row["seconds"]))
    assert 0 < float(str(row["predicted_error"])) < 1


def test_codec_times_every_stage_and_leaves_the_threads_alone(tmp_path: Path) -> None:
    save_artifact(make_artifact(), tmp_path)
    threads = torch.get_num_threads()
    arguments = ("--artifact", str(tmp_path), "--ratio", str(RATIO), "--tokens", "40", "70", "--chunk-tokens", "32")
    rows = run("codec", *arguments, "--layers-per-step", "2", "--repeats", "1")
    assert torch.get_num_threads() == threads
    assert [row["tokens"] for row in rows] == [40, 70]
    stages = [key for key in rows[0] if key.startswith("stage_") and key.endswith("_ms")]
    assert len(stages) == 10
    for row in rows:
        assert all(float(str(row[stage])) > 0 for stage in stages)
        assert float(str(row["encode_over_gemm"])) > 1
        assert float(str(row["decode_over_gemm"])) > 1


def test_codec_refuses_results_that_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_artifact(make_artifact(), tmp_path)
    mean_parts = SideTransform._mean_parts

    def forgets_the_mean(transform: SideTransform) -> list[torch.Tensor]:
        parts = mean_parts(transform)
        return [torch.zeros_like(part) for part in parts] if len(parts) > 1 else parts

    monkeypatch.setattr(SideTransform, "_mean_parts", forgets_the_mean)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    with pytest.raises(KVTCError, match="K is off by"):
        run("codec", "--artifact", str(tmp_path), "--ratio", str(RATIO), "--tokens", "40", "--repeats", "1")


def test_peak_memory_sees_what_is_freed_again() -> None:
    with peak_memory() as outer:
        torch.ones(50_000_000, dtype=torch.uint8).max()
    # The kernel counts pages per core and adds them up now and then, so it may be off by some hundred kilobytes.
    assert outer.peak_bytes == pytest.approx(50_000_000, abs=2_000_000)
    with peak_memory() as again:
        pass
    assert again.peak_bytes < 2_000_000
