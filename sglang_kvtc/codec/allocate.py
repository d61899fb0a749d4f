"""Optimal bit allocation over principal components by dynamic programming (KVTC section 3.2, appendix B.13).

The model: components are cut into groups of consecutive components; a group of a given size and width costs
size x width + 32 bits per token and has the mean squared error of really quantising it on a calibration sample; a
component in no group costs nothing and loses its variance. Errors are measured at every start for sizes 1 and 16, for
larger ones at the multiples of size / 16 and at the last start, with linear interpolation between those. For this model
the allocation is optimal: it minimises the total error of every budget exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_kvtc.artifact.schema import GROUP_SIZES, MAX_WIDTH, PARAM_BITS, Group, SidePlan
from sglang_kvtc.codec.quantize import in_steps, nearest_symbols, shift_and_scale
from sglang_kvtc.errors import ConfigError

Floats = npt.NDArray[np.float64]
OnUnits = Callable[[int], object]
"""Told how many more units of work are done (tqdm's `update`)."""

SAMPLE_TOKENS = 256
"""Most tokens of the calibration sample on which groups are quantised."""
_STARTS_PER_SIZE = 16
_BLOCK_ELEMENTS = 30_000
"""f32 elements quantised at a time: below torch's threshold for threads, which cost more than they gain on arrays that
fit the cache."""


@dataclass(frozen=True, slots=True)
class ErrorTable:
    """Mean squared error per token of every possible group.

    errors: by group size, f64[MAX_WIDTH, rank - size + 1]: row w - 1, column s is the group of width w that starts at
        component s. Sizes above the rank are absent.
    variances: f64[rank], what a component loses when it is in no group.
    """

    errors: dict[int, Floats]
    variances: Floats

    def error(self, groups: tuple[Group, ...]) -> float:
        """Squared error per token of coding these groups and dropping all other components."""
        kept = sum(float(self.variances[group.start : group.start + group.size].sum()) for group in groups)
        coded = sum(float(self.errors[group.size][group.width - 1, group.start]) for group in groups)
        return float(self.variances.sum()) - kept + coded


def error_table(coefficients: npt.NDArray[np.float32], *, on_components: OnUnits = lambda count: None) -> ErrorTable:
    """Quantise every possible group on a calibration sample.

    coefficients: f32[num_tokens, rank] of held-out tokens; at most SAMPLE_TOKENS of them, evenly spaced, are used.
    on_components: progress, in components per group size (rank x number of sizes in all). Raises ConfigError for a
    sample without tokens.
    """
    num_tokens, rank = coefficients.shape
    if num_tokens == 0 or rank == 0:
        raise ConfigError(f"the bit allocation needs coefficients, got a sample of {num_tokens} tokens x {rank}")
    picked = np.unique(np.linspace(0, num_tokens - 1, SAMPLE_TOKENS).astype(np.int64))
    by_component = torch.from_numpy(np.ascontiguousarray(coefficients[picked].T))
    errors = {}
    for size in GROUP_SIZES:
        if size <= rank:
            errors[size] = _errors_of_size(by_component, size, on_components)
        else:
            on_components(rank)
    return ErrorTable(errors, by_component.double().square().mean(dim=1).numpy())


def _errors_of_size(by_component: torch.Tensor, size: int, on_components: OnUnits) -> Floats:
    """Errors f64[MAX_WIDTH, rank - size + 1] of groups of one size. by_component: f32[rank, num_tokens]."""
    rank, num_tokens = by_component.shape
    spacing = max(1, size // _STARTS_PER_SIZE)
    starts = np.arange(0, rank - size + 1, spacing)
    if starts[-1] != rank - size:
        starts = np.append(starts, rank - size)
    measured = np.zeros((MAX_WIDTH, len(starts)))
    token_blocks = by_component.split(max(1, _BLOCK_ELEMENTS // size), dim=1)
    per_block = max(1, _BLOCK_ELEMENTS // (size * token_blocks[0].shape[1]))
    for first in range(0, len(starts), per_block):
        block = slice(first, first + per_block)
        for tokens in token_blocks:
            values = torch.stack([tokens[start : start + size] for start in starts[block].tolist()])
            low, high = values.amin(dim=1), values.amax(dim=1)
            for width in range(1, MAX_WIDTH + 1):
                shift, scale = shift_and_scale(low, high, 2.0**width - 1)
                steps = in_steps(values, shift, scale)
                missed = steps.sub_(nearest_symbols(steps, width).float())
                # mul: square() is a power and five times slower.
                squared = missed.mul_(missed).sum(dim=1).double() * scale.double().square()
                measured[width - 1, block] += squared.sum(dim=1).numpy() / num_tokens
        done = min(first + per_block, len(starts))
        on_components(rank * done // len(starts) - rank * first // len(starts))
    every_start = np.arange(rank - size + 1)
    return np.stack([np.interp(every_start, starts, row) for row in measured])


@dataclass(frozen=True, slots=True)
class _Option:
    size: int
    width: int
    bits: int
    errors: Floats


class Allocator:
    """The dynamic programme of one error table, solved for every budget up to `max_bits` per token at once.

    errors: f64[max_bits + 1], least squared error per token that each budget allows; it never rises.
    Takes rank x (max_bits + 1) bytes of memory.
    """

    def __init__(self, table: ErrorTable, max_bits: int, on_components: OnUnits = lambda count: None) -> None:
        """Solve it; on_components: progress, in components. Raises ConfigError for a negative budget."""
        if max_bits < 0:
            raise ConfigError(f"the bit budget per token is {max_bits}: expected at least 0")
        rank = len(table.variances)
        self._options = _useful_options(table, max_bits)
        # Index of the option that ends at a component, plus one; 0 where the component is in no group.
        self._choices = np.zeros((rank, max_bits + 1), np.uint8)
        rows = max((option.size for option in self._options), default=1) + 1
        best = np.zeros((rows, max_bits + 1))
        cumulative = np.concatenate([[0.0], np.cumsum(table.variances)])
        total, wins = np.empty(max_bits + 1), np.empty(max_bits + 1, np.bool_)
        winner = np.empty(max_bits + 1, np.uint8)
        for stop in range(1, rank + 1):
            row, choices = best[stop % rows], self._choices[stop - 1]
            np.add(best[(stop - 1) % rows], table.variances[stop - 1], out=row)
            for number, option in self._ending_at(stop, cumulative):
                end, start = max_bits + 1 - option.bits, stop - option.size
                np.add(best[start % rows, :end], option.errors[start], out=total[:end])
                np.less(total[:end], row[option.bits :], out=wins[:end])
                if not wins[:end].any():
                    continue
                np.minimum(row[option.bits :], total[:end], out=row[option.bits :])
                # Options come by rising number, so the largest one that won is the one that stands; this is several
                # times faster than a masked copy.
                np.multiply(wins[:end].view(np.uint8), number, out=winner[:end], dtype=np.uint8)
                np.maximum(choices[option.bits :], winner[:end], out=choices[option.bits :])
            on_components(1)
        self.errors: Floats = best[rank % rows].copy()

    def _ending_at(self, stop: int, cumulative: Floats) -> Iterator[tuple[int, _Option]]:
        """Options that may be part of an optimal allocation as the group that ends before component `stop`."""
        least: dict[int, float] = {}
        for number, option in enumerate(self._options, start=1):
            start = stop - option.size
            if start < 0:
                continue
            # Options of one size come by rising width: a wider one that is no better only costs more.
            bound = least.get(option.size, cumulative[stop] - cumulative[start])
            if option.errors[start] < bound:
                least[option.size] = option.errors[start]
                yield number, option

    def groups(self, budget_bits: int) -> tuple[Group, ...]:
        """The optimal groups for a budget of at most `max_bits` per token, in ascending order."""
        if not 0 <= budget_bits < self._choices.shape[1]:
            raise ConfigError(f"the bit budget per token is {budget_bits}: expected 0 to {self._choices.shape[1] - 1}")
        groups = []
        stop, budget = len(self._choices), budget_bits
        while stop > 0:
            number = self._choices[stop - 1, budget]
            if number == 0:
                stop -= 1
                continue
            option = self._options[number - 1]
            stop -= option.size
            budget -= option.bits
            groups.append(Group(stop, option.size, option.width))
        return tuple(reversed(groups))


def _useful_options(table: ErrorTable, max_bits: int) -> tuple[_Option, ...]:
    """Sizes and widths that fit the budget and somewhere beat both dropping the group and a smaller width."""
    options = []
    cumulative = np.concatenate([[0.0], np.cumsum(table.variances)])
    for size, errors in table.errors.items():
        least = cumulative[size:] - cumulative[:-size]
        for width in range(1, MAX_WIDTH + 1):
            bits = size * width + PARAM_BITS
            if bits <= max_bits and (errors[width - 1] < least).any():
                options.append(_Option(size, width, bits, errors[width - 1]))
                least = np.minimum(least, errors[width - 1])
    return tuple(options)


def allocate(table: ErrorTable, budget_bits: int, on_components: OnUnits = lambda count: None) -> tuple[Group, ...]:
    """Groups of least total error whose bits per token, parameters included, fit the budget."""
    return Allocator(table, budget_bits, on_components).groups(budget_bits)


def optimal_split(k_errors: Floats, v_errors: Floats, total_bits: int) -> int:
    """Bits per token of K, out of a total for K and V, for which the errors of both add up to least.

    k_errors, v_errors: `Allocator.errors` of the two sides for budgets up to `total_bits` at least, in a common unit.
    Of equally good splits the one with the fewest bits for K. Raises ConfigError for curves that end before the total.
    """
    solved = min(len(k_errors), len(v_errors)) - 1
    if not 0 <= total_bits <= solved:
        raise ConfigError(f"{total_bits} bits per token cannot be split: the error curves end at {solved}")
    return int(np.argmin(k_errors[: total_bits + 1] + v_errors[total_bits::-1]))


def side_plan(table: ErrorTable, groups: tuple[Group, ...], total_variance: float) -> SidePlan:
    """The plan of these groups.

    total_variance: mean squared norm of a centred row, of which the table's components have a part; what they leave
    out counts as error.
    """
    outside = max(0.0, total_variance - float(table.variances.sum()))
    error = table.error(groups) + outside
    return SidePlan(groups, error / total_variance if total_variance > 0 else 0.0)
