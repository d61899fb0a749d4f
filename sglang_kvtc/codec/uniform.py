"""The quantiser of uniform plans: one step for all components, so that entropy coding decides what each one costs.

Reverse water-filling asks for the same squared error of every kept component, hence for the same step, and a component
then costs about log2(deviation / step) + 2 bits once its symbols are entropy-coded. A grouped plan spends whole bits on
components that need fewer, and a shift and scale on every group and token.

    level = round(coefficient / step of the token)        coefficient ~ level x step of the token

The step of a token is the plan's times a power of 2**(1/4): the smallest one that is not below the plan's step times
the root mean square of the token's coefficients, each in units of its component's deviation, and at which no level
leaves the range of its width. Only components of 8 bits or more are averaged, if there are any: coding raises the
energy of smaller ones, so that a restored token would be coded more coarsely every time that it is coded again. So
every kept coefficient is off by at most half a step, whatever the text: an outlier makes its own token coarser instead
of being cut off. Steps of tokens have 8 significant bits, so that their products with levels are exact in fp32: every
backend decodes to the same coefficients.

A component of more than 8 bits has two rows of symbols (FORMAT.md section 6): its upper 8 bits, and the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_kvtc.artifact.schema import SidePlan

SCALE_UNITS = 4
"""Scales of tokens are powers of 2**(1 / SCALE_UNITS)."""
SCALE_ONE = 128
"""Code of a token whose step is the plan's."""
_ROW_BITS = 8
_BLOCK_ROWS = 256
"""Components worked on together: for a chunk of 512 tokens the passes over them stay in the second-level cache."""


@dataclass(frozen=True, slots=True)
class LevelRun:
    """Neighbouring components of equal width.

    first: index of the first one among the kept ones. row: of its only row of symbols, or of its upper bits; lower_row:
    of its lower bits, which follow the upper ones of the whole run.
    """

    first: int
    size: int
    width: int
    row: int
    lower_row: int

    @property
    def components(self) -> slice:
        return slice(self.first, self.first + self.size)

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.size)

    @property
    def lower_rows(self) -> slice:
        return slice(self.lower_row, self.lower_row + self.size)

    @property
    def lower_bits(self) -> int:
        return max(0, self.width - _ROW_BITS)

    @property
    def offset(self) -> int:
        """What is added to a level to make it a symbol."""
        return 1 << (self.width - 1)

    def blocks(self) -> Iterator[LevelRun]:
        """Parts small enough for the cache."""
        for start in range(0, self.size, _BLOCK_ROWS):
            size = min(_BLOCK_ROWS, self.size - start)
            yield LevelRun(self.first + start, size, self.width, self.row + start, self.lower_row + start)


@dataclass(frozen=True, slots=True)
class UniformQuantizer:
    """A uniform plan, ready for use: a `codec.transform.Quantizer`.

    row_widths: u8[num_rows]. steps: f32[256], of tokens by code. inverse_deviations: f32[num_components, 1], whose
    products with coefficients have the mean square to choose a step by; 0 for what does not count. inverse_levels:
    f32[num_components, 1], one over the largest level.
    """

    runs: tuple[LevelRun, ...]
    row_widths: npt.NDArray[np.uint8]
    steps: torch.Tensor
    inverse_deviations: torch.Tensor
    inverse_levels: torch.Tensor

    @classmethod
    def from_plan(cls, plan: SidePlan, variances: npt.NDArray[np.float32]) -> UniformQuantizer:
        """variances: f32[rank], of every component of the basis."""
        deviations = np.sqrt(variances[plan.columns].astype(np.float64))
        runs = tuple(_runs(plan))
        widths = [
            np.full(rows.stop - rows.start, width, np.uint8)
            for run in runs
            for rows, width in ((run.rows, run.width - run.lower_bits), (run.lower_rows, run.lower_bits))
            if width
        ]
        largest_levels = (1 << (plan.widths.astype(np.int64) - 1)) - 1
        counts = plan.widths >= _ROW_BITS
        if not counts.any():
            counts[:] = True
        share = math.sqrt(len(counts) / max(1, counts.sum()))
        inverse = np.divide(share, deviations, out=np.zeros_like(deviations), where=counts & (deviations > 0))
        return cls(
            runs=runs,
            row_widths=np.concatenate(widths) if widths else np.zeros(0, np.uint8),
            steps=token_steps(plan.step),
            inverse_deviations=torch.from_numpy(inverse.astype(np.float32))[:, None],
            inverse_levels=torch.from_numpy((1 / largest_levels).astype(np.float32))[:, None],
        )

    @property
    def param_bytes(self) -> int:
        """Of one token: the code of its step."""
        return 1

    def quantize(self, coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Quantise the kept components of a chunk.

        coefficients: f32[num_components, num_tokens]. Returns symbols u8[num_rows, num_tokens] and codes of the steps
        u8[num_tokens]; None for coefficients that are not finite or too large for any step.
        """
        codes = self._step_codes(coefficients)
        if codes is None:
            return None
        per_step = 1 / self.steps[codes.int()]
        symbols = torch.empty(len(self.row_widths), coefficients.shape[1], dtype=torch.uint8)
        for run in self.runs:
            for block in run.blocks():
                # Cutting off after adding a half is rounding for numbers of at least 0; torch's round() starts threads
                # even for small arrays. The step leaves nothing to clamp but the rounding of its inverse.
                unsigned = (coefficients[block.components] * per_step).add_(block.offset + 0.5)
                unsigned = unsigned.clamp_(0, 2 * block.offset - 1).to(torch.int32 if run.lower_bits else torch.int16)
                symbols[block.rows] = unsigned >> run.lower_bits
                if run.lower_bits:
                    symbols[block.lower_rows] = unsigned & ((1 << run.lower_bits) - 1)
        return symbols, codes

    def _step_codes(self, coefficients: torch.Tensor) -> torch.Tensor | None:
        num_components, num_tokens = coefficients.shape
        if not num_components:
            return torch.full((num_tokens,), SCALE_ONE, dtype=torch.uint8)
        needed = (coefficients * self.inverse_deviations).square_().mean(dim=0).sqrt_() * self.steps[SCALE_ONE]
        needed = torch.maximum(needed, (coefficients * self.inverse_levels).abs_().amax(dim=0))
        # Whatever is not finite stays so in a sum.
        if not bool(torch.isfinite(needed.sum())) or bool((needed > self.steps[-1]).any()):
            return None
        return torch.searchsorted(self.steps, needed).to(torch.uint8)

    def read_params(self, content: npt.NDArray[np.uint8], num_tokens: int) -> torch.Tensor:
        """Codes of the steps of a frame from the bytes of their section: every byte is one."""
        return torch.from_numpy(content)

    def dequantize(self, symbols: torch.Tensor, params: torch.Tensor, out: torch.Tensor) -> None:
        """Inverse of `quantize`, exact in fp32 and rounded to the dtype of `out`: float[num_components, num_tokens].

        symbols: u8[num_rows, num_tokens]. params: u8[num_tokens].
        """
        steps = self.steps[params.int()]
        for run in self.runs:
            for block in run.blocks():
                levels = symbols[block.rows].float()
                if run.lower_bits:
                    levels = levels.mul_(1 << run.lower_bits).add_(symbols[block.lower_rows])
                out[block.components].copy_(levels.sub_(block.offset).mul_(steps))


def token_steps(step: float) -> torch.Tensor:
    """f32[256]: step x 2 ** ((code - SCALE_ONE) / SCALE_UNITS) of every code, rounded to bfloat16."""
    scales = torch.exp2((torch.arange(256, dtype=torch.float64) - SCALE_ONE) / SCALE_UNITS)
    return (scales * step).bfloat16().float()


def _runs(plan: SidePlan) -> Iterator[LevelRun]:
    first = row = 0
    for width, groups in itertools.groupby(plan.groups, key=lambda group: group.width):
        size = sum(group.size for group in groups)
        run = LevelRun(first, size, width, row, row + size)
        yield run
        first += size
        row += size * (2 if run.lower_bits else 1)
