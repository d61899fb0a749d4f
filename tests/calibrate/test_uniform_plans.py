"""Uniform plans: one step within a budget of coded bits, what is kept at it, the largest step within an error."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from calibrate.side_rows import GEOMETRY, fitted, rows_of, statistics_of

from sglang_kvtc.artifact.schema import Group, SidePlan
from sglang_kvtc.calibrate import plans as grouped_plans
from sglang_kvtc.calibrate.fit import SideFit
from sglang_kvtc.calibrate.plans import budget_bits
from sglang_kvtc.calibrate.progress import SilentProgress
from sglang_kvtc.calibrate.uniform_plans import (
    StepTrial,
    plans_at_ratios,
    plans_with_best_split,
    plans_within_errors,
    step_groups,
)
from sglang_kvtc.codec.uniform import UniformQuantizer
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import Side

RATIOS = (4.0, 8.0, 16.0)
RESOLUTION = 2.0 ** (13 / 2**16) - 1
"""Sixteen halvings of the 13 octaves of steps that are tried."""


@pytest.fixture(scope="module")
def fits() -> dict[Side, SideFit]:
    return {side: fitted(statistics_of(rows_of(side)), side) for side in Side}


def total_bits(ratio: float) -> int:
    return sum(budget_bits(GEOMETRY.features(side), ratio) for side in Side)


def test_one_step_for_both_sides_uses_the_budget_of_coded_bits_up(fits: dict[Side, SideFit]) -> None:
    found = plans_with_best_split(fits, RATIOS, SilentProgress())
    for plan, ratio in zip(found, RATIOS, strict=True):
        assert plan.target_ratio == ratio
        assert plan.k.step == plan.v.step > 0
        bits = plan.k.stored_bits + plan.v.stored_bits
        assert bits <= total_bits(ratio)
        finer = sum(StepTrial.of(fits[side]).plan(plan.k.step * (1 - 2 * RESOLUTION)).stored_bits for side in Side)
        assert finer > total_bits(ratio)
    steps = [plan.k.step for plan in found]
    assert steps == sorted(steps)


def test_ratios_of_k_and_v_apart_have_steps_of_their_own(fits: dict[Side, SideFit]) -> None:
    pairs = ((8.0, 8.0), (16.0, 4.0))
    found = plans_at_ratios(fits, GEOMETRY, pairs, SilentProgress())
    for plan, (k_ratio, v_ratio) in zip(found, pairs, strict=True):
        for side, ratio in ((Side.K, k_ratio), (Side.V, v_ratio)):
            budget = budget_bits(GEOMETRY.features(side), ratio)
            assert 0.97 * budget < plan.side(side).stored_bits <= budget
    assert found[0].target_ratio == 8
    assert found[1].k.step > found[0].k.step
    assert found[1].v.step < found[0].v.step


def test_predictions_are_those_of_coding_the_sample(fits: dict[Side, SideFit]) -> None:
    (plan,) = plans_with_best_split(fits, (8.0,), SilentProgress())
    for side in Side:
        of_side, fit = plan.side(side), fits[side]
        kept = torch.from_numpy(fit.coefficients[:, of_side.columns].T.copy())
        quantizer = UniformQuantizer.from_plan(of_side, fit.variances)
        quantized = quantizer.quantize(kept)
        assert quantized is not None
        decoded = torch.empty(kept.shape)
        quantizer.dequantize(*quantized, decoded)
        errors = (decoded - kept).double().square().sum(dim=0)
        dropped = np.delete(fit.coefficients, of_side.columns, axis=1).astype(float)
        lost = (float(errors.sum()) + float(np.square(dropped).sum())) / len(fit.coefficients)
        assert of_side.predicted_error == pytest.approx(float(fit.lost_shares(np.array([lost]))[0]), rel=1e-9)


def test_uniform_plans_lose_less_than_grouped_ones_of_as_many_bits(fits: dict[Side, SideFit]) -> None:
    """The grouped plan's bits are before entropy coding, which gains it little; the allocation is optimal."""
    weights = {side: fits[side].sample_variance for side in Side}
    uniform = plans_with_best_split(fits, RATIOS, SilentProgress())
    grouped = grouped_plans.plans_at_ratios(fits, GEOMETRY, [(ratio, ratio) for ratio in RATIOS], SilentProgress())
    for ours, theirs in zip(uniform, grouped, strict=True):
        lost = [sum(plan.side(side).predicted_error * weights[side] for side in Side) for plan in (ours, theirs)]
        assert lost[0] < 0.8 * lost[1]


def test_components_are_kept_by_their_deviation_in_steps() -> None:
    variances = np.array([40.0, 17, 16, 3, 1.6, 1.5, 0.5, 0.45, 0.1], np.float32) ** 2
    assert step_groups(variances, 1.0) == (Group(0, 2, 12), Group(2, 3, 8), Group(5, 2, 4))
    assert step_groups(variances, 10.0) == (Group(0, 3, 8),)
    assert step_groups(variances, 100.0) == ()
    assert step_groups(variances, 0.001) == (Group(0, 9, 12),)
    assert step_groups(np.zeros(4, np.float32), 1.0) == ()


def test_the_largest_ratio_within_an_error(fits: dict[Side, SideFit]) -> None:
    errors = (0.3, 0.05, 0.02)
    found = plans_within_errors(fits, errors, SilentProgress())
    elements = sum(GEOMETRY.features(side) for side in Side)
    for plan, error in zip(found, errors, strict=True):
        for side in Side:
            of_side = plan.side(side)
            assert of_side.predicted_error <= error
            coarser = StepTrial.of(fits[side]).plan(of_side.step * (1 + 2 * RESOLUTION))
            assert coarser.predicted_error > error
        bits = plan.k.stored_bits + plan.v.stored_bits
        assert 0 <= 16 * elements / bits - plan.target_ratio < 1 / 256
    assert found[0].target_ratio > found[1].target_ratio > found[2].target_ratio


def test_errors_that_no_step_keeps_are_refused(fits: dict[Side, SideFit]) -> None:
    with pytest.raises(ConfigError, match=r"--target-error 1e-09: even with the finest step K loses"):
        plans_within_errors(fits, (1e-9,), SilentProgress())


def test_a_budget_of_one_bit_keeps_nothing(fits: dict[Side, SideFit]) -> None:
    (plan,) = plans_at_ratios(fits, GEOMETRY, [(1000.0, 1000.0)], SilentProgress())
    assert budget_bits(GEOMETRY.features(Side.V), 1000.0) == 1
    assert plan.v.stored_bits <= 1
    assert plan.v.groups == ()
    assert plan.v.predicted_error == pytest.approx(1.0)


def test_a_side_that_does_not_vary_is_planned_all_the_same(fits: dict[Side, SideFit]) -> None:
    still = dataclasses.replace(
        fits[Side.V],
        variances=np.zeros_like(fits[Side.V].variances),
        coefficients=np.zeros_like(fits[Side.V].coefficients),
        sample_variance=0.0,
    )
    (plan,) = plans_with_best_split({Side.K: fits[Side.K], Side.V: still}, (8.0,), SilentProgress())
    assert plan.v.groups == ()
    assert plan.v.predicted_error == 0
    (alone,) = plans_at_ratios({Side.K: fits[Side.K], Side.V: still}, GEOMETRY, [(8.0, 8.0)], SilentProgress())
    assert alone.v.groups == ()


def test_the_same_sample_gives_the_same_plan(fits: dict[Side, SideFit]) -> None:
    first, second = (plans_with_best_split(fits, (8.0,), SilentProgress()) for _ in range(2))
    assert first == second
    assert isinstance(first[0].k, SidePlan)
