"""The quantiser of grouped plans (KVTC section 3.2): groups of principal components with ranges per token.

A group of `size` components and one token share a 16-bit shift and scale, and a component becomes a symbol of `width`
bits: symbol = round((coefficient - shift) / scale), clipped to 0 .. 2**width - 1; decoding is shift + scale x symbol.
The rounding rule: shift is rounded down to f16 and scale up, so the levels always span the smallest and the largest
coefficient of the group, and a coefficient is off by at most scale / 2.

Non-finite coefficients, and ranges that f16 cannot hold, give a non-finite shift or scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_kvtc.artifact.schema import Group, SidePlan
from sglang_kvtc.errors import BitstreamError

_RUN_ROWS = 256
"""Components quantised together: for a chunk of 512 tokens the passes over them stay in the second-level cache."""


@dataclass(frozen=True, slots=True)
class GroupRun:
    """Neighbouring groups of equal size and width that are quantised in one go.

    first_row: row of the first component among the kept ones. first_group: index of the first group in the plan.
    """

    first_row: int
    first_group: int
    num_groups: int
    size: int
    width: int

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_groups * self.size)

    @property
    def groups(self) -> slice:
        return slice(self.first_group, self.first_group + self.num_groups)

    def split(self, components: torch.Tensor) -> torch.Tensor:
        """The run's part of [num_components, num_tokens] as [num_groups, size, num_tokens], without a copy."""
        return components[self.rows].view(self.num_groups, self.size, components.shape[1])


@dataclass(frozen=True, slots=True)
class GroupedQuantizer:
    """The groups of a plan, ready for use: a `codec.transform.Quantizer`.

    row_widths: u8[num_components]. top_symbols: f32[num_groups, 1], 2**width - 1.
    """

    runs: tuple[GroupRun, ...]
    row_widths: npt.NDArray[np.uint8]
    top_symbols: torch.Tensor

    @classmethod
    def from_plan(cls, plan: SidePlan) -> GroupedQuantizer:
        """The quantiser of a grouped plan."""
        top_symbols = [2.0**group.width - 1 for group in plan.groups]
        return cls(tuple(_runs(plan.groups)), plan.widths, torch.tensor(top_symbols, dtype=torch.float32)[:, None])

    @property
    def num_groups(self) -> int:
        return len(self.top_symbols)

    @property
    def param_bytes(self) -> int:
        """Of one token: an f16 shift and scale for each group."""
        return 4 * self.num_groups

    def quantize(self, coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Quantise the kept components of a chunk.

        coefficients: f32[num_components, num_tokens]. Returns symbols u8[num_components, num_tokens] and params
        f16[2, num_groups, num_tokens], shifts, then scales; None where these would not be finite.
        """
        num_components, num_tokens = coefficients.shape
        low, high = torch.empty(2, self.num_groups, num_tokens)
        for run in self.runs:
            values = run.split(coefficients)
            if run.width:
                torch.amin(values, dim=1, out=low[run.groups])
                torch.amax(values, dim=1, out=high[run.groups])
            else:
                low[run.groups] = high[run.groups] = values.mean(dim=1)
        shifts, scales = shift_and_scale(low, high, self.top_symbols)
        params = torch.stack([shifts, scales])
        # A number that is not finite spoils every coefficient of its token, so it shows here.
        if not bool(torch.isfinite(params).all()):
            return None
        symbols = torch.empty(num_components, num_tokens, dtype=torch.uint8)
        for run in self.runs:
            steps = in_steps(run.split(coefficients), shifts[run.groups], scales[run.groups])
            run.split(symbols).copy_(nearest_symbols(steps, run.width))
        return symbols, params

    def read_params(self, content: npt.NDArray[np.uint8], num_tokens: int) -> torch.Tensor:
        """Params of a frame from the bytes of their section. Raises BitstreamError for what no encoder writes."""
        # By way of numpy: torch cannot reinterpret an empty tensor as wider elements.
        params = torch.from_numpy(content.view(np.int16)).view(torch.float16).view(2, self.num_groups, num_tokens)
        if not bool(torch.isfinite(params).all()):
            raise BitstreamError("a frame holds a shift or scale that is not finite: no encoder writes that")
        return params

    def dequantize(self, symbols: torch.Tensor, params: torch.Tensor, out: torch.Tensor) -> None:
        """Inverse of `quantize`, computed in fp32 and rounded to the dtype of `out`."""
        shifts, scales = params.float()
        for run in self.runs:
            levels = run.split(symbols).float()
            values = torch.addcmul(shifts[run.groups, None], levels, scales[run.groups, None], out=levels)
            run.split(out).copy_(values)


def _runs(groups: tuple[Group, ...]) -> Iterator[GroupRun]:
    """Runs of equal size and width, in the order of the plan, each of a few hundred components at most."""
    row = index = 0
    for (size, width), run in itertools.groupby(groups, key=lambda group: (group.size, group.width)):
        left = len(list(run))
        while left:
            count = min(left, max(1, _RUN_ROWS // size))
            yield GroupRun(row, index, count, size, width)
            row += count * size
            index += count
            left -= count


def shift_and_scale(
    low: torch.Tensor, high: torch.Tensor, top_symbol: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shift and scale f16[num_groups, num_tokens] of groups whose coefficients lie between `low` and `high`.

    low, high: f32[num_groups, num_tokens]. top_symbol: f32[num_groups, 1], or a number where all groups are alike.
    """
    shift = _round_down(low)
    # A group of width 0 has its mean as the shift and no use for a scale.
    steps = torch.as_tensor(top_symbol).clamp(min=1)
    return shift, _round_up((high - shift.float()) / steps)


def in_steps(values: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Distance of each coefficient from its group's shift, in steps: f32[num_groups, size, num_tokens]."""
    step = scale.float()
    # A group of equal values that f16 holds exactly has scale 0, and every distance in it is 0.
    per_step = torch.where(step > 0, 1 / step, 0.0)
    return (values - shift.float()[:, None]).mul_(per_step[:, None])


def nearest_symbols(steps: torch.Tensor, width: int) -> torch.Tensor:
    """Symbols i16 that decode closest to `steps`."""
    # Cutting off after adding a half is rounding for numbers of at least 0; clamping first keeps them so. torch has no
    # vectorised conversion from f32 to u8, and its round() starts threads even for small arrays.
    return steps.clamp(0, 2**width - 1).add_(0.5).to(torch.int16)


def _round_down(values: torch.Tensor) -> torch.Tensor:
    """Largest f16 that is not above the value."""
    nearest = values.half()
    bits = nearest.view(torch.int16)
    # The next f16 towards minus infinity: one more in magnitude for negative numbers (and -0), one less for others.
    below = torch.where(bits < 0, bits + 1, bits - 1).view(torch.float16)
    return torch.where(nearest.float() > values, below, nearest)


def _round_up(values: torch.Tensor) -> torch.Tensor:
    """Smallest f16 that is not below the value, for values of at least 0."""
    nearest = values.half()
    above = (nearest.view(torch.int16) + 1).view(torch.float16)
    return torch.where(nearest.float() < values, above, nearest)
