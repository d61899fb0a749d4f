"""Which KV pairs stay: from scores to a keep mask with exact counts (Fast KVzip, arXiv 2601.17668).

The order of the pairs. Higher scores are kept first. Among equal scores (-0.0 equals 0.0) the later token wins, then
the lower layer, then the lower head, so that the mask depends on nothing but the scores. Infinities are scores like any
other. NaN says nothing about a pair, so such a pair is never evicted: it is forced like a sink, counts against the
budget and is reported in the log.

How. Scores become int32 ranks of the same order, with one rank above all scores for forced pairs and one below for
pairs that do not exist. The rank of the last place is found by counting ranks in two passes of 16 bits, without
sorting; only where several pairs share that rank are they told apart. Temporary memory, on the device of the scores and
besides the mask (1 byte per pair): 4 bytes per pair for the ranks, and at most 32 bytes per pair of one layer at a
time.
"""

from __future__ import annotations

import logging
import math
from fractions import Fraction

import torch

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.eviction.budget import Budget, Scope, as_written

_LOG = logging.getLogger(__name__)

_LOWEST = -(1 << 31)
_ABSENT = _LOWEST
"""Rank of a pair that does not exist; the lowest score, minus infinity, ranks above it."""
_FORCED = (1 << 31) - 1
"""Rank of a pair that is kept whatever its score; the highest score, infinity, ranks below it."""
_HALF = 1 << 16

MASS_LEVELS = 1 << 16
"""Steps of score 1 in which the mass of a context is counted."""


def keep_mask(scores: torch.Tensor, budget: Budget, alive: torch.Tensor | None = None) -> torch.Tensor:
    """The pairs that stay.

    scores: f32 (or bf16, f16) [num_layers, num_tokens, num_kv_heads] of the whole logical context, higher = keep. It
        is only read. Scores of pairs that no longer exist are not ranked, but a `keep_mass` budget counts them into the
        mass of the context, or the mass would melt away from one eviction to the next: leave them in place.
    alive: bool[num_layers, num_tokens, num_kv_heads], the pairs that still exist; None for all. Only those are kept,
        and old ones compete with new ones. Shares are of the logical context, existing or not; sinks and window are its
        first and last tokens.

    Returns bool[num_layers, num_tokens, num_kv_heads] on the device of `scores`, True = kept. In each unit of the scope
    that is exactly its share, or its forced pairs where they are more, or all existing pairs where those are fewer (see
    Budget). Reads a few numbers back from the device. Raises ConfigError for tensors of another shape or dtype.
    """
    _check(scores, alive)
    scores = scores.detach()
    num_layers, num_tokens, num_kv_heads = scores.shape
    if scores.numel() == 0:
        return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    share = budget.fraction(num_tokens)
    if budget.keep_mass is not None:
        mass_share = Fraction(mass_pairs(scores, budget.keep_mass, alive), scores.numel())
        share = budget.fraction(num_tokens, mass_share)
    pairs = budget.unit_pairs(num_layers, num_tokens, num_kv_heads, share)
    if pairs >= num_tokens * _heads_per_unit(budget.scope, num_layers, num_kv_heads):
        return torch.ones(scores.shape, dtype=torch.bool, device=scores.device) if alive is None else alive.clone()

    sinks, window = budget.protected(num_tokens)
    ranks = _ranks(scores, alive, sinks, window)
    filled = sinks + window if alive is None or _exist(alive, sinks, window) else 0
    for of_layer, floors in zip(ranks, budget.head_floors(num_layers, num_kv_heads, pairs), strict=True):
        if max(floors) > filled:
            _force_floors(of_layer, floors)

    mask = torch.empty(ranks.shape, dtype=torch.bool, device=ranks.device)
    match budget.scope:
        case Scope.GLOBAL:
            _select(ranks, pairs, mask)
        case Scope.LAYER:
            for layer in range(num_layers):
                _select(ranks[layer : layer + 1], pairs, mask[layer : layer + 1])
        case Scope.HEAD:
            for layer in range(num_layers):
                mask[layer] = _best_of_each_head(ranks[layer], pairs)
    return mask


def kept_counts(mask: torch.Tensor) -> torch.Tensor:
    """Pairs that each head keeps, as i64[num_layers, num_kv_heads].

    mask: bool[num_layers, num_tokens, num_kv_heads].
    """
    return mask.sum(dim=1)


def mass_pairs(scores: torch.Tensor, keep_mass: float, alive: torch.Tensor | None = None) -> int:
    """The least number K of pairs whose scores, largest first, add up to `keep_mass` of the sum of all scores.

    Few high scores among many near zero make K small, even scores make it about `keep_mass` of all pairs. Scores are
    clamped to [0, 1] and counted in whole steps of 1 / MASS_LEVELS, rounded down, so that the sums are of integers and
    K is the same on every device. NaN counts as 1, or as 0 where `alive` says that the pair does not exist. K is 0 when
    no score reaches one step. Shapes and errors as in keep_mask; the mass is that of all pairs, existing or not.
    """
    _check(scores, alive)
    scores = scores.detach()
    counts = torch.zeros(MASS_LEVELS + 1, dtype=torch.int64, device=scores.device)
    for layer, of_layer in enumerate(scores):
        unknown: torch.Tensor | float = 1.0 if alive is None else alive[layer].float()
        levels = torch.where(of_layer.isnan(), unknown, of_layer.float().clamp(0, 1)).mul_(MASS_LEVELS)
        counts += torch.bincount(levels.int().flatten(), minlength=MASS_LEVELS + 1)
    counts = counts.cpu().flip(0)
    masses = (counts * torch.arange(MASS_LEVELS, -1, -1)).cumsum(0)
    total = int(masses[-1])
    wanted = math.ceil(as_written(keep_mass) * total)
    if wanted == 0:
        return 0
    # The level on which the sum is reached; of its equal scores only as many as are needed.
    step = int(torch.searchsorted(masses, wanted))
    higher_pairs, higher_mass = (int(counts[:step].sum()), int(masses[step - 1])) if step else (0, 0)
    return higher_pairs - (higher_mass - wanted) // (MASS_LEVELS - step)


def _check(scores: torch.Tensor, alive: torch.Tensor | None) -> None:
    if scores.ndim != 3 or scores.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"scores are {scores.dtype}{list(scores.shape)}: expected float32, bfloat16 or float16 of "
            "[num_layers, num_tokens, num_kv_heads]"
        )
    if alive is not None and (alive.shape != scores.shape or alive.dtype != torch.bool):
        raise ConfigError(
            f"alive is {alive.dtype}{list(alive.shape)}: expected bool of the shape of the scores, {list(scores.shape)}"
        )
    if alive is not None and alive.device != scores.device:
        raise ConfigError(f"alive is on {alive.device}, the scores on {scores.device}: move one of them")


def _heads_per_unit(scope: Scope, num_layers: int, num_kv_heads: int) -> int:
    return {Scope.GLOBAL: num_layers * num_kv_heads, Scope.LAYER: num_kv_heads, Scope.HEAD: 1}[scope]


def _exist(alive: torch.Tensor, sinks: int, window: int) -> bool:
    """Whether no protected pair is gone, as is usual: then they fill smaller floors without a search for the best."""
    return bool(alive[:, :sinks].all() & alive[:, alive.shape[1] - window :].all())


def _ranks(scores: torch.Tensor, alive: torch.Tensor | None, sinks: int, window: int) -> torch.Tensor:
    """Ranks i32[num_layers, num_tokens, num_kv_heads] in the order of the scores, _FORCED and _ABSENT included."""
    ranks = torch.empty(scores.shape, dtype=torch.int32, device=scores.device)
    unknown = torch.zeros((), dtype=torch.int64, device=scores.device)
    for layer, of_layer in enumerate(scores):
        bits = of_layer.float().contiguous().view(torch.int32)
        # The bits of floats ascend with positive values and, as signed integers, with the size of negative ones.
        out = torch.where(bits < 0, _LOWEST - bits, bits, out=ranks[layer])
        nans = of_layer.isnan()
        out.masked_fill_(nans, _FORCED)
        out[:sinks] = _FORCED
        out[len(out) - window :] = _FORCED
        if alive is not None:
            out.masked_fill_(~alive[layer], _ABSENT)
            nans &= alive[layer]
        unknown += nans.sum()
    if count := int(unknown):
        _LOG.warning("%d of %d scores are NaN: their KV pairs are kept", count, scores.numel())
    return ranks


def _force_floors(ranks: torch.Tensor, floors: list[int]) -> None:
    """Force the best pairs of each head of one layer. ranks: i32[num_tokens, num_kv_heads]; floors: by head."""
    start = 0
    while start < len(floors):
        # Floors differ by one at most, so there are at most two runs of equal ones.
        stop = start + floors[start:].count(floors[start])
        heads = ranks[:, start:stop]
        heads.masked_fill_(_best_of_each_head(heads, floors[start]), _FORCED)
        start = stop


def _best_of_each_head(ranks: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best pairs of each head and all its forced ones, as bool[num_tokens, num_heads].

    ranks: i32[num_tokens, num_heads] of one layer.
    """
    num_tokens = len(ranks)
    if count >= num_tokens:
        return ranks != _ABSENT
    if count == 0:
        return ranks == _FORCED
    last = ranks.kthvalue(num_tokens - count + 1, dim=0).values
    above, ties = ranks > last, (ranks == last) & (last != _ABSENT)
    later = ties.flip(0).cumsum(0).flip(0)
    return above | ties & ((later <= count - above.sum(dim=0)) | (last == _FORCED))


def _select(ranks: torch.Tensor, count: int, mask: torch.Tensor) -> None:
    """Set `mask` to the `count` best pairs of one unit and all its forced ones.

    ranks: i32[num_layers, num_tokens, num_kv_heads] of the layers that compete; mask: bool of the same shape.
    """
    if count == 0:
        torch.eq(ranks, _FORCED, out=mask)
        return
    last, places, ties = _last_place(ranks, count)
    if last == _FORCED or (places == ties and last != _ABSENT):
        torch.ge(ranks, last, out=mask)
        return
    torch.gt(ranks, last, out=mask)
    if last == _ABSENT:
        return
    tied_at = torch.zeros(ranks.shape[1], dtype=torch.int64, device=ranks.device)
    for of_layer in ranks:
        tied_at += (of_layer == last).sum(dim=1)
    at_or_after = tied_at.flip(0).cumsum(0).flip(0)
    # From this token on all ties stay; of the token before, only the first ones.
    first_whole = int((at_or_after > places).sum())
    for layer, of_layer in enumerate(ranks):
        mask[layer, first_whole:] |= of_layer[first_whole:] == last
    left = places - (int(at_or_after[first_whole]) if first_whole < len(at_or_after) else 0)
    ties_of_token = ranks[:, first_whole - 1] == last
    nth = ties_of_token.flatten().cumsum(0).view(ties_of_token.shape)
    mask[:, first_whole - 1] |= ties_of_token & (nth <= left)


def _last_place(ranks: torch.Tensor, count: int) -> tuple[int, int, int]:
    """The `count`-th largest rank, how many of the `count` have that rank, and how many pairs have it in all."""
    counts = torch.zeros(_HALF, dtype=torch.int64, device=ranks.device)
    for of_layer in ranks:
        counts += torch.bincount(((of_layer >> 16) + (_HALF >> 1)).flatten(), minlength=_HALF)
    high, places, _ = _from_the_top(counts, count)
    high -= _HALF >> 1
    counts.zero_()
    for of_layer in ranks:
        same = of_layer[of_layer >> 16 == high]
        counts += torch.bincount(same & (_HALF - 1), minlength=_HALF)
    low, places, ties = _from_the_top(counts, places)
    return high * _HALF + low, places, ties


def _from_the_top(counts: torch.Tensor, count: int) -> tuple[int, int, int]:
    """The bin that holds the `count`-th element from the top, its number within the bin, and the size of the bin."""
    sums = counts.cpu().flip(0).cumsum(0)
    position = int(torch.searchsorted(sums, count))
    before = int(sums[position - 1]) if position else 0
    return len(sums) - 1 - position, count - before, int(sums[position]) - before
