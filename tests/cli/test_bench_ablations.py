"""`sglang-kvtc bench ablations` on a tiny model: a part for every choice of the codec."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from sglang_kvtc.benchmarks.registry import load
from sglang_kvtc.errors import ConfigError

Row = dict[str, Any]
SMALL = (
    *("--documents", "1", "--prefix-tokens", "180", "--suffix-tokens", "16", "--contexts", "1"),
    *("--tokens", "1500", "--ratios", "4", "--windows", "0,32", "--calibration-tokens", "3000"),
    *("--tasks", "arithmetic", "--arithmetic-size", "16"),
)


def run(model_dir: Path, artifact_dir: Path, *arguments: str) -> list[Row]:
    module = load("ablations")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    paths = ("--model", str(model_dir), "--cache-dir", str(model_dir.parent / "cache"))
    artifact = () if "--artifact" in arguments else ("--artifact", str(artifact_dir))
    return module.run(parser.parse_args((*paths, *artifact, *SMALL, *arguments)))


def settings(rows: list[Row]) -> list[tuple[str, str, str]]:
    return [(row["part"], row["setting"], row["method"]) for row in rows]


def test_sinks_and_window_leave_tokens_raw(model_dir: Path, artifact_dir: Path) -> None:
    rows = run(model_dir, artifact_dir, "--parts", "sinks,window")
    assert settings(rows) == [
        ("", "", "full cache"),
        ("sinks", "first 0 raw", "kvtc 4x"),
        ("sinks", "first 4 raw", "kvtc 4x"),
        ("window", "last 0 raw", "kvtc 4x"),
        ("window", "last 32 raw", "kvtc 4x"),
    ]
    full, no_sinks, sinks, no_window, window = rows
    assert (full["kl"], full["top1"], full["ratio"]) == (0, 1, 1)
    assert {"kl", "kl_se", "dnll", "top1", "kl_prose", "kl_code", "arithmetic_pct"} <= full.keys()
    assert sinks["ratio"] < no_sinks["ratio"]
    assert window["whole_ratio"] < no_window["whole_ratio"]
    assert 0 < window["kl"] < no_window["kl"]
    assert window["kl"] == pytest.approx((window["kl_prose"] + window["kl_code"]) / 2)


def test_calibrations_differ_in_layers_tokens_and_domains(model_dir: Path, artifact_dir: Path) -> None:
    rows = run(model_dir, artifact_dir, "--parts", "layers,tokens,domains")
    assert settings(rows)[1:] == [
        ("layers", "1 per PCA", "kvtc 8x -DPQ"),
        ("layers", "1 per PCA", "kvtc 4x"),
        ("layers", "2 per PCA", "kvtc 8x -DPQ"),
        ("layers", "2 per PCA", "kvtc 4x"),
        ("tokens", "3,000 tokens", "kvtc 4x"),
        ("domains", "all domains", "kvtc 4x"),
        ("domains", "builtin prose", "kvtc 4x"),
        ("domains", "builtin code", "kvtc 4x"),
    ]
    kl = {row["setting"]: row["kl"] for row in rows if row["method"] == "kvtc 4x"}
    assert len(set(kl.values())) == len(kl)


def test_given_artifacts_are_compared_under_their_labels(model_dir: Path, artifact_dir: Path) -> None:
    named = ("--artifact", f"here={artifact_dir}", "--artifact", f"there={artifact_dir}")
    rows = run(model_dir, artifact_dir, *named, "--parts", "artifacts", "--documents", "0")
    assert settings(rows)[1:] == [("artifacts", "here", "kvtc 4x"), ("artifacts", "there", "kvtc 4x")]
    assert "kl" not in rows[0]


def test_parts_there_are_not_are_refused(model_dir: Path, artifact_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--parts moon: expected some of artifacts, sinks, window"):
        run(model_dir, artifact_dir, "--parts", "sinks,moon")


def test_contexts_that_stay_raw_are_refused(model_dir: Path, artifact_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--prefix-tokens 132: expected more than the 132 that stay raw"):
        run(model_dir, artifact_dir, "--prefix-tokens", "132")
    with pytest.raises(ConfigError, match=r"--arithmetic-size gives contexts of .* tokens, and 132 stay raw"):
        run(model_dir, artifact_dir, "--arithmetic-size", "2")
