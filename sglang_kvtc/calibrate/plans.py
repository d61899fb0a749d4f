"""Bit budgets of K and V: fixed ratios, the best split of a total, or the fewest bits within an error.

A target ratio compares 16-bit bytes of K and V together with the payload and parameter bits of the plan, before entropy
coding, whatever the shares of K and V are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from sglang_kvtc.artifact.schema import Plan
from sglang_kvtc.bitstream.header import plan_code
from sglang_kvtc.calibrate.fit import SideFit
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.calibrate.settings import LARGEST_RATIO, LOSSLESS
from sglang_kvtc.codec.allocate import Allocator, optimal_split
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import ModelGeometry, Side

ELEMENT_BITS = 16
"""A target ratio is relative to 16-bit KV, whatever the cache's dtype (KVTC section 4)."""
_FIRST_RATIO_TRIED = 16.0

Fits = Mapping[Side, SideFit]


def budget_bits(num_features: int, target_ratio: float) -> int:
    """Bits per token for the plan of `num_features` features: payload and parameters, before entropy coding."""
    return int(num_features * ELEMENT_BITS / target_ratio)


def overall_ratio(geometry: ModelGeometry, k_ratio: float, v_ratio: float) -> float:
    """The target ratio of a plan whose K and V have ratios of their own."""
    if k_ratio == v_ratio:
        return k_ratio
    k_features, v_features = geometry.features(Side.K), geometry.features(Side.V)
    return (k_features + v_features) / (k_features / k_ratio + v_features / v_ratio)


def plans_at_ratios(
    fits: Fits, geometry: ModelGeometry, ratios: Sequence[tuple[float, float]], progress: Progress
) -> tuple[Plan, ...]:
    """One plan for each pair of a ratio of K and a ratio of V."""
    if not ratios:
        return ()
    budgets = {side: [budget_bits(fits[side].num_features, pair[side]) for pair in ratios] for side in (Side.K, Side.V)}
    allocators = _solve(fits, {side: max(budgets[side]) for side in Side}, progress)
    return tuple(
        _plan(overall_ratio(geometry, *pair), fits, allocators, k_bits, v_bits)
        for pair, k_bits, v_bits in zip(ratios, budgets[Side.K], budgets[Side.V], strict=True)
    )


def plans_with_best_split(
    fits: Fits, ratios: Sequence[float], progress: Progress, weights: tuple[float, float] | None = None
) -> tuple[Plan, ...]:
    """One plan per ratio, whose bits are shared by K and V so that their weighted squared errors add up to least.

    weights: of the squared error of K and of V. By default each is relative to the variance of its side, since the
    two have no common unit; where the weights of the fits give them one, the caller passes equal weights.
    """
    k_weight, v_weight = weights or (1 / (fits[side].sample_variance or 1.0) for side in Side)
    totals = [sum(budget_bits(fits[side].num_features, ratio) for side in Side) for ratio in ratios]
    allocators = _solve(fits, dict.fromkeys(Side, max(totals)), progress)
    plans = []
    for ratio, total in zip(ratios, totals, strict=True):
        k_bits = optimal_split(k_weight * allocators[Side.K].errors, v_weight * allocators[Side.V].errors, total)
        plans.append(_plan(ratio, fits, allocators, k_bits, total - k_bits))
    return tuple(plans)


def plans_within_errors(fits: Fits, errors: Sequence[float], progress: Progress) -> tuple[Plan, ...]:
    """One plan per error: the largest ratio at which neither K nor V loses more than that share of its variance.

    Shares are those on the allocation sample, of weighted features. The plan's target ratio is what comes out, rounded
    down to what a frame can name. Raises ConfigError for an error that the fitted components cannot reach or that
    needs hardly any bits.
    """
    allocators = {side: _solve_for_error(fits[side], min(errors), progress) for side in Side}
    plans = []
    for error in errors:
        k_bits, v_bits = (_fewest_bits(fits[side], allocators[side], error) for side in Side)
        elements = sum(fits[side].num_features for side in Side)
        ratio = elements * ELEMENT_BITS / (k_bits + v_bits) if k_bits + v_bits else math.inf
        if not LOSSLESS < ratio <= LARGEST_RATIO:
            raise ConfigError(
                f"--target-error {error:g} is kept at ratio {ratio:.4g}: expected one above {LOSSLESS:g} and at most "
                f"{LARGEST_RATIO:g}, ask for another error"
            )
        steps = plan_code(1.0)
        plans.append(_plan(math.floor(ratio * steps) / steps, fits, allocators, k_bits, v_bits))
    return tuple(plans)


def _plan(ratio: float, fits: Fits, allocators: Mapping[Side, Allocator], k_bits: int, v_bits: int) -> Plan:
    budgets = {Side.K: k_bits, Side.V: v_bits}
    k, v = (fits[side].plan(allocators[side].groups(budgets[side])) for side in Side)
    return Plan(ratio, k, v)


def _solve(fits: Fits, max_bits: Mapping[Side, int], progress: Progress) -> dict[Side, Allocator]:
    return {side: _allocator(fits[side], max_bits[side], progress) for side in Side}


def _allocator(fit: SideFit, max_bits: int, progress: Progress) -> Allocator:
    with progress.stage(f"{fit.side.name}: bit allocation", len(fit.variances), "components") as advance:
        return Allocator(fit.table, max_bits, advance)


def _solve_for_error(fit: SideFit, error: float, progress: Progress) -> Allocator:
    """Solve for more and more bits until the error is reached: nobody knows beforehand how many it takes."""
    ratio = _FIRST_RATIO_TRIED
    while True:
        allocator = _allocator(fit, budget_bits(fit.num_features, ratio), progress)
        lost = float(fit.lost_shares(allocator.errors)[-1])
        if lost <= error:
            return allocator
        if ratio <= LOSSLESS:
            raise ConfigError(
                f"--target-error {error:g}: even at ratio {ratio:g} {fit.side.name} loses {lost:.3g} of its variance "
                "on text that the basis was not fitted to: ask for more, or raise --rank or --tokens"
            )
        ratio /= 2


def _fewest_bits(fit: SideFit, allocator: Allocator, error: float) -> int:
    return int(np.argmax(fit.lost_shares(allocator.errors) <= error))
