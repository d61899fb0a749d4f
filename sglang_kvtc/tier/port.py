"""What the tier needs of an engine's KV pool. `integration.pool_port` implements it for SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class EnginePort(Protocol):
    """Reads and writes slots of the engine's KV pool; knows nothing of trees or frames."""

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy slots out of the pool.

        slots: i64[num_tokens]. Returns K and V as new tensors dtype[num_layers, num_tokens, num_kv_heads, head_dim].
        Called on the scheduler thread, after every forward that wrote these slots.
        """
        ...

    def scatter(self, layers: range, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write K and V of `layers` (dtype[len(layers), num_tokens, ...]) into slots that nobody reads yet."""
        ...


LayerDone = Callable[[range], None]
"""Called by the worker when these layers of a restore are complete in the pool."""
