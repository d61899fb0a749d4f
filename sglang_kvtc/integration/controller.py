"""The parts of SGLang's hierarchical-cache controller and host pool that its unified radix cache calls.

SGLang keeps one host index per backed-up token in its tree nodes. Ours are virtual ids of `tier.store`: the tree
splits, locks and evicts them like slots of a host pool, and nothing in SGLang has to know about frames.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from sglang_kvtc.errors import RestoreError
from sglang_kvtc.tier.tier import CompressedTier
from sglang_kvtc.tier.worker import RestorePiece

PRIVATE_LOAD = -1
"""Node id of a load-back whose slots belong to a request: the tree waits for none of it."""


class HostEvent:
    """Completion flag with the interface of a device event. `error` is what the waiter must raise."""

    def __init__(self, done: bool = False) -> None:
        self._event = threading.Event()
        self.error: RestoreError | None = None
        if done:
            self._event.set()

    def record(self) -> None:
        self._event.set()

    def query(self) -> bool:
        return self._event.is_set()

    def synchronize(self) -> None:
        self._event.wait()


@dataclass(slots=True)
class TransferAck:
    """What the cache reads of a finished transfer (SGLang's HiCacheAck)."""

    node_ids: list[int]
    num_tokens: int
    finish_event: HostEvent
    start_event: HostEvent = field(default_factory=lambda: HostEvent(done=True))
    timing_enabled: bool = False
    num_bytes: int = 0

    @property
    def num_tokens_by_pool(self) -> dict[str, int]:
        return {"kv": self.num_tokens}


class LayerEvents:
    """Per-layer completion of one load-back. `finish_event` is the last layer's."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [HostEvent() for _ in range(num_layers)]

    @property
    def finish_event(self) -> HostEvent:
        return self.layers[-1]

    def complete(self, layers: range) -> None:
        for layer in layers:
            self.layers[layer].record()

    def fail(self, error: RestoreError) -> None:
        for event in self.layers:
            if not event.query():
                event.error = error
                event.record()

    def wait(self, layer: int) -> None:
        event = self.layers[layer]
        event.synchronize()
        if event.error is not None:
            raise event.error


class LayerDoneCounter:
    """Lets attention of layer l wait for layer l of the load-back its batch depends on.

    SGLang names a load-back by the index `update_producer` returned and passes it to `set_consumer` with the batch;
    -1 means that the batch waits for nothing.
    """

    def __init__(self, num_layers: int, num_counters: int) -> None:
        self.num_counters = num_counters
        self.events = [LayerEvents(num_layers) for _ in range(num_counters)]
        for events in self.events:
            events.complete(range(num_layers))
        self._num_layers = num_layers
        self._producer = -1
        self.consumer_index = -1

    def update_producer(self) -> int:
        index = (self._producer + 1) % self.num_counters
        if not self.events[index].finish_event.query():
            raise RuntimeError(f"load-back {index} is still running; its events cannot be reused")
        self.events[index] = LayerEvents(self._num_layers)
        self._producer = index
        return index

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Raises RestoreError if the layer's restore failed: wrong KV must never be read."""
        if self.consumer_index >= 0:
            self.events[self.consumer_index].wait(layer)

    def reset(self) -> None:
        self._producer = -1
        self.consumer_index = -1


class VirtualHostPool:
    """Host pool whose indices are the tier's ids and whose sizes are estimates in tokens."""

    def __init__(self, tier: CompressedTier) -> None:
        self._tier = tier
        self.anchor_entry = SimpleNamespace(
            host_pool=SimpleNamespace(shared_allocation_domain=None), host_evict_fn=None
        )
        self.entry_map: dict[str, Any] = {}

    @property
    def logical_size(self) -> int:
        return self._tier.capacity_tokens()

    def available_size(self) -> int:
        return self._tier.available_tokens()

    def free(self, indices: torch.Tensor, pool: object = None) -> int:
        return self._tier.free(indices.numpy())

    def get_pool(self, name: object) -> None:
        """There are no side pools."""

    def clear(self) -> None:
        self._tier.clear()

    def destroy(self) -> None:
        self._tier.close()


class KVTCController:
    """Stands in for SGLang's cache controller: `write` compresses a node, `load` restores host ids into slots.

    start_position_of: absolute position of the first token of a tree node; make_room: evicts that many stored tokens
    from the tree and says whether any went.
    """

    write_policy = "write_back"
    enable_storage = False
    storage_backend = None
    storage_backend_type = None
    pp_prefetch_command_group = None
    # The scheduler hands over its stream fences; on a CPU there is nothing to order.
    load_fence_stream = None
    write_fence_stream = None

    def __init__(
        self,
        tier: CompressedTier,
        allocator: Any,
        num_layers: int,
        start_position_of: Callable[[int, int], int],
        make_room: Callable[[int], bool],
    ) -> None:
        self._tier = tier
        self._allocator = allocator
        self._start_position_of = start_position_of
        self._make_room = make_room
        self.mem_pool_host = VirtualHostPool(tier)
        self.layer_done_counter = LayerDoneCounter(num_layers, num_counters=3)
        self.ack_write_queue: list[TransferAck] = []
        self.ack_load_queue: list[TransferAck] = []
        self._queued_loads: list[tuple[int, list[RestorePiece]]] = []

    def reset(self) -> None:
        """Part of a flush, which SGLang refuses while a load-back runs."""
        self.ack_write_queue.clear()
        self.ack_load_queue.clear()
        self._queued_loads.clear()
        self.layer_done_counter.reset()

    def has_inflight_device_transfers(self) -> bool:
        return bool(self._queued_loads or self.ack_load_queue)

    def write(
        self, device_indices: torch.Tensor, node_id: int = -1, extra_pools: object = None, flush: bool = False
    ) -> torch.Tensor | None:
        """Back up a node. Its slots are copied out before this returns, so it acknowledges at once."""
        if extra_pools:
            raise RuntimeError(f"unexpected side pools {extra_pools}: the start-up checks should have refused them")
        num_tokens = len(device_indices)
        ids = self._tier.compress(device_indices, self._start_position_of(node_id, num_tokens), self._make_room)
        if ids is None:
            return None
        self.ack_write_queue.append(TransferAck([node_id], num_tokens, HostEvent(done=True)))
        return torch.from_numpy(ids)

    def start_writing(self) -> None:
        """Nothing is deferred: `write` already copied the slots out."""

    def load(self, host_indices: torch.Tensor, node_id: int = -1, extra_pools: object = None) -> torch.Tensor | None:
        """Verify and allocate a load-back; it starts with the batch. None makes SGLang recompute the tokens."""
        allocated: list[torch.Tensor] = []

        def allocate(num_tokens: int) -> torch.Tensor | None:
            slots = self._allocator.alloc(num_tokens)
            if slots is not None:
                allocated.append(slots)
            return slots

        pieces = self._tier.prepare_restore(host_indices.numpy(), allocate)
        if pieces is None:
            return None
        self._queued_loads.append((node_id, pieces))
        return allocated[0]

    def start_loading(self) -> int:
        """Hand all queued load-backs to the worker as one; returns the index its batch waits on, or -1."""
        if not self._queued_loads:
            return -1
        loads, self._queued_loads = self._queued_loads, []
        index = self.layer_done_counter.update_producer()
        events = self.layer_done_counter.events[index]
        pieces = [piece for _, node_pieces in loads for piece in node_pieces]
        finished = HostEvent()

        def finish(error: RestoreError | None) -> None:
            if error is not None:
                events.fail(error)
            finished.record()

        self.ack_load_queue.append(
            TransferAck(
                [node for node, _ in loads if node != PRIVATE_LOAD],
                sum(len(piece.tokens) for piece in pieces),
                finished,
            )
        )
        self._tier.start_restore(pieces, events.complete, finish)
        return index
