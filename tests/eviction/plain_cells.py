"""The books of a cell pool in plain Python, and what attention reads, found by loops: oracles of the cell pool."""

from __future__ import annotations

import math

import torch

from sglang_kvtc.eviction.cells import CellPool

Entry = tuple[int, int, int]
"""Layer, slot, KV head."""


class PlainPool:
    """Which entries exist and how many cells are in which state; it never looks at cells."""

    def __init__(self, num_layers: int, num_kv_heads: int, num_cells: int) -> None:
        self.heads = [(layer, head) for layer in range(num_layers) for head in range(num_kv_heads)]
        self.alive: set[Entry] = set()
        self.slots: set[int] = set()
        self.free_cells = num_cells - len(self.heads)
        self.waiting: list[tuple[int, int]] = []
        self.launched = self.done = -1

    def allocate(self, slots: list[int]) -> bool:
        if len(slots) * len(self.heads) > self.free_cells:
            return False
        self.free_cells -= len(slots) * len(self.heads)
        self.slots |= set(slots)
        self.alive |= {(layer, slot, head) for layer, head in self.heads for slot in slots}
        return True

    def evict(self, slots: list[int], keep: torch.Tensor) -> int:
        return self._retire(
            {(layer, s, h) for layer, h in self.heads for i, s in enumerate(slots) if not keep[layer, i, h]}
        )

    def free(self, slots: list[int]) -> int:
        self.slots -= set(slots)
        return self._retire({(layer, slot, head) for layer, head in self.heads for slot in slots})

    def _retire(self, entries: set[Entry]) -> int:
        gone = entries & self.alive
        self.alive -= gone
        if self.launched > self.done:
            self.waiting.append((self.launched, len(gone)))
        else:
            self.free_cells += len(gone)
        return len(gone)

    def advance(self, step: int) -> None:
        self.done = max(self.done, min(step, self.launched))
        self.free_cells += sum(count for tag, count in self.waiting if tag <= self.done)
        self.waiting = [(tag, count) for tag, count in self.waiting if tag > self.done]

    def check(self, pool: CellPool) -> None:
        """Compare with a pool, whose own books have to be right as well."""
        pool.check()
        assert pool.free_cells == self.free_cells
        assert pool.free_tokens == self.free_cells // len(self.heads)
        assert pool.used_cells == len(self.alive)
        assert pool.pending_cells == sum(count for _, count in self.waiting)
        table = pool.table.tolist()
        for layer, head in self.heads:
            for slot in range(1, pool.num_slots):
                assert (table[layer][slot][head] >= 0) == ((layer, slot, head) in self.alive)


def plain_lists(
    pool: CellPool, slots: list[int], visible: torch.Tensor | None = None
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Cell and position of each listed pair of a request, by (layer, head), from the table alone."""
    table = pool.table.tolist()
    return {
        (layer, head): [
            (table[layer][slot][head], position)
            for position, slot in enumerate(slots)
            if table[layer][slot][head] >= 0 and (visible is None or bool(visible[layer, position, head]))
        ]
        for layer in range(pool.num_layers)
        for head in range(pool.num_kv_heads)
    }


def masked_dense_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """Attention of one query over the kept tokens of one head: f64[dim], f64[n, dim] twice, bool[n] -> f64[dim]."""
    logits = (keys @ query) / math.sqrt(len(query))
    return logits.masked_fill(~kept, -math.inf).softmax(0) @ values
