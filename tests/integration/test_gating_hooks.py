"""The hooks of gated eviction, called as SGLang calls them, with stand-ins for its objects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integration.gated_engine import H, L, cell_allocator, cell_pool, request
from sglang.srt.managers.schedule_batch import ReqKvInfo

from sglang_kvtc.config import CONFIG_ENV
from sglang_kvtc.errors import UnsupportedError
from sglang_kvtc.integration import compat, gating_hooks
from sglang_kvtc.integration.cell_pool import CellAllocator, CellKVPool

TOML = '[eviction]\ngates = "toy"\n[eviction.budget]\nkeep_fraction = 0.3\n'


@pytest.fixture
def is_gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvtc.toml").write_text(TOML)
    monkeypatch.setenv(CONFIG_ENV, str(tmp_path / "kvtc.toml"))


@pytest.fixture
def is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_ENV, raising=False)


def configurator() -> Any:
    return SimpleNamespace(server_args=SimpleNamespace(), kv_cache_dtype=torch.float32, device="cpu")


@pytest.mark.usefixtures("is_gated")
def test_the_pool_holds_cells_with_the_slots_of_the_budget() -> None:
    asked = configurator()
    (positional,), arguments = gating_hooks.use_cells(asked, max_total_num_tokens=7, mha_pool_class=object)
    assert positional is asked and arguments["max_total_num_tokens"] == 7
    pool = arguments["mha_pool_class"](7, 1, torch.float32, H, 4, L, "cpu", False)
    assert isinstance(pool, CellKVPool) and pool.num_slots == 7 * 4 + 1


@pytest.mark.usefixtures("is_whole")
def test_without_gates_pool_and_allocator_are_stock() -> None:
    assert gating_hooks.use_cells(configurator(), mha_pool_class=object) is None
    built = gating_hooks.build_allocator(
        lambda _configurator, **_arguments: "stock", configurator(), token_to_kv_pool=1
    )
    assert built == "stock"


@pytest.mark.usefixtures("is_gated")
def test_the_allocator_hands_out_cells_or_the_start_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((gating_hooks, "check_hooks"), (compat, "check_engine_version"), (compat, "check_settings")):
        monkeypatch.setattr(module, name, lambda *_arguments: None)

    def build(pool: Any, present: Any = None) -> Any:
        sizes = SimpleNamespace(max_total_num_tokens=6)
        arguments = {"token_to_kv_pool": pool, "token_to_kv_pool_allocator": present, "sizes": sizes}
        return gating_hooks.build_allocator(lambda *_arguments, **_options: "stock", configurator(), **arguments)

    pool = cell_pool(6)
    allocator = build(pool)
    assert isinstance(allocator, CellAllocator) and allocator.pool is pool
    assert (allocator.size, allocator.available_size(), allocator.gating) == (6, 6, None)
    with pytest.raises(UnsupportedError, match="this model has SimpleNamespace"):
        build(SimpleNamespace())
    with pytest.raises(UnsupportedError, match="plain multi-head attention"):
        build(pool, allocator)


def checker(allocator: Any, requests: list[tuple[int, int, int]]) -> Any:
    """requests: (row, tokens of a shared prefix, all tokens); row r holds the slots from 20 r on."""
    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    owners = [
        SimpleNamespace(kv=ReqKvInfo(req_pool_idx=row, cache_protected_len=first, kv_allocated_len=end))
        for row, first, end in requests
    ]
    return SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        _requests_owning_rows=lambda: owners,
    )


def test_a_leak_the_engines_count_of_private_tokens_is_of_memory() -> None:
    allocator = cell_allocator(cell_pool(30))
    slots = torch.cat([torch.arange(20, 30), torch.arange(40, 45)])
    assert allocator.pool.cells.allocate(slots)
    # Of the first request's own 6 tokens go 5 pairs, of the second's 5 one: 38 of 44 pairs are left.
    keep = torch.ones(L, 15, H, dtype=torch.bool)
    keep[0, 4:9, 1] = False
    keep[1, 12, 0] = False
    allocator.pool.cells.evict(slots, keep)
    found = gating_hooks.uncached_sizes((11, 7), checker(allocator, [(1, 4, 10), (2, 0, 5)]))
    assert found == (-(-38 // 4), 7)
    assert allocator.available_size() + found[0] + 4 == 30


def test_a_leak_no_memory_is_missed_where_slots_are_short() -> None:
    """SGLang asserts that what is available and what requests hold add up to the pool, if told to check while busy."""
    allocator = cell_allocator(cell_pool(10, slots_per_token=1))
    slots = allocator.alloc(8)
    allocator.pool.cells.evict(slots, torch.zeros(L, 8, H, dtype=torch.bool))
    asked = checker(allocator, [(0, 0, 8)])
    asked.req_to_token_pool.req_to_token[0, :8] = slots.int()
    assert allocator.available_size() == 2
    assert allocator.available_size() + gating_hooks.uncached_sizes((8, 0), asked)[0] == 10


def test_the_count_of_a_stock_pool_is_left_alone() -> None:
    assert gating_hooks.uncached_sizes((11, 7), checker(SimpleNamespace(), [(1, 0, 5)])) == (11, 7)


class Calls:
    """Stands in for a Gating and notes what it is told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.publisher: object = None

    def enter(self, req: Any, *, publishes: bool) -> None:
        self.seen.append(("enter", req, publishes))

    def before_batch(self, reqs: list[Any]) -> None:
        self.seen.append(("before", reqs))

    def after_batch(self, reqs: list[Any]) -> None:
        self.seen.append(("after", reqs))

    def release(self, req: Any) -> None:
        self.seen.append(("release", req))


def scheduler(gating: Calls | None) -> Any:
    return SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(gating=gating))


def batch(*, is_idle: bool = False) -> Any:
    return SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: is_idle), reqs=["one", "two"])


def test_a_batch_is_run_between_the_two_calls() -> None:
    calls = Calls()

    def run(_scheduler: Any, of: Any, *more: Any, **options: Any) -> Any:
        calls.seen.append("run")
        return of, more, options

    of = batch()
    assert gating_hooks.around_batch(run, scheduler(calls), of, 1, two=2) == (of, (1,), {"two": 2})
    assert calls.seen == [("before", of.reqs), "run", ("after", of.reqs)]
    calls.seen.clear()
    gating_hooks.around_batch(run, scheduler(calls), batch(is_idle=True))
    gating_hooks.around_batch(run, scheduler(None), of)
    gating_hooks.around_batch(run, SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace()), of)
    assert calls.seen == ["run"] * 3


@pytest.mark.parametrize("publisher", [None, object()], ids=["alone", "with a tier"])
def test_requests_enter_and_leave(publisher: object) -> None:
    calls, req = Calls(), request()
    calls.publisher = publisher
    for configured, chunk in ((64, 64), (-1, None), (None, None)):
        gating_hooks.enter_queue(SimpleNamespace(**vars(scheduler(calls)), chunked_prefill_size=configured), req)
        assert calls.chunk_tokens == chunk
    assert calls.seen == [("enter", req, publisher is not None)] * 3
    del calls.seen[1:]
    gating_hooks.before_free(SimpleNamespace(kvtc_gating=calls), req)
    assert calls.seen == [("enter", req, publisher is not None), ("release", req)]
    gating_hooks.enter_queue(scheduler(None), req)
    gating_hooks.before_free(SimpleNamespace(), req)
    assert len(calls.seen) == 2
