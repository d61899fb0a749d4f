"""`bench paged-attention`, on small sizes."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from sglang_kvtc.benchmarks.routines import paged_attention
from sglang_kvtc.errors import ConfigError, KVTCError

SMALL = ("--batch", "2", "--tokens", "90", "--kept", "20,40", "--new", "24", "--chunk-kept", "30", "--repeats", "2")


def run(*arguments: str) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser()
    paged_attention.add_arguments(parser)
    return paged_attention.run(parser.parse_args(arguments))


@pytest.mark.parametrize("dtype", paged_attention.DTYPES)
def test_every_case_is_timed_against_both_dense_lengths(dtype: str) -> None:
    threads = torch.get_num_threads()
    rows = run(*SMALL, "--threads", "1", "--dtype", dtype)
    assert torch.get_num_threads() == threads
    cases = [
        *(("decode", layout, kept) for layout in ("holes", "scattered") for kept in (20, 40)),
        *(("extend", layout, 30) for layout in ("holes", "scattered")),
        *((case, layout, 90) for layout in ("grown", "whole") for case in ("decode", "extend")),
    ]
    found = [(row["model"], row["case"], row["layout"], row["kept"]) for row in rows]
    assert sorted(found) == sorted((model, *case) for model in paged_attention.SHAPES for case in cases)
    for row in rows:
        assert row["dtype"] == dtype
        assert (row["batch"], row["new"]) == ((2, 1) if row["case"] == "decode" else (1, 24))
        assert row["earlier"] == 90
        for base in ("full", "kept"):
            assert row[f"over_{base}"] == pytest.approx(row["paged_ms"] / row[f"{base}_ms"])
        assert 0 <= row["max_error"] <= 2 * row["torch_max_error"] < 0.1


def test_cells_with_holes_are_those_of_the_average() -> None:
    shape = paged_attention.SHAPES["llama-3.1-8b"]
    case = paged_attention.Case(shape, "holes", 3, 1, 1000, 300, torch.bfloat16, 0)
    lengths = case._indptr.diff().float()
    assert len(lengths) == 3 * 8
    assert 250 < lengths.mean() < 350
    assert lengths.max() > 2 * lengths.min()


@pytest.mark.parametrize("function", ["decode_attention", "extend_attention"])
@pytest.mark.parametrize("factor", [0.9, float("nan")])
def test_wrong_results_are_refused(function: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(paged_attention, function)
    monkeypatch.setattr(paged_attention, function, lambda *args, **options: right(*args, **options) * factor)
    with pytest.raises(KVTCError, match="which is more than twice torch's"):
        run(*SMALL, "--models", "smollm2-135m", "--threads", "1")


def test_what_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--tokens 60: expected one and a half times the 41 that are kept"):
        run("--tokens", "60", "--kept", "20,41", "--chunk-kept", "5")
    with pytest.raises(SystemExit):
        run("--layouts", "holes,pages")
    assert "pages: expected some of holes, scattered, grown, whole" in capsys.readouterr().err
