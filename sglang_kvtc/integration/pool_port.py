"""EnginePort over SGLang's MHATokenToKVPool (K and V buffers per layer, [slot, head, channel]), and over cells."""

from __future__ import annotations

from typing import Any

import torch


class PoolPort:
    """Reads the pool's buffers directly: its own accessors would wait for the restore that is being written."""

    def __init__(self, kvcache: Any) -> None:
        self._keys: list[torch.Tensor] = kvcache.k_buffer
        self._values: list[torch.Tensor] = kvcache.v_buffer

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _gather(self._keys, slots), _gather(self._values, slots)

    def scatter(self, layers: range, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        # The allocator mostly hands out neighbours, and a plain copy is three times as fast.
        first = int(slots[0])
        in_order = torch.equal(slots, torch.arange(first, first + len(slots)))
        for index, layer in enumerate(layers):
            for buffer, rebuilt in ((self._keys[layer], keys[index]), (self._values[layer], values[index])):
                if in_order:
                    buffer[first : first + len(slots)] = rebuilt
                else:
                    buffer.index_copy_(0, slots, rebuilt)


class CellPort:
    """The same over a CellKVPool, where only whole tokens are read and written."""

    def __init__(self, kvcache: Any) -> None:
        self._pool = kvcache

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self._pool
        cells = pool.cells_of(slots).flatten()
        shape = (pool.layer_num, len(slots), pool.head_num, -1)
        return pool.k_cells.index_select(0, cells).view(shape), pool.v_cells.index_select(0, cells).view(shape)

    def scatter(self, layers: range, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        for cells, of_keys, of_values in zip(self._pool.cells_of(slots, layers), keys, values, strict=True):
            self._pool.store(cells, of_keys, of_values)


def _gather(buffers: list[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    out = torch.empty((len(buffers), len(slots), *buffers[0].shape[1:]), dtype=buffers[0].dtype)
    for layer, buffer in enumerate(buffers):
        torch.index_select(buffer, 0, slots, out=out[layer])
    return out
