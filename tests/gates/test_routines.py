"""The benchmark routines of the gates, on something small."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from calibrate.tiny_llama import save_tiny_llama
from torch import nn

from sglang_kvtc import __version__
from sglang_kvtc.benchmarks.routines import gate_parity, gate_score
from sglang_kvtc.errors import ConfigError, KVTCError, UnsupportedError
from sglang_kvtc.gates.score import GateScorer

Row = dict[str, object]


def run(routine: object, *arguments: object) -> list[Row]:
    parser = argparse.ArgumentParser()
    routine.add_arguments(parser)  # type: ignore[attr-defined]
    rows: list[Row] = routine.run(parser.parse_args([str(argument) for argument in arguments]))  # type: ignore[attr-defined]
    return rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


def test_gate_score_times_every_case_against_one_forward_pass(model: Path) -> None:
    threads = torch.get_num_threads()
    rows = run(gate_score, "--model", model, "--chunk-tokens", 60, "--buffered-tokens", 20, "--repeats", 2)
    assert torch.get_num_threads() == threads
    assert [row["backend"] for row in rows] == ["numba"] * 4 + ["torch"] * 4
    assert [row["tokens"] for row in rows] == [60, 60, 60, 20] * 2
    assert {row["layers"] for row in rows} == {2}
    for row in rows:
        ratio = float(str(row["score_ms"])) / float(str(row["forward_ms"]))
        assert float(str(row["over_forward"])) == pytest.approx(ratio)
        assert ratio > 0
        assert 0 < float(str(row["max_difference"])) < 0.05


def test_gate_score_refuses_scores_that_are_wrong(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = GateScorer.score_layers

    def off(scorer: GateScorer, inputs: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return right(scorer, inputs, out) * 0.9

    monkeypatch.setattr(GateScorer, "score_layers", off)
    with pytest.raises(KVTCError, match="the scorer is wrong"):
        run(gate_score, "--model", model, "--chunk-tokens", 30, "--repeats", 1)


def test_gate_score_needs_a_text_as_long_as_the_chunk(model: Path) -> None:
    with pytest.raises(ConfigError, match="--chunk-tokens 100000000"):
        run(gate_score, "--model", model, "--chunk-tokens", 100_000_000)


class PlainGate(nn.Module):
    """Takes the place of the published class: its arguments and state, with the formula in numpy loops."""

    error = 0.0

    def __init__(
        self, index: int, input_dim: int, nhead: int, ngroup: int, dtype: torch.dtype, output_dim: int, sink: int
    ) -> None:
        super().__init__()
        self.q_proj = nn.Linear(input_dim, nhead * ngroup * output_dim, dtype=dtype)
        self.k_proj = nn.Linear(input_dim, nhead * output_dim, bias=False, dtype=dtype)
        self.q_norm = nn.RMSNorm(output_dim)
        self.k_norm = nn.RMSNorm(output_dim)
        self.k_base = nn.Parameter(torch.empty(nhead, 1, sink, output_dim))
        self.b = nn.Parameter(torch.empty(nhead, 1, ngroup))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        w = {name: tensor.double().numpy() for name, tensor in self.state_dict().items()}
        states = hidden_states[0].double().numpy()
        heads, _, group = w["b"].shape
        dim = len(w["q_norm.weight"])

        def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
            normed: np.ndarray = x / math.sqrt((x**2).mean() + 1e-6) * weight
            return normed

        scores = torch.empty(1, heads, len(states))
        for token, h in enumerate(states):
            q = (w["q_proj.weight"] @ h + w["q_proj.bias"]).reshape(heads, group, dim)
            k = (w["k_proj.weight"] @ h).reshape(heads, dim)
            for head in range(heads):
                parts = []
                for member in range(group):
                    query = norm(q[head, member], w["q_norm.weight"])
                    own = query @ norm(k[head], w["k_norm.weight"]) / math.sqrt(dim) + w["b"][head, 0, member]
                    others = np.exp(w["k_base"][head, 0] @ query / math.sqrt(dim)).sum()
                    parts.append(1 / (1 + others * math.exp(-own)))
                scores[0, head, token] = np.mean(parts) + self.error
        return scores


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[PlainGate]:
    modules = {gate_parity.MODULE: SimpleNamespace(FastKVzipGate=PlainGate)}
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    monkeypatch.setattr(importlib.metadata, "version", {"kvpress": "0.0"}.__getitem__)
    return PlainGate


SMALL = ("--group-sizes", 1, 3, "--features", 8, 20, "--tokens", 9)


def test_gate_parity_compares_every_geometry_and_names_both_versions(stand_in: type[PlainGate]) -> None:
    rows = run(gate_parity, *SMALL)
    assert [(row["group_size"], row["features"]) for row in rows] == [(1, 8), (1, 20), (3, 8), (3, 20)]
    for row in rows:
        assert (row["sglang_kvtc"], row["kvpress"]) == (__version__, "0.0")
        assert float(str(row["max_score"])) - float(str(row["min_score"])) > 0.05
        for name in ("forward", "scorer"):
            assert float(str(row[f"{name}_max_difference"])) <= 1e-6


@pytest.mark.parametrize("error", [2e-5, float("nan")])
def test_gate_parity_fails_where_scores_differ(
    error: float, stand_in: type[PlainGate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in, "error", error)
    with pytest.raises(KVTCError, match=r"group size 1, 8 features: scores differ from kvpress 0\.0 by"):
        run(gate_parity, *SMALL)


def test_gate_parity_without_kvpress_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UnsupportedError, match=r"No module named 'kvpress.*uv pip install --no-deps kvpress==0\.5\.5"):
        run(gate_parity)
