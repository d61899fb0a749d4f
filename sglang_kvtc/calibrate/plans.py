"""Grouped plans for K and V: fixed ratios, the best split of a total, or the fewest bits within an error.

A target ratio compares 16-bit bytes of K and V together with the payload and parameter bits of the plan, before entropy
coding, whatever the shares of K and V are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_kvtc.artifact.schema import GROUP_SIZES, Plan, SidePlan
from sglang_kvtc.bitstream.header import plan_code
from sglang_kvtc.calibrate.fit import SideFit
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.calibrate.settings import LARGEST_RATIO, LOSSLESS
from sglang_kvtc.codec.allocate import Allocator, ErrorTable, error_table, optimal_split, side_plan
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import ModelGeometry, Side

ELEMENT_BITS = 16
"""A target ratio is relative to 16-bit KV, whatever the cache's dtype (KVTC section 4)."""
_FIRST_RATIO_TRIED = 16.0

Fits = Mapping[Side, SideFit]


def budget_bits(num_features: int, target_ratio: float) -> int:
    """Bits per token for the plan of `num_features` features."""
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
    solved = {side: _Solved.up_to(fits[side], max(budgets[side]), progress) for side in Side}
    return tuple(
        _plan(overall_ratio(geometry, *pair), solved, k_bits, v_bits)
        for pair, k_bits, v_bits in zip(ratios, budgets[Side.K], budgets[Side.V], strict=True)
    )


def plans_with_best_split(fits: Fits, ratios: Sequence[float], progress: Progress) -> tuple[Plan, ...]:
    """One plan per ratio, whose bits are shared by K and V so that their errors, each relative to the variance of its
    side, add up to least.
    """
    k_weight, v_weight = (1 / (fits[side].sample_variance or 1.0) for side in Side)
    totals = [sum(budget_bits(fits[side].num_features, ratio) for side in Side) for ratio in ratios]
    solved = {side: _Solved.up_to(fits[side], max(totals), progress) for side in Side}
    plans = []
    for ratio, total in zip(ratios, totals, strict=True):
        k_errors, v_errors = (solved[side].allocator.errors for side in Side)
        k_bits = optimal_split(k_weight * k_errors, v_weight * v_errors, total)
        plans.append(_plan(ratio, solved, k_bits, total - k_bits))
    return tuple(plans)


def plans_within_errors(fits: Fits, errors: Sequence[float], progress: Progress) -> tuple[Plan, ...]:
    """One plan per error: the largest ratio at which neither K nor V loses more than that share of its variance.

    Shares are those on the allocation sample, of weighted features. The plan's target ratio is what comes out, rounded
    down to what a frame can name. Raises ConfigError for an error that the fitted components cannot reach or that
    needs hardly any bits.
    """
    solved = {side: _Solved.for_error(fits[side], min(errors), progress) for side in Side}
    plans = []
    for error in errors:
        k_bits, v_bits = (solved[side].fewest_bits(error) for side in Side)
        elements = sum(fits[side].num_features for side in Side)
        plans.append(_plan(named_ratio(error, elements, k_bits + v_bits), solved, k_bits, v_bits))
    return tuple(plans)


def named_ratio(error: float, elements: int, bits: float) -> float:
    """The target ratio of a plan that keeps an error with `bits` per token, rounded down to what a frame can name.

    elements: features of K and V. Raises ConfigError for a ratio that cannot be asked for.
    """
    ratio = elements * ELEMENT_BITS / bits if bits else math.inf
    if not LOSSLESS < ratio <= LARGEST_RATIO:
        raise ConfigError(
            f"--target-error {error:g} is kept at ratio {ratio:.4g}: expected one above {LOSSLESS:g} and at most "
            f"{LARGEST_RATIO:g}, ask for another error"
        )
    steps = plan_code(1.0)
    return math.floor(ratio * steps) / steps


def unreachable(error: float, fit: SideFit, lost: float, limit: str) -> ConfigError:
    """What to say of an error that the fitted components cannot reach; limit: with what they were tried."""
    return ConfigError(
        f"--target-error {error:g}: even {limit} {fit.side.name} loses {lost:.3g} of its variance on text that the "
        "basis was not fitted to: ask for more, or raise --rank or --tokens"
    )


def group_errors(fit: SideFit, progress: Progress) -> ErrorTable:
    """Errors of quantising every group of components on the allocation sample."""
    units = len(fit.variances) * len(GROUP_SIZES)
    with progress.stage(f"{fit.side.name}: errors of all groups", units, "components") as advance:
        return error_table(fit.coefficients, on_components=advance)


@dataclass(frozen=True, slots=True)
class _Solved:
    """The best groups of one side for every number of bits up to some bound."""

    fit: SideFit
    table: ErrorTable
    allocator: Allocator

    @classmethod
    def up_to(cls, fit: SideFit, max_bits: int, progress: Progress, table: ErrorTable | None = None) -> _Solved:
        table = table or group_errors(fit, progress)
        with progress.stage(f"{fit.side.name}: bit allocation", len(fit.variances), "components") as advance:
            return cls(fit, table, Allocator(table, max_bits, advance))

    @classmethod
    def for_error(cls, fit: SideFit, error: float, progress: Progress) -> _Solved:
        """Solve for more and more bits until the error is reached: nobody knows beforehand how many it takes."""
        ratio, table = _FIRST_RATIO_TRIED, group_errors(fit, progress)
        while True:
            solved = cls.up_to(fit, budget_bits(fit.num_features, ratio), progress, table)
            lost = float(fit.lost_shares(solved.allocator.errors)[-1])
            if lost <= error:
                return solved
            if ratio <= LOSSLESS:
                raise unreachable(error, fit, lost, f"at ratio {ratio:g}")
            ratio /= 2

    def fewest_bits(self, error: float) -> int:
        return int(np.argmax(self.fit.lost_shares(self.allocator.errors) <= error))

    def plan(self, bits: int) -> SidePlan:
        return side_plan(self.table, self.allocator.groups(bits), self.fit.sample_variance)


def _plan(ratio: float, solved: Mapping[Side, _Solved], k_bits: int, v_bits: int) -> Plan:
    return Plan(ratio, solved[Side.K].plan(k_bits), solved[Side.V].plan(v_bits))
