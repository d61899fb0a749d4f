"""What a budget keeps, by sorting tuples in plain Python: the oracle of sglang_kvtc.eviction.

It is written from the documented rules alone: it shares no code with the package, only the fields of a Budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

import torch

from sglang_kvtc.eviction.budget import Budget

Pair = tuple[int, int, int]
"""Layer, token, head."""


def plain_keep_mask(scores: torch.Tensor, budget: Budget, alive: torch.Tensor | None = None) -> torch.Tensor:
    num_layers, num_tokens, num_heads = scores.shape
    values: list[list[list[float]]] = scores.tolist()
    exists = torch.ones(scores.shape, dtype=torch.bool) if alive is None else alive
    heads = [(layer, head) for layer in range(num_layers) for head in range(num_heads)]
    units = {
        "global": [heads],
        "layer": [[(layer, head) for head in range(num_heads)] for layer in range(num_layers)],
        "head": [[head] for head in heads],
    }[budget.scope.value]

    def score(pair: Pair) -> float:
        return values[pair[0]][pair[1]][pair[2]]

    def best_first(pairs: Iterable[Pair]) -> list[Pair]:
        return sorted(pairs, key=lambda pair: (-score(pair), -pair[1], pair[0], pair[2]))

    sinks, window = budget.sink_tokens, plain_window(budget, num_tokens)
    kept: set[Pair] = set()
    for unit in units:
        size = len(unit) * num_tokens
        target = min(size, plain_target(values, budget, len(unit), num_tokens, exists))
        alpha = budget.safeguard
        if alpha == "auto":
            alpha = 0.2 if budget.scope.value == "layer" else 0.0
        dealt = floor_of(alpha, target) if budget.scope.value != "head" else 0
        chosen: set[Pair] = set()
        ranked: list[Pair] = []
        for number, (layer, head) in enumerate(unit):
            pairs = [(layer, token, head) for token in range(num_tokens) if exists[layer, token, head]]
            must = [
                pair for pair in pairs if pair[1] < sinks or pair[1] >= num_tokens - window or math.isnan(score(pair))
            ]
            others = best_first(set(pairs) - set(must))
            part = dealt // len(unit) + (number < dealt % len(unit))
            floor = max(budget.min_tokens, part)
            chosen |= {*must, *others[: max(0, floor - len(must))]}
            ranked += others
        for pair in best_first(set(ranked) - chosen):
            if len(chosen) >= target:
                break
            chosen.add(pair)
        kept |= chosen
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for pair in kept:
        mask[pair] = True
    return mask


def plain_window(budget: Budget, num_tokens: int) -> int:
    if budget.window_tokens != "auto":
        return budget.window_tokens
    return 4096 if num_tokens >= 16384 else max(128, int(num_tokens / 50))


def floor_of(share: float, count: int) -> int:
    return int((Decimal(str(share)) * count).to_integral_value(ROUND_FLOOR))


def plain_target(
    values: list[list[list[float]]], budget: Budget, heads: int, num_tokens: int, exists: torch.Tensor
) -> int:
    if budget.keep_fraction is not None:
        return floor_of(budget.keep_fraction, heads * num_tokens)
    if budget.keep_tokens is not None:
        return budget.keep_tokens * heads
    assert budget.keep_mass is not None
    steps = []
    for score, here in zip(torch.tensor(values).flatten().tolist(), exists.flatten().tolist(), strict=True):
        known = float(here) if math.isnan(score) else score
        steps.append(int(min(1.0, max(0.0, known)) * 65536))
    total = len(steps)
    needed = plain_mass_pairs(steps, budget.keep_mass)
    # The share is needed / total: compared with the clamps, and rounded down, in whole numbers.
    if Decimal(needed) < Decimal(str(budget.least_fraction)) * total:
        return floor_of(budget.least_fraction, heads * num_tokens)
    if Decimal(needed) > Decimal(str(budget.most_fraction)) * total:
        return floor_of(budget.most_fraction, heads * num_tokens)
    return needed * heads * num_tokens // total


def plain_mass_pairs(steps: list[int], keep_mass: float) -> int:
    wanted = int((Decimal(str(keep_mass)) * sum(steps)).to_integral_value(ROUND_CEILING))
    reached = 0
    for number, step in enumerate(sorted(steps, reverse=True)):
        if reached >= wanted:
            return number
        reached += step
    return len(steps)
