"""What FlashInfer is given, up to its first kernel: by stand-ins with its signatures that attend in torch.

With a GPU the same batches go through FlashInfer itself.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, ClassVar

import flashinfer
import pytest
import torch
from eviction.kept_cells import Kept, kept_in_pool, random_kept
from eviction.plain_attention import assert_within_twice_torch
from flashinfer.page import get_seq_lens

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.eviction.attention import decode_attention, extend_attention
from sglang_kvtc.kernels.attention import resolve_backend
from sglang_kvtc.kernels.flashinfer_attention import FlashInferBackend

SCALING = 0.3
WORKSPACE_BYTES = 1 << 10
DECODE, PREFILL = flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper


def bound(function: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    """Arguments by name, as `function` would take them."""
    result = inspect.signature(function).bind(None, *arguments, **options)
    result.apply_defaults()
    return dict(result.arguments)


def assert_ints(*arrays: torch.Tensor) -> None:
    """FlashInfer's kernels take int32; what is planned from lies on the host, or it would wait for the device."""
    for array in arrays:
        assert array.dtype == torch.int32 and array.device.type == "cpu" and array.is_contiguous()


class StandIn:
    """One of FlashInfer's wrappers: takes the same arguments, records plans, and attends in torch."""

    real: ClassVar[Any]
    plan_of: ClassVar[Any]
    made: ClassVar[list[StandIn]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.options = bound(self.real.__init__, *arguments, **options)
        self.plans: list[dict[str, Any]] = []
        self.made.append(self)

    def reset_workspace_buffer(self, *arguments: Any, **options: Any) -> None:
        self.options |= bound(self.real.reset_workspace_buffer, *arguments, **options)

    def plan(self, *arguments: Any, **options: Any) -> None:
        bound(self.real.plan, *arguments, **options)
        self.plans.append(bound(self.plan_of, *arguments, **options))

    def attend(self, arguments: dict[str, Any], names: tuple[str, ...], *new_lens: list[int]) -> None:
        plan, (k_cache, v_cache) = self.plans[-1], arguments["paged_kv_cache"]
        kv_indptr, kv_indices, last_page_len = (plan[name] for name in names)
        queries, out = arguments["q"], arguments["out"]
        assert_ints(kv_indptr, last_page_len)
        assert kv_indices.dtype == torch.int32
        assert torch.equal(get_seq_lens(kv_indptr, last_page_len, 1), kv_indptr.diff())
        assert (plan["num_kv_heads"], plan["page_size"], plan["pos_encoding_mode"]) == (1, 1, "NONE")
        assert k_cache.shape[1:3] == v_cache.shape[1:3] == (1, 1) and k_cache.stride() == v_cache.stride()
        assert queries.shape == out.shape and queries.shape[1] == plan["num_qo_heads"]
        assert out.is_contiguous() and queries.stride(2) == 1
        assert queries.dtype == plan["q_data_type"] and k_cache.dtype == plan["kv_data_type"]
        function: Any = extend_attention if new_lens else decode_attention
        function(queries, k_cache[:, 0, 0], v_cache[:, 0, 0], kv_indptr, kv_indices, *new_lens, plan["sm_scale"], out)


class DecodeStandIn(StandIn):
    real, plan_of, made = DECODE, staticmethod(DECODE._plan_impl), []

    def run(self, *arguments: Any, **options: Any) -> None:
        assert self.plans[-1]["head_dim"] in (64, 128)
        self.attend(bound(DECODE.run, *arguments, **options), ("indptr", "indices", "last_page_len"))


class PrefillStandIn(StandIn):
    real, plan_of, made = PREFILL, staticmethod(PREFILL.plan), []

    def run(self, *arguments: Any, **options: Any) -> None:
        plan = self.plans[-1]
        assert plan["causal"] is True
        assert_ints(plan["qo_indptr"])
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        self.attend(bound(PREFILL.run, *arguments, **options), names, plan["qo_indptr"].diff().tolist())


@pytest.fixture
def backend() -> FlashInferBackend:
    """On a GPU FlashInfer itself, without one its stand-ins."""
    if torch.cuda.is_available():
        return FlashInferBackend(torch.device("cuda"), flashinfer)
    return stood_in()


def stood_in() -> FlashInferBackend:
    DecodeStandIn.made, PrefillStandIn.made = [], []
    package = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=DecodeStandIn, BatchPrefillWithPagedKVCacheWrapper=PrefillStandIn
    )
    return FlashInferBackend(torch.device("cpu"), package, WORKSPACE_BYTES)


def decoding(group: int = 2, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Kept:
    return random_kept([(40, 1), (9, 1), (1, 1)], group=group, head_dim=64, dtype=dtype, device=device)


def extending(group: int = 2, device: str = "cpu") -> Kept:
    sizes = [(40, 1), (9, 9), (20, 0), (30, 7)]
    return random_kept(sizes, group=group, head_dim=64, dtype=torch.float16, device=device)


def run(backend: FlashInferBackend, kept: Kept, *, is_decode: bool, **options: Any) -> list[torch.Tensor]:
    attend = backend.decode if is_decode else backend.extend
    return [
        attend(kept.queries(layer).to(kept.k_cells.device), kept.k_cells, kept.v_cells, lists, SCALING, **options)
        for layer, lists in enumerate(
            backend.lists(kept.tables, kept.requests, None if is_decode else kept.new_lens)
        )
    ]  # fmt: skip


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_is_masked_dense_attention(backend: FlashInferBackend, group: int, dtype: torch.dtype) -> None:
    kept = decoding(group, dtype, "cuda" if torch.cuda.is_available() else "cpu")
    for result, requests in zip(run(backend, kept, is_decode=True), kept.layers, strict=True):
        assert_within_twice_torch(result.cpu(), requests, SCALING)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_extend_is_masked_dense_attention(backend: FlashInferBackend, group: int) -> None:
    kept = extending(group, "cuda" if torch.cuda.is_available() else "cpu")
    for result, requests in zip(run(backend, kept, is_decode=False), kept.layers, strict=True):
        assert_within_twice_torch(result.cpu(), requests, SCALING)


def test_every_layer_is_planned_once_per_step() -> None:
    backend, kept = stood_in(), decoding()
    lists = backend.lists(kept.tables, kept.requests)
    for _ in range(2):
        for layer in range(2):
            backend.decode(kept.queries(layer), kept.k_cells, kept.v_cells, lists[layer], SCALING)
    assert [len(wrapper.plans) for wrapper in DecodeStandIn.made] == [1, 1]
    run(backend, kept, is_decode=True)
    assert [len(wrapper.plans) for wrapper in DecodeStandIn.made] == [2, 2]
    # Other scaling, other plan.
    backend.decode(kept.queries(0), kept.k_cells, kept.v_cells, lists[0], 0.5)
    backend.decode(kept.queries(0), kept.k_cells, kept.v_cells, lists[0], 0.25)
    assert [plan["sm_scale"] for plan in DecodeStandIn.made[0].plans] == [SCALING, SCALING, 0.5, 0.25]
    run(backend, extending(), is_decode=False)
    assert [len(wrapper.plans) for wrapper in PrefillStandIn.made] == [2]


@pytest.mark.parametrize(("group", "uses_tensor_cores"), [(1, False), (3, False), (4, True), (5, True)])
def test_wrappers_are_made_for_what_they_can_run(group: int, uses_tensor_cores: bool) -> None:
    backend = stood_in()
    run(backend, decoding(group), is_decode=True)
    run(backend, extending(group), is_decode=False)
    workspaces = set()
    for wrapper in (*DecodeStandIn.made, *PrefillStandIn.made):
        # fa2 for both: `auto` may choose kernels that take no pages of one cell.
        assert (wrapper.options["kv_layout"], wrapper.options["backend"]) == ("NHD", "fa2")
        assert not wrapper.options["use_cuda_graph"]
        workspaces.add(wrapper.options["float_workspace_buffer"].data_ptr())
        assert wrapper.options["float_workspace_buffer"].dtype == torch.uint8
        assert (wrapper.options["float_workspace_buffer"] == 0).all()
    assert len(workspaces) == 1
    assert {wrapper.options["use_tensor_cores"] for wrapper in DecodeStandIn.made} == {uses_tensor_cores}
    plans = [wrapper.options["int_workspace_buffer"] for wrapper in DecodeStandIn.made]
    assert len({plan.data_ptr() for plan in plans}) == 2
    assert all(plan.numel() == 1 << 20 and plan.dtype == torch.uint8 for plan in plans)


@pytest.mark.parametrize("is_decode", [True, False])
def test_queries_and_output_may_have_any_strides(backend: FlashInferBackend, is_decode: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kept = decoding(device=device) if is_decode else extending(device=device)
    expected = run(backend, kept, is_decode=is_decode)[0]
    out = torch.full((len(expected), 64, 4), float("nan"), dtype=expected.dtype, device=device).transpose(1, 2)
    lists = backend.lists(kept.tables, kept.requests, None if is_decode else kept.new_lens)[0]
    attend = backend.decode if is_decode else backend.extend
    queries = torch.cat([kept.queries(0)] * 2, dim=1).to(device)[:, :4]
    assert not queries.is_contiguous()
    assert attend(queries, kept.k_cells, kept.v_cells, lists, SCALING, out) is out
    assert torch.equal(out, expected)


def test_nothing_to_do_needs_no_plan() -> None:
    backend, kept = stood_in(), decoding()
    queries = kept.queries(0)
    nothing = backend.lists(kept.tables, [])[0]
    assert backend.decode(queries[:0], kept.k_cells, kept.v_cells, nothing, SCALING).shape == (0, 4, 64)
    nothing = backend.lists(kept.tables, [], [])[0]
    assert backend.extend(queries[:0], kept.k_cells, kept.v_cells, nothing, SCALING).shape == (0, 4, 64)
    idle = backend.lists(kept.tables, kept.requests, [0, 0, 0])[0]
    assert backend.extend(queries[:0], kept.k_cells, kept.v_cells, idle, SCALING).shape == (0, 4, 64)
    evicted = random_kept([(5, 0)], group=2, head_dim=64, dtype=torch.bfloat16)
    for request in (request for layer in evicted.layers for request in layer):
        request.kept[:] = False
    evicted = kept_in_pool(evicted.layers)
    lists = backend.lists(evicted.tables, evicted.requests)[0]
    assert (backend.decode(queries[:1], evicted.k_cells, evicted.v_cells, lists, SCALING) == 0).all()
    assert not any(wrapper.plans for wrapper in (*DecodeStandIn.made, *PrefillStandIn.made))


def cells(dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(90, dim, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_cells": cells(128)}, "do not fit: expected 3, 2 and 2 dimensions and one head size"),
        ({"queries": torch.zeros(3, 256).bfloat16()}, "do not fit: expected 3, 2 and 2 dimensions"),
        ({"k_cells": cells(dtype=torch.float32)}, "torch.bfloat16, torch.float32 and torch.bfloat16: flashinfer takes"),
        ({"v_cells": cells(128)}, r"flashinfer takes heads of \(64, 128, 256\), of one size for K and V; use triton"),
        (
            {"queries": torch.zeros(3, 4, 80).bfloat16(), "k_cells": cells(80), "v_cells": cells(80)},
            r"flashinfer takes heads of \(64, 128, 256\)",
        ),
        ({"v_cells": cells(128)[:, :64]}, r"k_cells have strides \(64, 1\) and v_cells \(128, 1\)"),
        ({"out": torch.zeros(3, 4, 64)}, r"out is torch.float32\[3, 4, 64\]: expected torch.bfloat16\[3, 4, 64\]"),
        ({"queries": torch.zeros(3, 5, 64).bfloat16()}, "there are 5 heads of queries for 2 KV heads"),
        ({"queries": torch.zeros(2, 4, 64).bfloat16()}, "there are 2 queries"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    backend, kept = stood_in(), decoding()
    fields = {"queries": kept.queries(0), "k_cells": cells(), "v_cells": cells(), "scaling": SCALING, **changes}
    with pytest.raises(ConfigError, match=message):
        backend.decode(lists=backend.lists(kept.tables, kept.requests)[0], **fields)
    with pytest.raises(ConfigError, match=message):
        backend.extend(lists=backend.lists(kept.tables, kept.requests, kept.new_lens)[0], **fields)


def test_flashinfer_is_had_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_kvtc.kernels.flashinfer_attention.WORKSPACE_BYTES", 16)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, **options: zeros(*shape, **options))
    assert resolve_backend("flashinfer", "cuda").name == "flashinfer"
