"""Lives of gated requests over real pools: what is kept is what the oracle of tests/eviction keeps."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch
from eviction.plain_selection import plain_keep_mask
from integration.gated_engine import PER_TOKEN, Engine, H, L, gate_file, request

from sglang_kvtc.config import EvictionConfig
from sglang_kvtc.eviction.budget import DECODE_WINDOW
from sglang_kvtc.integration.gating import Gating

BUDGETS: list[dict[str, Any]] = [
    {"keep_fraction": 0.4, "sink_tokens": 2, "window_tokens": 5, "min_tokens": 3},
    {"keep_tokens": 12, "sink_tokens": 1, "window_tokens": 4, "min_tokens": 2, "scope": "layer"},
    {"keep_fraction": 0.3, "sink_tokens": 0, "window_tokens": 3, "min_tokens": 0, "scope": "head"},
    {"keep_mass": 0.5, "sink_tokens": 1, "window_tokens": 2, "least_fraction": 0.25},
]
by_budget = pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: next(iter(budget)))


def small_window(engine: Engine, window: int = 4) -> None:
    """The window of evictions during generation is 128, longer than most requests here."""
    engine.gating.decode_budget = msgspec.structs.replace(engine.gating.decode_budget, window_tokens=window)


class Expected:
    """What should exist of one request's own tokens, kept from forward pass to forward pass."""

    def __init__(self, engine: Engine, req: Any) -> None:
        self.engine, self.req = engine, req
        self.alive = torch.ones(L, 0, H, dtype=torch.bool)
        self.length = self.since = 0

    def forward(self, count: int, *, is_prompt: bool) -> None:
        gating, first = self.engine.gating, self.req.kv.cache_protected_len
        self.alive = torch.cat([self.alive, torch.ones(L, count, H, dtype=torch.bool)], dim=1)
        self.length += count
        self.since += count
        if (is_prompt and count > 1) or self.since >= gating.interval:
            self.since = 0
            budget = gating.budget if is_prompt else gating.decode_budget
            self.alive = plain_keep_mask(self.engine.pool.scores[:, self.engine.own(self.req)], budget, self.alive)
        assert self.length == self.req.kv.kv_allocated_len - first
        assert torch.equal(self.engine.pool.cells.alive(self.engine.own(self.req)), self.alive)


@by_budget
@pytest.mark.parametrize("seed", range(2))
def test_a_load_of_requests_keeps_its_budgets_and_leaves_nothing_behind(budget: dict[str, Any], seed: int) -> None:
    """Prompts in chunks, decode steps in changing batches, retractions; gated and ungated requests side by side."""
    rng = random.Random(seed)
    engine = Engine(budget, size=300, rows=5, interval=6, seed=seed)
    small_window(engine)
    running: list[Any] = []
    expected: dict[int, Expected] = {}

    def step(batch: list[Any], counts: list[int] | None = None) -> None:
        tables = engine.forward(batch, counts)
        for layer, lists in enumerate(engine.lists):
            assert tables[layer].kv_indptr.diff().tolist() == [len(cells) for cells in lists]
            assert tables[layer].kv_indices.tolist() == [cell for cells in lists for cell in cells]
        for req, count in zip(batch, counts or [1] * len(batch), strict=True):
            if id(req) in expected:
                expected[id(req)].forward(count, is_prompt=counts is not None)
            else:
                assert bool(engine.pool.cells.alive(engine.slots(req)).all())
        engine.pool.cells.check()

    def begin(req: Any, num_chunks: int) -> None:
        engine.begin(req)
        if hasattr(req, "kvtc_gated"):
            expected[id(req)] = Expected(engine, req)
        running.append(req)
        for _ in range(num_chunks):
            step([req], [rng.randint(1, 25)])

    for number in range(30):
        choice = rng.choice(["begin", "decode", "decode", "end"])
        if choice == "begin" and engine.free_rows and engine.allocator.available_size() > 100:
            req = request(custom={"kvtc_gated": False} if number % 3 == 0 else None)
            engine.gating.enter(req, publishes=True)
            begin(req, rng.randint(1, 3))
        elif choice == "decode" and running and engine.allocator.available_size() > 40:
            batch = rng.sample(running, rng.randint(1, len(running)))
            for _ in range(rng.randint(1, 9)):
                step(batch)
        elif choice == "end" and len(running) > 1:
            req = running.pop(rng.randrange(len(running)))
            engine.finish(req)
            expected.pop(id(req), None)
            if rng.random() < 0.5:
                # Retracted: it comes back in some row and starts again.
                begin(req, 1)
    assert engine.gating.counters.evictions > 3
    for req in running:
        engine.finish(req)
    assert engine.allocator.available_size() == 300
    assert engine.pool.cells.used_cells == 0
    assert not engine.gating.states.rows and not any(engine.gating.tables.is_known(range(5)))


@pytest.mark.parametrize("budget", BUDGETS[:3], ids=lambda budget: next(iter(budget)))
@pytest.mark.parametrize("num_tokens", [3, 20, 61])
def test_b_ev_07_a_prompt_holds_exactly_its_budget(budget: dict[str, Any], num_tokens: int) -> None:
    engine = Engine(budget)
    req = request()
    engine.gating.enter(req, publishes=False)
    engine.begin(req)
    engine.forward([req], [num_tokens])
    target = int(plain_keep_mask(engine.pool.scores[:, engine.own(req)], engine.gating.budget).sum())
    assert engine.pool.cells.used_cells == target == req.kvtc_gated.held_pairs
    assert engine.allocator.available_size() == 200 - -(-target // PER_TOKEN)
    assert engine.gating.counters.evicted_pairs == num_tokens * PER_TOKEN - target
    assert engine.gating.stats()["used_cells"] == target


def test_while_it_generates_a_request_is_evicted_from_every_interval_and_keeps_the_decode_window() -> None:
    engine = Engine({"keep_fraction": 0.2, "sink_tokens": 1, "window_tokens": 2, "min_tokens": 0}, interval=16)
    assert engine.gating.decode_budget == msgspec.structs.replace(engine.gating.budget, window_tokens=DECODE_WINDOW)
    req = request()
    engine.gating.enter(req, publishes=False)
    engine.begin(req)
    engine.forward([req], [30])
    held = [engine.pool.cells.used_cells]
    for _ in range(DECODE_WINDOW + 40):
        engine.forward([req])
        held.append(engine.pool.cells.used_cells)
    drops = [step for step in range(1, len(held)) if held[step] < held[step - 1] + PER_TOKEN]
    assert held[0] == 30 * PER_TOKEN // 5
    assert len(drops) >= 2 and all(step % 16 == 0 for step in drops)
    alive = engine.pool.cells.alive(engine.own(req))
    last = len(held) - 1 - (len(held) - 1) % 16 + 30
    assert bool(alive[:, last - DECODE_WINDOW :].all())
    assert engine.peak_used <= (1 + DECODE_WINDOW + 16) * PER_TOKEN


def test_b_ev_05_a_prefix_that_others_share_is_never_touched() -> None:
    engine = Engine(BUDGETS[0], interval=5)
    small_window(engine)
    shared = engine.allocator.alloc(20)
    cells = engine.pool.cells_of(shared)
    for layer in range(L):
        content = torch.randn(2, 20, H, 4, generator=torch.Generator().manual_seed(layer))
        engine.pool.store(cells[layer], *content)
    engine.pool.scores[:, shared] = 0.0
    table = engine.pool.cells.table[:, shared].clone()
    content = [part[cells].clone() for part in (engine.pool.k_cells, engine.pool.v_cells)]
    reqs = [request(shared), request(shared[:13]), request(shared, custom={"kvtc_gated": False})]
    for req in reqs:
        engine.gating.enter(req, publishes=True)
        engine.begin(req)
        engine.forward([req], [25])
    books = [Expected(engine, req) for req in reqs[:2]]
    for book in books:
        book.alive, book.length, book.since = engine.pool.cells.alive(engine.own(book.req)), 25, 0
        assert int(book.alive.sum()) == 10 * PER_TOKEN
    for _ in range(23):
        tables = engine.forward(reqs)
        for book in books:
            book.forward(1, is_prompt=False)
        for layer in range(L):
            for entry in range(len(reqs) * H):
                first = int(tables[layer].kv_indptr[entry])
                count = len(reqs[entry // H].prefix)
                listed = tables[layer].kv_indices[first : first + count]
                assert torch.equal(listed, table[layer, :count, entry % H])
    engine.finish(reqs.pop(1))
    engine.forward(reqs)
    assert torch.equal(engine.pool.cells.table[:, shared], table)
    for before, part in zip(content, (engine.pool.k_cells, engine.pool.v_cells), strict=True):
        assert torch.equal(part[cells], before)
    for req in reqs:
        engine.finish(req)
    assert engine.allocator.available_size() == 180


def test_scores_decide_which_pairs_stay() -> None:
    """The gates' scores of the pairs that stay beside sinks and window are no lower than those that go."""
    engine = Engine({"keep_fraction": 0.5, "sink_tokens": 2, "window_tokens": 3, "min_tokens": 0}, seed=3)
    req = request()
    engine.gating.enter(req, publishes=False)
    engine.begin(req)
    engine.forward([req], [40])
    scores, alive = engine.pool.scores[:, engine.own(req)], engine.pool.cells.alive(engine.own(req))
    assert bool(alive[:, :2].all() & alive[:, -3:].all())
    middle, kept = scores[:, 2:-3], alive[:, 2:-3]
    assert middle[kept].min() >= middle[~kept].max()


def test_a_short_request_stays_whole_and_what_it_holds_is_known() -> None:
    engine = Engine({"keep_fraction": 0.5})
    req = request()
    engine.gating.enter(req, publishes=False)
    engine.begin(req)
    engine.forward([req], [60])
    assert engine.gating.counters.evictions == 0
    assert req.kvtc_gated.held_pairs == 60 * PER_TOKEN == engine.pool.cells.used_cells


def test_what_a_request_holds_is_known_where_an_eviction_finds_nothing_to_evict() -> None:
    """The window of generation is wider than the prompt's, so that nothing goes at first; but part is gone already."""
    engine = Engine({"keep_fraction": 0.3, "sink_tokens": 0, "window_tokens": 4, "min_tokens": 0}, interval=8)
    req = request()
    engine.gating.enter(req, publishes=False)
    engine.begin(req)
    engine.forward([req], [40])
    for _ in range(8):
        engine.forward([req])
    assert engine.pool.cells.used_cells == (12 + 8) * PER_TOKEN
    assert req.kvtc_gated.evicted_at == 48
    assert req.kvtc_gated.held_pairs == engine.pool.cells.used_cells


@pytest.mark.parametrize("custom", [{"kvtc_gated": False}, {"kvtc_gated": False, "more": 1}])
def test_a_request_that_opts_out_is_a_stock_one(custom: dict[str, Any]) -> None:
    engine = Engine(BUDGETS[0])
    req = request(custom=custom, extra_key="mine")
    engine.gating.enter(req, publishes=False)
    assert not hasattr(req, "kvtc_gated") and req.extra_key == "mine" and not req.skip_radix_cache_insert
    engine.begin(req)
    engine.forward([req], [50])
    assert engine.pool.cells.used_cells == 50 * PER_TOKEN
    assert engine.gating.counters.gated_requests == 0


@pytest.mark.parametrize("custom", [None, {}, {"kvtc_gated": True}, {"other": False}, "text"])
def test_others_are_gated_in_a_namespace_of_their_own_and_only_once(custom: object) -> None:
    engine = Engine(BUDGETS[0])
    reqs = [request(custom=custom, extra_key=key) for key in (None, "mine", "yours")]
    for req in reqs * 2:
        engine.gating.enter(req, publishes=True)
    keys = [req.extra_key for req in reqs]
    assert len({None, "mine", "yours", *keys}) == 6
    assert all(key.startswith(f"{own}\x1fkvtc-gated-") for own, key in zip(("", "mine", "yours"), keys, strict=True))
    assert not any(req.skip_radix_cache_insert for req in reqs)
    assert engine.gating.counters.gated_requests == 3
    unpublished = request()
    engine.gating.enter(unpublished, publishes=False)
    assert unpublished.skip_radix_cache_insert


def test_namespaces_differ_by_whatever_changes_what_is_evicted() -> None:
    engine = Engine({"keep_fraction": 0.5})

    def namespace(digest: bytes = b"d" * 16, interval: int = 8, **budget: Any) -> str:
        config = EvictionConfig(gates="toy", budget={"keep_fraction": 0.5, **budget}, decode_interval=interval)
        return Gating(config, gate_file(digest), engine.pool, engine.table, torch.float32).namespace

    assert namespace() == engine.gating.namespace == namespace(sink_tokens=4)
    different = [
        namespace(),
        namespace(b"e" * 16),
        namespace(interval=9),
        namespace(sink_tokens=5),
        namespace(scope="layer"),
        namespace(keep_fraction=0.50001),
    ]
    assert len(set(different)) == len(different)
