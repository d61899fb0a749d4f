from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvtc.artifact.schema import GROUP_SIZES, MAX_WIDTH, PARAM_BITS, Group, SidePlan
from sglang_kvtc.codec.allocate import (
    SAMPLE_TOKENS,
    Allocator,
    ErrorTable,
    allocate,
    error_table,
    optimal_split,
    side_plan,
)
from sglang_kvtc.codec.quantize import GroupedQuantizer
from sglang_kvtc.errors import ConfigError


def falling_coefficients(num_tokens: int, rank: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((num_tokens, rank)) * (1 + np.arange(rank)) ** -0.7).astype(np.float32)


def bits(groups: tuple[Group, ...]) -> int:
    return sum(group.size * group.width + PARAM_BITS for group in groups)


def random_table(rng: np.random.Generator, rank: int, sizes: tuple[int, ...]) -> ErrorTable:
    variances = np.sort(rng.random(rank))[::-1] * rng.choice([1.0, 10.0])
    errors = {}
    for size in sizes:
        if size <= rank:
            of_start = np.array([variances[start : start + size].sum() for start in range(rank - size + 1)])
            # Any errors will do for the search, also ones that rise with the width or exceed the variance.
            errors[size] = of_start * rng.random((MAX_WIDTH, rank - size + 1)) * 1.2
    return ErrorTable(errors, variances)


def all_allocations(table: ErrorTable, start: int, budget: int) -> Iterator[tuple[Group, ...]]:
    """Every way to cut the components from `start` on into groups and dropped ones within the budget."""
    rank = len(table.variances)
    if start == rank:
        yield ()
        return
    yield from all_allocations(table, start + 1, budget)
    for size in table.errors:
        if start + size > rank:
            continue
        for width in range(1, MAX_WIDTH + 1):
            cost = size * width + PARAM_BITS
            if cost <= budget:
                for rest in all_allocations(table, start + size, budget - cost):
                    yield (Group(start, size, width), *rest)


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([(1,), (1, 2), (2, 3), (1, 16)]), st.integers(1, 6), st.integers(0, 90)
)
def test_no_allocation_beats_the_one_that_is_found(seed: int, sizes: tuple[int, ...], rank: int, budget: int) -> None:
    table = random_table(np.random.default_rng(seed), rank, sizes)
    found = allocate(table, budget)
    least = min(table.error(groups) for groups in all_allocations(table, 0, budget))
    assert bits(found) <= budget
    assert table.error(found) == pytest.approx(least, rel=1e-12)


def test_no_allocation_of_three_groups_beats_the_one_that_is_found() -> None:
    table = random_table(np.random.default_rng(7), 5, (1, 2))
    for budget in (99, 110, 125):
        least = min(table.error(groups) for groups in all_allocations(table, 0, budget))
        assert table.error(allocate(table, budget)) == pytest.approx(least, rel=1e-12)


def test_one_solution_serves_every_budget() -> None:
    table = error_table(falling_coefficients(64, 200))
    allocator = Allocator(table, 900)
    for budget in (0, 32, 33, 48, 200, 555, 900):
        groups = allocator.groups(budget)
        assert groups == allocate(table, budget)
        assert bits(groups) <= budget
        assert table.error(groups) == pytest.approx(allocator.errors[budget], rel=1e-12)


def test_more_bits_never_cost_more_error() -> None:
    errors = Allocator(error_table(falling_coefficients(64, 300)), 1500).errors
    assert (np.diff(errors) <= 0).all()
    assert errors[1500] < errors[0]


def test_groups_are_disjoint_and_in_order() -> None:
    groups = allocate(error_table(falling_coefficients(64, 500)), 2000)
    assert len(groups) > 3
    for before, after in itertools.pairwise(groups):
        assert before.start + before.size <= after.start
    assert all(group.size in GROUP_SIZES and 1 <= group.width <= MAX_WIDTH for group in groups)


def test_a_budget_too_small_for_any_group_buys_none() -> None:
    table = error_table(falling_coefficients(32, 40))
    assert allocate(table, PARAM_BITS) == ()
    assert side_plan(table, (), float(table.variances.sum())).predicted_error == pytest.approx(1.0)


@pytest.mark.parametrize("size", GROUP_SIZES)
def test_errors_are_those_of_really_quantising(size: int) -> None:
    coefficients = falling_coefficients(50, 1100)
    table = error_table(coefficients)
    by_component = torch.from_numpy(coefficients.T.copy())
    spacing = max(1, size // 16)
    for start, width in itertools.product((0, spacing, 1100 - size), (1, 3, 8)):
        rows = by_component[start : start + size]
        quantizer = GroupedQuantizer.from_plan(SidePlan((Group(0, size, width),), 0.0))
        quantized = quantizer.quantize(rows)
        assert quantized is not None
        decoded = torch.empty(rows.shape)
        quantizer.dequantize(*quantized, decoded)
        expected = float((decoded - rows).double().square().sum()) / 50
        # Both are sums in fp32 of differences in fp32.
        assert table.errors[size][width - 1, start] == pytest.approx(expected, rel=1e-3)


def test_errors_between_measured_starts_are_interpolated() -> None:
    errors = error_table(falling_coefficients(40, 200)).errors[64]
    assert errors.shape == (MAX_WIDTH, 137)
    np.testing.assert_allclose(errors[:, 5], (3 * errors[:, 4] + errors[:, 8]) / 4, rtol=1e-12)


@pytest.mark.parametrize("weight", [0.01, 1.0, 100.0])
def test_no_split_of_a_total_beats_the_one_that_is_found(weight: float) -> None:
    k, v = (Allocator(error_table(falling_coefficients(64, rank, seed)), 1200) for rank, seed in ((200, 1), (120, 2)))
    for total in (0, 33, 300, 1200):
        found = optimal_split(k.errors, weight * v.errors, total)
        losses = [k.errors[own] + weight * v.errors[total - own] for own in range(total + 1)]
        assert losses[found] == min(losses)
        assert found == losses.index(min(losses))


def test_a_side_that_counts_more_gets_more_bits() -> None:
    errors = Allocator(error_table(falling_coefficients(64, 200)), 1000).errors
    shares = [optimal_split(weight * errors, errors, 1000) for weight in (0.1, 1.0, 10.0)]
    assert shares[0] < shares[1] < shares[2]


@pytest.mark.parametrize("total", [-1, 6])
def test_a_total_beyond_the_curves_cannot_be_split(total: int) -> None:
    with pytest.raises(ConfigError, match=f"{total} bits per token cannot be split"):
        optimal_split(np.ones(6), np.ones(9), total)


def test_sizes_above_the_rank_are_left_out() -> None:
    table = error_table(falling_coefficients(20, 63))
    assert set(table.errors) == {1, 16}
    assert max(group.size for group in allocate(table, 500)) == 16


def test_a_long_sample_is_thinned_evenly() -> None:
    coefficients = falling_coefficients(4 * SAMPLE_TOKENS + 1, 20)
    picked = coefficients[np.unique(np.linspace(0, 4 * SAMPLE_TOKENS, SAMPLE_TOKENS).astype(int))]
    assert len(picked) == SAMPLE_TOKENS
    np.testing.assert_array_equal(error_table(coefficients).errors[16], error_table(picked).errors[16])


def test_predicted_error_counts_what_lies_outside_of_the_components() -> None:
    table = error_table(falling_coefficients(64, 100))
    inside = float(table.variances.sum())
    groups = allocate(table, 400)
    plan = side_plan(table, groups, 2 * inside)
    assert plan.groups == groups
    assert plan.bits_per_token <= 400
    assert plan.predicted_error == pytest.approx((table.error(groups) + inside) / (2 * inside))


def test_progress_is_told_in_components() -> None:
    told: list[int] = []
    table = error_table(falling_coefficients(20, 70), on_components=told.append)
    assert sum(told) == 70 * len(GROUP_SIZES)
    told.clear()
    Allocator(table, 300, told.append)
    assert sum(told) == 70


@pytest.mark.parametrize("shape", [(0, 10), (10, 0)])
def test_an_empty_sample_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="sample"):
        error_table(np.zeros(shape, np.float32))


def test_a_budget_outside_of_what_was_solved_is_refused() -> None:
    table = error_table(falling_coefficients(20, 30))
    with pytest.raises(ConfigError, match="-1"):
        Allocator(table, -1)
    with pytest.raises(ConfigError, match="101"):
        Allocator(table, 100).groups(101)
