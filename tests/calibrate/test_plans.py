"""Grouped plans: ratios of K and V apart, the best split of a total, the fewest bits within an error."""

from __future__ import annotations

import pytest
from calibrate.side_rows import GEOMETRY, fitted, rows_of, statistics_of

from sglang_kvtc.calibrate import plans
from sglang_kvtc.calibrate.fit import SideFit
from sglang_kvtc.calibrate.plans import (
    budget_bits,
    overall_ratio,
    plans_at_ratios,
    plans_with_best_split,
    plans_within_errors,
)
from sglang_kvtc.calibrate.progress import SilentProgress
from sglang_kvtc.codec.allocate import Allocator, ErrorTable, error_table
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import Side


@pytest.fixture(scope="module")
def fits() -> dict[Side, SideFit]:
    return {side: fitted(statistics_of(rows_of(side)), side) for side in Side}


@pytest.fixture(scope="module")
def tables(fits: dict[Side, SideFit]) -> dict[Side, ErrorTable]:
    return {side: error_table(fit.coefficients) for side, fit in fits.items()}


def test_ratios_of_k_and_v_apart_are_named_after_the_ratio_of_both(fits: dict[Side, SideFit]) -> None:
    pairs = ((8.0, 8.0), (16.0, 4.0), (4.0, 16.0))
    found = plans_at_ratios(fits, GEOMETRY, pairs, SilentProgress())
    k_features, v_features = (GEOMETRY.features(side) for side in Side)
    for plan, (k_ratio, v_ratio) in zip(found, pairs, strict=True):
        assert 0 < plan.k.bits_per_token <= budget_bits(k_features, k_ratio)
        assert 0 < plan.v.bits_per_token <= budget_bits(v_features, v_ratio)
        bits = k_features * 16 / k_ratio + v_features * 16 / v_ratio
        assert plan.target_ratio == pytest.approx(16 * (k_features + v_features) / bits)
    assert found[0].target_ratio == 8
    assert found[1].k.predicted_error > found[0].k.predicted_error > found[2].k.predicted_error
    assert found[1].v.predicted_error < found[0].v.predicted_error < found[2].v.predicted_error


def test_equal_ratios_keep_their_number() -> None:
    assert overall_ratio(GEOMETRY, 12.7, 12.7) == 12.7


def test_the_best_split_loses_no_more_in_sum_than_any_other_of_the_same_bits(
    fits: dict[Side, SideFit], tables: dict[Side, ErrorTable]
) -> None:
    fixed = plans_at_ratios(fits, GEOMETRY, [(ratio, ratio) for ratio in (4.0, 8.0, 16.0)], SilentProgress())
    best = plans_with_best_split(fits, (4.0, 8.0, 16.0), SilentProgress())
    for plan, other in zip(best, fixed, strict=True):
        assert plan.target_ratio == other.target_ratio
        total = sum(budget_bits(GEOMETRY.features(side), plan.target_ratio) for side in Side)
        assert plan.k.bits_per_token + plan.v.bits_per_token <= total
        curves = {side: fits[side].lost_shares(Allocator(tables[side], total).errors) for side in Side}
        least = min(curves[Side.K][k_bits] + curves[Side.V][total - k_bits] for k_bits in range(total + 1))
        lost = plan.k.predicted_error + plan.v.predicted_error
        assert lost == pytest.approx(least, rel=1e-9)
        assert lost <= other.k.predicted_error + other.v.predicted_error


def test_the_largest_ratio_within_an_error_needs_every_bit_of_it(
    fits: dict[Side, SideFit], tables: dict[Side, ErrorTable]
) -> None:
    errors = (0.3, 0.05, 0.02)
    found = plans_within_errors(fits, errors, SilentProgress())
    elements = sum(GEOMETRY.features(side) for side in Side)
    for plan, error in zip(found, errors, strict=True):
        bits = 0
        for side in Side:
            of_side = plan.side(side)
            assert of_side.predicted_error <= error * (1 + 1e-12)
            # One bit less per token would not do.
            allocator = Allocator(tables[side], of_side.bits_per_token)
            assert fits[side].lost_shares(allocator.errors)[-2] > error
            bits += of_side.bits_per_token
        assert 0 <= 16 * elements / bits - plan.target_ratio < 1 / 256
        assert (plan.target_ratio * 256).is_integer()
    assert found[0].target_ratio > found[1].target_ratio > found[2].target_ratio


def test_errors_that_no_ratio_keeps_are_refused(fits: dict[Side, SideFit], monkeypatch: pytest.MonkeyPatch) -> None:
    # Eight bits per component leave more than this.
    with pytest.raises(ConfigError, match=r"--target-error 1e-09: even at ratio 1 K loses"):
        plans_within_errors(fits, (1e-9,), SilentProgress())
    # Two groups of 33 bits are the least that features so few can be given.
    monkeypatch.setattr(plans, "LARGEST_RATIO", 40.0)
    with pytest.raises(ConfigError, match=r"--target-error 0\.99 is kept at ratio 46\.55: expected"):
        plans_within_errors(fits, (0.99,), SilentProgress())
