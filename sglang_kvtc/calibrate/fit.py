"""From statistics to an artifact's content: the basis of one side and its bit allocation for every wanted ratio."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang_kvtc.artifact.schema import GROUP_SIZES, SideBasis, SidePlan
from sglang_kvtc.calibrate.collect import Covariance, SideStatistics
from sglang_kvtc.calibrate.pca import ITERATIONS, PrincipalComponents, exact_pca, randomized_pca
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.codec.allocate import Allocator, error_table, side_plan
from sglang_kvtc.types import Side

ELEMENT_BITS = 16
"""A target ratio is relative to 16-bit KV, whatever the cache's dtype (KVTC section 4)."""


def budget_bits(num_features: int, target_ratio: float) -> int:
    """Bits per token for one side's plan: payload and parameters, before entropy coding."""
    return int(num_features * ELEMENT_BITS / target_ratio)


def fit_side(
    side: Side,
    statistics: SideStatistics,
    ratios: Sequence[float],
    *,
    rank: int,
    seed: int,
    device: torch.device,
    progress: Progress,
) -> tuple[SideBasis, list[SidePlan]]:
    """Fit the basis of one side and one plan per ratio. The statistics are used up.

    rank: most components to fit. The basis keeps the columns up to the last component that some plan codes. Raises
    ConfigError when no tokens were collected.
    """
    components = _principal_components(side, statistics, rank, seed, device, progress)
    mean = components.mean.float()
    basis = components.basis.half()
    centred = statistics.allocation.rows - mean
    coefficients = (centred @ basis.float()).numpy()
    budgets = [budget_bits(len(mean), ratio) for ratio in ratios]

    rank = basis.shape[1]
    with progress.stage(f"{side.name}: errors of all groups", rank * len(GROUP_SIZES), "components") as advance:
        table = error_table(coefficients, on_components=advance)
    with progress.stage(f"{side.name}: bit allocation", rank, "components") as advance:
        allocator = Allocator(table, max(budgets), advance)
    sample_variance = float(centred.double().square().sum(dim=1).mean())
    plans = [side_plan(table, allocator.groups(budget), sample_variance) for budget in budgets]

    # At least one column, so that an artifact whose budget buys nothing is still well formed.
    used = max([group.start + group.size for plan in plans for group in plan.groups], default=1)
    # Rounding may leave neighbours of almost equal variance out of order.
    variances = np.minimum.accumulate(components.variances.float().numpy())
    fitted = SideBasis(
        scale=np.ones(len(mean), np.float32),
        mean=mean.numpy(),
        basis=np.ascontiguousarray(basis[:, :used].numpy()),
        variances=variances[:used],
        total_variance=components.total_variance,
    )
    return fitted, plans


def _principal_components(
    side: Side, statistics: SideStatistics, rank: int, seed: int, device: torch.device, progress: Progress
) -> PrincipalComponents:
    moments = statistics.moments
    if isinstance(moments, Covariance):
        with progress.stage(f"{side.name}: eigendecomposition", 1, "matrices") as advance:
            components = exact_pca(*moments.finish(), rank)
            advance(1)
    else:
        with progress.stage(f"{side.name}: randomized PCA", ITERATIONS, "iterations") as advance:
            components = randomized_pca(moments.rows, rank, seed=seed, device=device, on_iteration=advance)
    return components
