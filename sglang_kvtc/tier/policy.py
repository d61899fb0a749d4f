"""Which tokens are coded how, what a stored token costs, and which nodes are stale."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.codec.segments import NodeSegment
from sglang_kvtc.config import TierConfig
from sglang_kvtc.tier.store import StoreUsage


class StorageCost:
    """Cuts nodes into chunks and estimates bytes per token for the tree, which budgets in tokens."""

    def __init__(self, codec: KVCodec, config: TierConfig) -> None:
        self._codec = codec
        self._min_node_tokens = config.min_node_tokens

    def segments(self, start_position: int, num_tokens: int) -> Iterator[NodeSegment]:
        """What every chunk of a node is to become, in order of position."""
        yield from self._codec.segments(start_position, num_tokens, min_coded_tokens=self._min_node_tokens)

    def bytes_per_token(self, usage: StoreUsage) -> float:
        """What a stored token has cost so far. Before there is experience: the plan, which omits sinks, windows and
        headers, doubled for them.
        """
        if usage.frame_tokens >= 4096:
            return usage.frame_bytes / usage.frame_tokens
        return min(2.0 * self._codec.planned_bytes_per_token, float(self._codec.geometry.bytes_per_token))


class SlotClock:
    """When each slot of the pool was last part of a match or an insert.

    The tree orders nodes by a logical clock, and its compiled core shows no node objects; wall time is kept here per
    slot, where both cores can be asked. Times are seconds of a monotonic clock; 0 means never.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._touched = torch.zeros(num_slots, dtype=torch.float64, device=device)

    def touch(self, slots: torch.Tensor, now: float) -> None:
        """slots: i64[n]."""
        self._touched[slots] = now

    def idle_s(self, slot: int, now: float) -> float:
        return now - float(self._touched[slot])
