"""Requests of tests laid out as an engine has them: in the cells of a pool, with page tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from eviction.plain_attention import Request, random_request

from sglang_kvtc.eviction.cells import CellPool
from sglang_kvtc.eviction.page_table import PageTables


@dataclass
class Kept:
    """A batch in all layers: layers[layer][request]. Cells that no list names hold NaN."""

    layers: list[list[Request]]
    tables: PageTables
    k_cells: torch.Tensor
    v_cells: torch.Tensor

    @property
    def requests(self) -> list[int]:
        return list(range(len(self.layers[0])))

    @property
    def new_lens(self) -> list[int]:
        return [len(request.queries) for request in self.layers[0]]

    def queries(self, layer: int) -> torch.Tensor:
        return torch.cat([request.queries for request in self.layers[layer]])


def kept_in_pool(layers: list[list[Request]], device: str = "cpu") -> Kept:
    """Requests of several layers, with the same tokens in each, in cells of one pool after evictions."""
    heads, total = layers[0][0].keys.shape[1], sum(len(request.keys) for request in layers[0])
    pool = CellPool(len(layers), heads, total + 1, (total + 1) * len(layers) * heads + 9, device)
    tables = PageTables(pool, len(layers[0]))
    k_cells, v_cells = (
        torch.full((pool.num_cells, part.shape[2]), math.nan, dtype=part.dtype, device=device)
        for part in (layers[0][0].keys, layers[0][0].values)
    )
    end = 1
    for number, of_layers in enumerate(zip(*layers, strict=True)):
        slots = torch.arange(end, end + len(of_layers[0].keys), device=device)
        end += len(slots)
        assert pool.allocate(slots)
        pool.evict(slots, torch.stack([request.kept for request in of_layers]).to(device))
        tables.set(number, slots)
        for layer, request in enumerate(of_layers):
            cells = pool.table[layer, slots].long().cpu()
            k_cells[cells[request.kept]] = request.keys[request.kept].to(device)
            v_cells[cells[request.kept]] = request.values[request.kept].to(device)
    return Kept(layers, tables, k_cells, v_cells)


def random_kept(
    sizes: Sequence[tuple[int, int]], *, group: int, head_dim: int, dtype: torch.dtype, device: str = "cpu"
) -> Kept:
    """Two layers of requests with two KV heads and these numbers of tokens, of which the last are new."""
    rng = torch.Generator().manual_seed(group)
    return kept_in_pool(
        [
            [
                random_request(
                    rng,
                    num_tokens=num_tokens,
                    num_new=num_new,
                    kept_shares=[0.3 + 0.4 * layer, 0.6],
                    group=group,
                    head_dim=head_dim,
                    dtype=dtype,
                )
                for num_tokens, num_new in sizes
            ]
            for layer in range(2)
        ],
        device,
    )
