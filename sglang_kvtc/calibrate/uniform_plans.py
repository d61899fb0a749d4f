"""Uniform plans for K and V: the smallest step that a ratio allows, or the largest that an error allows.

A target ratio compares 16-bit bytes of K and V together with what their parameters and symbols take after entropy
coding, on the allocation sample. At a given step those components are kept whose deviation is well above it (reverse
water-filling). Widths are only room for the levels: they are small where most levels are zero, so that several symbols
share a byte, for which a Huffman code needs no less than one bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from sglang_kvtc.artifact.schema import Group, Plan, SidePlan
from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.bitstream.frame import code_section
from sglang_kvtc.calibrate.fit import SideFit
from sglang_kvtc.calibrate.plans import Fits, budget_bits, named_ratio, overall_ratio, unreachable
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.codec.transform import CODED_SECTIONS
from sglang_kvtc.codec.uniform import UniformQuantizer
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import ModelGeometry, Side

WIDTHS = ((16.0, 12), (1.5, 8), (0.45, 4))
"""Width of components whose deviation is above so many steps; those below the last number are dropped. 8 bits hold
levels of 7.9 deviations, 4 bits of 4.7."""
SEARCH_STEPS = 16
"""Evaluations per step that is looked for: it is then known to 1 part in 7,000."""
_FINEST = 2.0**-11
"""The smallest step tried, in deviations of the first component: a width of 12 bits reaches no further."""
_COARSEST = 4.0
"""The largest step tried: nothing is kept."""

Planned = TypeVar("Planned")


def plans_at_ratios(
    fits: Fits, geometry: ModelGeometry, ratios: Sequence[tuple[float, float]], progress: Progress
) -> tuple[Plan, ...]:
    """One plan for each pair of a ratio of K and a ratio of V."""
    plans = []
    for pair in ratios:
        found: dict[Side, SidePlan] = {}
        for side in Side:
            found |= _finest([fits[side]], budget_bits(fits[side].num_features, pair[side]), progress)
        plans.append(Plan(overall_ratio(geometry, *pair), found[Side.K], found[Side.V]))
    return tuple(plans)


def plans_with_best_split(fits: Fits, ratios: Sequence[float], progress: Progress) -> tuple[Plan, ...]:
    """One plan per ratio, with one step for K and V: their squared errors have one unit, the weights' of the fits, and
    then add up to least.
    """
    plans = []
    for ratio in ratios:
        budget = sum(budget_bits(fits[side].num_features, ratio) for side in Side)
        found = _finest([fits[side] for side in Side], budget, progress)
        plans.append(Plan(ratio, found[Side.K], found[Side.V]))
    return tuple(plans)


def plans_within_errors(fits: Fits, errors: Sequence[float], progress: Progress) -> tuple[Plan, ...]:
    """One plan per error: the largest ratio at which neither K nor V loses more than that share of its variance.

    Shares are those on the allocation sample, of weighted features. The plan's target ratio is what comes out, rounded
    down to what a frame can name. Raises ConfigError for an error that the fitted components cannot reach or that
    needs hardly any bits.
    """
    plans = []
    for error in errors:
        found = {side: _coarsest(fits[side], error, progress) for side in Side}
        elements = sum(fits[side].num_features for side in Side)
        plans.append(Plan(named_ratio(error, elements, _bits(found)), found[Side.K], found[Side.V]))
    return tuple(plans)


def step_groups(variances: npt.NDArray[np.float32], step: float) -> tuple[Group, ...]:
    """The components that are kept at a step, and their widths.

    variances: f32[rank], falling.
    """
    in_steps = np.sqrt(variances.astype(np.float64)) / step
    groups, start = [], 0
    for least, width in WIDTHS:
        stop = int((in_steps > least).sum())
        if stop > start:
            groups.append(Group(start, stop - start, width))
        start = max(start, stop)
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class StepTrial:
    """A side's allocation sample, to be coded at any step. coefficients: f32[rank, num_tokens]."""

    fit: SideFit
    coefficients: torch.Tensor

    @classmethod
    def of(cls, fit: SideFit) -> StepTrial:
        return cls(fit, torch.from_numpy(np.ascontiguousarray(fit.coefficients.T)))

    def step(self, in_deviations: float) -> float:
        """A step in units of the first component's deviation."""
        return in_deviations * math.sqrt(float(self.fit.variances[0])) or 1.0

    def plan(self, step: float) -> SidePlan:
        """Quantise and entropy-code the sample."""
        groups = step_groups(self.fit.variances, step)
        num_components = sum(group.size for group in groups)
        kept = self.coefficients[:num_components]
        quantizer = UniformQuantizer.from_plan(SidePlan(groups, 0.0, step), self.fit.variances)
        quantized = quantizer.quantize(kept)
        if quantized is None:
            raise ConfigError(f"{self.fit.side.name} of the text varies by more than any step can code")
        symbols, params = quantized
        decoded = torch.empty(kept.shape)
        quantizer.dequantize(symbols, params, decoded)
        num_tokens = self.coefficients.shape[1]
        squares = (decoded - kept).double().square().sum() + self.coefficients[num_components:].double().square().sum()
        lost = float(self.fit.lost_shares(np.array([float(squares) / num_tokens]))[0])
        packed = bitpack.pack(symbols.numpy(), quantizer.row_widths)
        config = CodecConfig()
        stored_bytes = 0
        for section, content in zip(CODED_SECTIONS[self.fit.side], (params.numpy(), packed), strict=True):
            stored_bytes += len(code_section(section, content, config.coder, config.coder_level).stored)
        return SidePlan(groups, lost, step, 8 * stored_bytes / num_tokens)


def _bits(plans: Mapping[Side, SidePlan]) -> float:
    return sum(plan.stored_bits for plan in plans.values())


def _finest(fits: Sequence[SideFit], budget: int, progress: Progress) -> dict[Side, SidePlan]:
    """Plans with the smallest common step whose bits fit the budget, which nothing may be too small for."""
    trials = [StepTrial.of(fit) for fit in fits]
    unit = max(trial.step(1.0) for trial in trials)

    def at(step: float) -> dict[Side, SidePlan]:
        return {trial.fit.side: trial.plan(step) for trial in trials}

    coarse = _COARSEST * unit
    names = " and ".join(fit.side.name for fit in fits)
    return _search(at, at(coarse), coarse, _FINEST * unit, lambda plans: _bits(plans) <= budget, names, progress)


def _coarsest(fit: SideFit, error: float, progress: Progress) -> SidePlan:
    """The plan with the largest step that keeps the error."""
    trial = StepTrial.of(fit)
    fine = trial.step(_FINEST)
    found = trial.plan(fine)
    if found.predicted_error > error:
        raise unreachable(error, fit, found.predicted_error, "with the finest step")
    coarse, name = trial.step(_COARSEST), fit.side.name
    return _search(trial.plan, found, fine, coarse, lambda plan: plan.predicted_error <= error, name, progress)


def _search(
    at: Callable[[float], Planned],
    found: Planned,
    allowed: float,
    limit: float,
    is_allowed: Callable[[Planned], bool],
    names: str,
    progress: Progress,
) -> Planned:
    """What `at` gives for the allowed step nearest to `limit`, by halving. found: that of `allowed`, where to begin."""
    with progress.stage(f"{names}: step", SEARCH_STEPS, "trials") as advance:
        for _ in range(SEARCH_STEPS):
            step = math.sqrt(allowed * limit)
            tried = at(step)
            if is_allowed(tried):
                allowed, found = step, tried
            else:
                limit = step
            advance(1)
    return found
