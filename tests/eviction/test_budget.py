from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.eviction.budget import MAX_EVICTION, Budget, Scope


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "got none: set exactly one"),
        ({"keep_fraction": 0.3, "keep_tokens": 100}, "got keep_fraction and keep_tokens"),
        ({"keep_fraction": 0.0}, "keep_fraction is 0.0: expected a number above 0"),
        ({"keep_fraction": 1.01}, "keep_fraction is 1.01: expected a number between 0 and 1"),
        ({"keep_fraction": float("nan")}, "keep_fraction is nan"),
        ({"keep_fraction": "0.3"}, "keep_fraction is '0.3'"),
        ({"keep_fraction": True}, "keep_fraction is True"),
        ({"keep_tokens": 0}, "keep_tokens is 0: expected a whole number of tokens, at least 1"),
        ({"keep_tokens": 4096.0}, "keep_tokens is 4096.0"),
        ({"keep_mass": 0}, "keep_mass is 0"),
        ({"keep_mass": 0.9, "least_fraction": 0.7}, "least_fraction is 0.7, above most_fraction, 0.6"),
        ({"keep_mass": 0.9, "most_fraction": 2}, "most_fraction is 2"),
        ({"keep_fraction": 0.3, "sink_tokens": -1}, "sink_tokens is -1: expected a whole number of tokens, at least 0"),
        ({"keep_fraction": 0.3, "window_tokens": None}, "window_tokens is None: .* or 'auto'"),
        ({"keep_fraction": 0.3, "window_tokens": "all"}, "window_tokens is 'all'"),
        ({"keep_fraction": 0.3, "min_tokens": 1.5}, "min_tokens is 1.5"),
        ({"keep_fraction": 0.3, "safeguard": 1.5}, "safeguard is 1.5: .* or 'auto'"),
        ({"keep_fraction": 0.3, "scope": "layer"}, "scope is 'layer': expected one of Scope.GLOBAL, Scope.LAYER"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Budget(**fields)


def test_b_ev_19_extreme_eviction_needs_the_override() -> None:
    assert MAX_EVICTION < 0.9
    Budget(keep_fraction=0.15)
    extreme: list[dict[str, Any]] = [
        {"keep_fraction": 0.149},
        {"keep_fraction": 0.1},
        {"keep_mass": 0.9, "least_fraction": 0.1},
    ]
    for fields in extreme:
        with pytest.raises(ConfigError, match=r"evicts 0\.\d+ of the KV pairs: .* set allow_extreme"):
            Budget(**fields)
        Budget(**fields, allow_extreme=True)


def test_b_ev_19_a_fixed_size_is_judged_with_the_longest_context() -> None:
    budget = Budget(keep_tokens=4096)
    budget.check_context(0)
    budget.check_context(27_306)
    with pytest.raises(ConfigError, match=r"keep_tokens is 4096 of 32768 tokens of context, which evicts 0\.875"):
        budget.check_context(32_768)
    Budget(keep_tokens=4096, allow_extreme=True).check_context(32_768)
    Budget(keep_fraction=0.2).check_context(10**6)


def test_a_budget_is_read_from_a_table() -> None:
    table: dict[str, object] = {"keep_fraction": 0.3, "scope": "layer", "window_tokens": 128, "safeguard": "auto"}
    budget = msgspec.convert(table, Budget)
    assert budget == Budget(keep_fraction=0.3, scope=Scope.LAYER, window_tokens=128)
    assert msgspec.convert(msgspec.to_builtins(budget), Budget) == budget
    with pytest.raises(msgspec.ValidationError, match="set exactly one"):
        msgspec.convert({"scope": "head"}, Budget)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"keep_fraction": 0.3, "heads": 3}, Budget)


@pytest.mark.parametrize(
    ("num_tokens", "window"),
    [(0, 0), (3, 0), (100, 96), (132, 128), (1000, 128), (6400, 128), (10_000, 200), (16_383, 327), (16_384, 4096)],
)
def test_the_window_follows_the_context(num_tokens: int, window: int) -> None:
    assert Budget(keep_fraction=0.3).protected(num_tokens) == (min(4, num_tokens), window)


def test_sinks_and_window_do_not_overlap() -> None:
    budget = Budget(keep_fraction=0.3, sink_tokens=10, window_tokens=20)
    assert [budget.protected(count) for count in (5, 10, 25, 40)] == [(5, 0), (10, 0), (10, 15), (10, 20)]


@pytest.mark.parametrize(("fraction", "size", "count"), [(0.29, 100, 29), (0.3, 10, 3), (0.7, 33, 23), (1, 7, 7)])
def test_a_share_counts_as_the_decimal_it_is_written_as(fraction: float, size: int, count: int) -> None:
    budget = Budget(keep_fraction=fraction, scope=Scope.HEAD, sink_tokens=0, window_tokens=0, min_tokens=0)
    assert budget.target_pairs(1, size, 1) == count


def test_counts_are_rounded_down_in_the_unit_of_the_scope() -> None:
    # 0.3 x 11 tokens: 3.3 pairs of a head, 9.9 of a layer of 3 heads, 19.8 of 2 layers.
    budget = Budget(keep_fraction=0.3, sink_tokens=1, window_tokens=1, min_tokens=2)
    scoped = {scope: msgspec.structs.replace(budget, scope=scope).target_pairs(2, 11, 3) for scope in Scope}
    assert scoped == {Scope.GLOBAL: 19, Scope.LAYER: 18, Scope.HEAD: 18}


def test_forced_pairs_can_exceed_the_share() -> None:
    for scope in Scope:
        budget = Budget(keep_fraction=0.2, scope=scope, sink_tokens=4, window_tokens=16, min_tokens=8)
        assert budget.target_pairs(3, 50, 2) == 3 * 2 * 20
        starved = Budget(keep_fraction=0.2, scope=scope, sink_tokens=0, window_tokens=0, min_tokens=12)
        assert starved.target_pairs(3, 50, 2) == 3 * 2 * 12
        assert starved.target_pairs(3, 5, 2) == 3 * 2 * 5


def test_a_fixed_size_keeps_shorter_contexts_whole() -> None:
    for scope in Scope:
        budget = Budget(keep_tokens=200, scope=scope)
        assert budget.target_pairs(4, 150, 3) == 4 * 150 * 3
        assert budget.target_pairs(4, 1000, 3) == 4 * 200 * 3


def test_an_adaptive_share_stays_within_its_clamps() -> None:
    budget = Budget(keep_mass=0.9, least_fraction=0.25, most_fraction=0.5)
    shares = [Fraction(1, 10), Fraction(1, 4), Fraction(2, 5), Fraction(9, 10)]
    assert [budget.fraction(100, share) for share in shares] == [
        Fraction(1, 4),
        Fraction(1, 4),
        Fraction(2, 5),
        Fraction(1, 2),
    ]
    assert budget.fraction(100) == Fraction(1, 2)
    assert budget.target_pairs(2, 1000, 3) == 3000


@pytest.mark.parametrize("scope", [Scope.GLOBAL, Scope.LAYER])
def test_the_safeguard_deals_out_a_share_of_the_budget(scope: Scope) -> None:
    budget = Budget(keep_fraction=0.5, scope=scope, safeguard=0.3, min_tokens=0)
    # 0.3 x 47 pairs = 14.1: 14 pairs for 4 heads, or for 2 layers of 4 heads.
    floors = budget.head_floors(2, 4, 47)
    expected = [[4, 4, 3, 3]] * 2 if scope is Scope.LAYER else [[2, 2, 2, 2], [2, 2, 1, 1]]
    assert floors == expected


@given(st.sampled_from(list(Scope)), st.integers(1, 4), st.integers(1, 4), st.floats(0, 1), st.integers(0, 200))
def test_one_more_pair_of_budget_forces_at_most_one_more(
    scope: Scope, num_layers: int, num_heads: int, safeguard: float, pairs: int
) -> None:
    budget = Budget(keep_fraction=0.5, scope=scope, safeguard=safeguard, min_tokens=3)
    fewer, more = (budget.head_floors(num_layers, num_heads, count) for count in (pairs, pairs + 1))
    units = [[*itertools.chain(*fewer)]], [[*itertools.chain(*more)]]
    if scope is not Scope.GLOBAL:
        units = fewer, more
    for before, after in zip(*units, strict=True):
        rises = [high - low for low, high in zip(before, after, strict=True)]
        assert min(rises) >= 0
        assert sum(rises) <= 1


def test_a_context_without_pairs_has_no_target() -> None:
    for shape in ((0, 5, 2), (3, 0, 2), (3, 5, 0)):
        assert Budget(keep_tokens=7).target_pairs(*shape) == 0


def test_budgets_are_frozen_and_hashable() -> None:
    budget = Budget(keep_fraction=0.3)
    assert len({budget, Budget(keep_fraction=0.3), Budget(keep_fraction=0.4)}) == 2
    with pytest.raises(AttributeError):
        budget.keep_fraction = 0.5  # type: ignore[misc]
