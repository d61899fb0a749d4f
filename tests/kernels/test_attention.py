"""Backends behind their common interface, and which one a name gives."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import torch
from eviction.kept_cells import random_kept
from eviction.plain_attention import assert_within_twice_torch

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.eviction.page_table import PageTables
from sglang_kvtc.kernels import attention
from sglang_kvtc.kernels.attention import resolve_backend
from sglang_kvtc.kernels.triton_ops import launch, paged_attention

SCALING = 0.3
HAS_GPU = torch.cuda.is_available()
BACKENDS = [("torch", "cpu"), ("triton", "cuda" if HAS_GPU else "cpu")]


def record(monkeypatch: pytest.MonkeyPatch, module: Any, names: tuple[str, ...]) -> list[str]:
    """Names of the functions of a module that are called from now on."""
    called: list[str] = []
    for name in names:
        function = getattr(module, name)

        def recorded(*arguments: Any, name: str = name, function: Any = function, **options: Any) -> Any:
            called.append(f"{module.__name__}.{name}")
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, recorded)
    return called


@pytest.mark.parametrize(("name", "device"), BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backend_attends_to_what_each_layer_kept(
    name: str, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = ("decode_attention", "extend_attention")
    called = [record(monkeypatch, module, functions) for module in (attention.attention, paged_attention)]
    backend = resolve_backend(name, device)
    assert backend.name == name

    decoded = random_kept([(70, 1), (9, 1)], group=3, head_dim=16, dtype=dtype, device=device)
    for layer, lists in enumerate(backend.lists(decoded.tables, decoded.requests)):
        queries = decoded.queries(layer).to(device)
        out = torch.full_like(queries, float("nan"))
        result = backend.decode(queries, decoded.k_cells, decoded.v_cells, lists, SCALING, out)
        assert result.data_ptr() == out.data_ptr()
        assert_within_twice_torch(result.cpu(), decoded.layers[layer], SCALING)

    extended = random_kept([(70, 1), (30, 30), (40, 9)], group=2, head_dim=16, dtype=dtype, device=device)
    for layer, lists in enumerate(backend.lists(extended.tables, extended.requests, extended.new_lens)):
        queries = extended.queries(layer).to(device)
        result = backend.extend(queries, extended.k_cells, extended.v_cells, lists, SCALING)
        assert_within_twice_torch(result.cpu(), extended.layers[layer], SCALING)

    ran, other = called if name == "torch" else called[::-1]
    assert [entry.rpartition(".")[2] for entry in ran] == ["decode_attention"] * 2 + ["extend_attention"] * 2
    assert not other


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_lists_made_for_decode_do_not_extend(name: str, device: str) -> None:
    backend = resolve_backend(name, device)
    kept = random_kept([(8, 1)], group=2, head_dim=16, dtype=torch.float32, device=device)
    lists = backend.lists(kept.tables, kept.requests)[0]
    with pytest.raises(ConfigError, match="these lists were made for decode: make them with new_lens"):
        backend.extend(kept.queries(0).to(device), kept.k_cells, kept.v_cells, lists, SCALING)
    for new_lens in ([1, 1], [-1]):
        with pytest.raises(ConfigError, match=r"new_lens is \[.*\] for 1 requests: expected a count of each"):
            backend.lists(kept.tables, kept.requests, new_lens)


def test_triton_reads_the_arena_in_place_and_nothing_of_it_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if HAS_GPU else "cpu"
    kept = random_kept([(20, 1), (9, 1)], group=2, head_dim=16, dtype=torch.float32, device=device)
    backend = resolve_backend("triton", device)
    for name in ("batch", "batches"):
        monkeypatch.delattr(PageTables, name)
    lists = backend.lists(kept.tables, kept.requests)
    assert [of.arena.data_ptr() for of in lists] == [kept.tables.arena.data_ptr()] * 2
    assert [of.lengths.tolist() for of in lists] == [
        [int(count) for request in layer for count in request.kept.sum(dim=0)] for layer in kept.layers
    ]


@pytest.mark.skipif(not HAS_GPU, reason="CUDA graphs need a GPU")
def test_a_captured_graph_serves_later_steps() -> None:
    backend = attention.TritonBackend(torch.device("cuda"), num_splits=4)
    first, later = (
        random_kept(sizes, group=4, head_dim=64, dtype=torch.bfloat16, device="cuda")
        for sizes in ([(40, 1), (9, 1)], [(40, 1), (9, 1)])
    )
    lists = backend.lists(first.tables, first.requests)[0]
    queries = first.queries(0).cuda()
    backend.decode(queries, first.k_cells, first.v_cells, lists, SCALING)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = backend.decode(queries, first.k_cells, first.v_cells, lists, SCALING)
    # The other layer has lists of other lengths.
    new = backend.lists(later.tables, later.requests)[1]
    for old, now in ((lists.arena, new.arena), (lists.starts, new.starts), (lists.lengths, new.lengths),
                     (first.k_cells, later.k_cells), (first.v_cells, later.v_cells),
                     (queries, later.queries(1))):  # fmt: skip
        old.copy_(now)
    graph.replay()
    assert_within_twice_torch(result.cpu(), later.layers[1], SCALING)


def test_auto_is_torch_on_a_cpu_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, attention.__name__):
        backend = resolve_backend("auto", "cpu")
    assert isinstance(backend, attention.TorchBackend)
    assert caplog.messages == ["attention over kept tokens runs on cpu, backend torch (asked for: auto)"]


def test_auto_is_triton_on_a_gpu() -> None:
    assert resolve_backend("auto", "cuda").name == "triton"


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("sdpa", "cpu", "attention backend 'sdpa' is unknown: expected one of auto, torch, triton, flashinfer"),
        ("torch", "cuda:1", "attention backend torch on cuda:1: it is for the CPU"),
        ("flashinfer", "cpu", "attention backend flashinfer on cpu: it is for NVIDIA GPUs"),
        ("triton", "meta", "attention backend triton on meta: it is for GPUs"),
        ("auto", "meta", "attention backend triton on meta: it is for GPUs"),
    ],
)
def test_a_backend_that_cannot_be_had_is_refused(name: str, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_backend(name, device)


def test_triton_on_a_cpu_is_refused_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "IS_INTERPRETED", False)
    with pytest.raises(ConfigError, match="attention backend triton on cpu: it is for GPUs; use torch on a CPU"):
        resolve_backend("triton", "cpu")


@pytest.mark.parametrize("name", ["triton", "flashinfer", "auto"])
def test_a_package_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: str) -> None:
        raise ImportError(f"No module named {module!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    package = "flashinfer" if name == "flashinfer" else "triton"
    with pytest.raises(ConfigError, match=f"needs the package {package}, which cannot be imported .* install it"):
        resolve_backend(name, "cuda")
