"""The routine on a model of two layers, from arguments to rows."""

import argparse
from pathlib import Path

import pytest
from calibrate.tiny_llama import save_tiny_llama

from sglang_kvtc.benchmarks.routines import sensitivity


def test_probes_agree_with_the_information_on_average(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    sensitivity.add_arguments(parser)
    sizes = ["--prefix-tokens", "200", "--suffix-tokens", "40", "--documents", "2", "--probes", "8"]
    rows = sensitivity.run(parser.parse_args(["--model", str(save_tiny_llama(tmp_path)), *sizes]))
    assert len(rows) == 9
    probes, summary = rows[:-1], rows[-1]
    assert {(row["side"], row["layer"], row["head"]) for row in probes} == {
        (side, layer, head) for side in "KV" for layer in range(2) for head in range(2)
    }
    predicted = [row["predicted_kl"] for row in probes]
    assert predicted == sorted(predicted, reverse=True)
    for row in probes:
        assert row["ratio"] == pytest.approx(row["kl"] / row["predicted_kl"])
    # Eight numbers over two orders of magnitude, each with an error of some per cent: they cannot agree by chance.
    assert summary["correlation_of_logs"] > 0.7
    assert 0.5 < summary["ratio"] < 2
