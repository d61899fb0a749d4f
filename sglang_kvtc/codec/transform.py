"""The linear part of the codec: features of a token <-> kept principal components (KVTC section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_kvtc.artifact.schema import RangeRule, SideBasis, SidePlan
from sglang_kvtc.codec.quantize import GroupRun, group_runs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class SideTransform:
    """What coding one side needs, prepared once.

    forward: [p, num_components], the kept columns of the basis. inverse: [num_components, p], their transpose.
    Both in the compute dtype. scale, mean: f32[p]. plain_scale: whether every scale is one (preset `paper`).
    """

    forward: torch.Tensor
    inverse: torch.Tensor
    scale: torch.Tensor
    mean: torch.Tensor
    plain_scale: bool
    widths: torch.Tensor
    runs: tuple[GroupRun, ...]
    num_groups: int
    range_rule: RangeRule

    @property
    def num_components(self) -> int:
        return self.inverse.shape[0]

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """features: float[num_tokens, p]. Returns coefficients [num_components, num_tokens] in the compute dtype.

        The mean is subtracted in fp32: rounding it away first would cost more than the quantiser does.
        """
        centred = features.float()
        if not self.plain_scale:
            centred = centred * self.scale
        centred = (centred - self.mean).to(self.forward.dtype)
        return (centred @ self.forward).t()

    def reconstruct(self, coefficients: torch.Tensor, columns: slice) -> torch.Tensor:
        """coefficients: [num_components, num_tokens]. Returns f32 features [num_tokens, len(columns)]."""
        features = (coefficients.t() @ self.inverse[:, columns]).float()
        features += self.mean[columns]
        if not self.plain_scale:
            features /= self.scale[columns]
        return features


def prepare(basis: SideBasis, plan: SidePlan, dtype: torch.dtype) -> SideTransform:
    """Keep the columns the plan uses, in `dtype`."""
    columns = torch.from_numpy(basis.basis)[:, torch.from_numpy(plan.columns)].to(dtype)
    scale = torch.from_numpy(basis.scale)
    return SideTransform(
        forward=columns.contiguous(),
        inverse=columns.t().contiguous(),
        scale=scale,
        mean=torch.from_numpy(basis.mean),
        plain_scale=bool((scale == 1).all()),
        widths=torch.from_numpy(plan.widths),
        runs=tuple(group_runs(plan.groups)),
        num_groups=len(plan.groups),
        range_rule=plan.range_rule,
    )
