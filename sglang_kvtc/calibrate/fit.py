"""From statistics to the basis of one side, and a sample of coefficients to plan by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_kvtc.artifact.schema import SideBasis, SidePlan
from sglang_kvtc.calibrate.pca import ITERATIONS, PrincipalComponents, block_diagonal, exact_pca, randomized_pca
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.calibrate.statistics import Covariance, SideStatistics
from sglang_kvtc.codec.transform import weigh
from sglang_kvtc.types import Side


@dataclass(frozen=True, slots=True)
class SideFit:
    """The components of one side, before it is decided which of them are coded with how many bits.

    weights, mean, basis, variances, total_variance: as in an artifact, with every fitted component.
    coefficients: f32[num_tokens, rank] of the allocation sample, which no component was fitted to.
    sample_variance: mean squared norm of a centred, weighted row of that sample.
    """

    side: Side
    weights: npt.NDArray[np.float32] | None
    mean: npt.NDArray[np.float32]
    basis: npt.NDArray[np.float16]
    variances: npt.NDArray[np.float32]
    total_variance: float
    coefficients: npt.NDArray[np.float32]
    sample_variance: float

    @property
    def num_features(self) -> int:
        return len(self.mean)

    def lost_shares(self, errors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Shares of the variance that squared errors per token inside the components are, with what lies outside."""
        inside = float(np.square(self.coefficients, dtype=np.float64).sum()) / len(self.coefficients)
        outside = max(0.0, self.sample_variance - inside)
        return (errors + outside) / self.sample_variance if self.sample_variance > 0 else np.zeros(errors.shape)

    def side_basis(self, plans: Sequence[SidePlan]) -> SideBasis:
        """The basis for an artifact: its columns up to the last one that some plan codes."""
        # At least one column, so that an artifact whose budget buys nothing is still well formed.
        used = max([group.start + group.size for plan in plans for group in plan.groups], default=1)
        return SideBasis(
            weights=self.weights,
            mean=self.mean,
            basis=np.ascontiguousarray(self.basis[:, :used]),
            variances=self.variances[:used],
            total_variance=self.total_variance,
        )


def fit_side(
    side: Side,
    statistics: SideStatistics,
    *,
    rank: int,
    seed: int,
    device: torch.device,
    progress: Progress,
    group_features: int = 0,
    weights: npt.NDArray[np.float32] | None = None,
) -> SideFit:
    """Fit the basis of one side. The statistics can be fitted again.

    rank: most components to fit. group_features: features per PCA, 0 for one PCA over all of them (KVTC appendix B.10);
    a last, smaller group gets what remains. weights: SideBasis.weights, by which centred features are multiplied before
    the PCA and the planning. Raises ConfigError when no tokens were collected.
    """
    num_features = statistics.allocation.rows.shape[1]
    blocks = None if weights is None else torch.from_numpy(weights)
    components = _principal_components(
        side, statistics, rank, group_features or num_features, blocks, seed, device, progress
    )
    mean, basis = components.mean.float(), components.basis.half()
    centred = statistics.allocation.rows - mean
    if blocks is not None:
        centred = weigh(centred, blocks)
    return SideFit(
        side=side,
        weights=weights,
        mean=mean.numpy(),
        basis=basis.numpy(),
        # Rounding may leave neighbours of almost equal variance out of order.
        variances=np.minimum.accumulate(components.variances.float().numpy()),
        total_variance=components.total_variance,
        coefficients=(centred @ basis.float()).numpy(),
        sample_variance=float(centred.double().square().sum(dim=1).mean()),
    )


def _principal_components(
    side: Side,
    statistics: SideStatistics,
    rank: int,
    group_features: int,
    weights: torch.Tensor | None,
    seed: int,
    device: torch.device,
    progress: Progress,
) -> PrincipalComponents:
    num_features = statistics.allocation.rows.shape[1]
    groups = [slice(start, start + group_features) for start in range(0, num_features, group_features)]
    moments = statistics.moments

    def weights_of(group: slice) -> torch.Tensor | None:
        if weights is None:
            return None
        heads = slice(group.start // weights.shape[-1], group.stop // weights.shape[-1])
        return weights.flatten(0, 1)[None, heads]

    found = []
    if isinstance(moments, Covariance):
        mean, covariance = moments.moments()
        with progress.stage(f"{side.name}: eigendecomposition", len(groups), "matrices") as advance:
            for group in groups:
                found.append(exact_pca(mean[group], covariance[group, group], rank, weights_of(group)))
                advance(1)
    else:
        with progress.stage(f"{side.name}: randomized PCA", ITERATIONS * len(groups), "iterations") as advance:
            found = [
                randomized_pca(
                    moments.rows[:, group],
                    rank,
                    seed=seed,
                    device=device,
                    weights=weights_of(group),
                    on_iteration=advance,
                )
                for group in groups
            ]
    return found[0] if len(found) == 1 else block_diagonal(found, rank)
