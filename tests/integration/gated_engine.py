"""What an engine does around gated eviction, without a server: it allocates, runs a stand-in model, and frees.

Pool, allocator, KV record and attention modules are SGLang's own or ours; requests are stand-ins that have only what
gated eviction reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gates.plain_gates import config as gate_config
from gates.plain_gates import trained_like
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.schedule_batch import ReqKvInfo

from sglang_kvtc.artifact.schema import ModelFingerprint
from sglang_kvtc.config import EvictionConfig
from sglang_kvtc.eviction.page_table import PageTable
from sglang_kvtc.gates.io import GateFile
from sglang_kvtc.gates.model import GateKind, Gates
from sglang_kvtc.integration.cell_pool import CellAllocator, CellKVPool
from sglang_kvtc.integration.gating import Gating

L, H, FEATURES, HEAD_DIM = 2, 2, 6, 4
PER_TOKEN = L * H


def cell_pool(size: int, slots_per_token: int = 4, layers: int = L, heads: int = H, **options: Any) -> CellKVPool:
    settings: dict[str, Any] = {"dtype": torch.float32, "head_dim": HEAD_DIM, "enable_memory_saver": False, **options}
    return CellKVPool(
        size, 1, head_num=heads, layer_num=layers, device="cpu", slots_per_token=slots_per_token, **settings
    )


def cell_allocator(pool: CellKVPool) -> CellAllocator:
    return CellAllocator(pool.size, dtype=pool.dtype, device="cpu", kvcache=pool, need_sort=False)


def linear_gates(seed: int = 0, **changes: object) -> Gates:
    fields = {"num_layers": L, "num_kv_heads": H, "input_features": FEATURES, **changes}
    return trained_like(gate_config(GateKind.LINEAR, **fields), seed)


def gate_file(digest: bytes = b"d" * 16) -> GateFile:
    return GateFile(linear_gates(), ModelFingerprint("Toy", "toy", "0" * 32), digest=digest)


class SelfAttention(torch.nn.Module):
    """Takes its hidden states as SGLang's models pass them: by name, or after the positions."""

    def __init__(self, attention: RadixAttention) -> None:
        super().__init__()
        self.attn = attention

    def forward(self, positions: object, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class Model(torch.nn.Module):
    """As many layers of attention as asked for; `options` are RadixAttention's, of the last one."""

    def __init__(self, layers: int = L, first_layer: int = 0, **options: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for index in range(layers):
            layer = torch.nn.Module()
            more = options if index == layers - 1 else {}
            attention = RadixAttention(2 * H, HEAD_DIM, 1.0, H, first_layer + index, **more)
            layer.self_attn = SelfAttention(attention)
            self.layers.append(layer)

    def run(self, states: torch.Tensor) -> None:
        """states: [num_layers, num_new_tokens, features]."""
        for index, (layer, of_layer) in enumerate(zip(self.layers, states, strict=True)):
            if index % 2:
                layer.self_attn(None, of_layer)
            else:
                layer.self_attn(positions=None, hidden_states=of_layer)


def request(shared: torch.Tensor | None = None, custom: Any = None, extra_key: str | None = None) -> Any:
    """shared: slots of a prefix that the tree owns."""
    shared = torch.empty(0, dtype=torch.int64) if shared is None else shared
    return SimpleNamespace(
        kv=ReqKvInfo(cache_protected_len=len(shared)),
        sampling_params=SimpleNamespace(custom_params=custom),
        extra_key=extra_key,
        skip_radix_cache_insert=False,
        prefix=shared,
    )


@dataclass
class Recorder:
    """Publisher that keeps what it was given. `room`: tokens it still takes."""

    engine: Engine
    room: int = 1 << 30
    calls: list[tuple[torch.Tensor, int, torch.Tensor]] = field(default_factory=list)
    live: set[int] = field(default_factory=set)
    next_id: int = 0

    def encode(self, slots: torch.Tensor, start_position: int, scores: torch.Tensor) -> np.ndarray | None:
        assert bool(self.engine.pool.cells.alive(slots).all()), "a token is published after pairs of it were evicted"
        if len(slots) > self.room:
            return None
        self.room -= len(slots)
        self.calls.append((slots.clone(), start_position, scores.clone()))
        ids = np.arange(self.next_id, self.next_id + len(slots), dtype=np.int64)
        self.next_id += len(slots) + 1
        self.live |= set(ids.tolist())
        return ids

    def free(self, ids: np.ndarray) -> None:
        assert set(ids.tolist()) <= self.live, "ids are freed that are not held"
        self.live -= set(ids.tolist())


class Engine:
    """A scheduler's thread."""

    def __init__(
        self, budget: dict[str, Any], size: int = 200, rows: int = 4, interval: int = 8, seed: int = 0, **pool: Any
    ) -> None:
        self.pool = cell_pool(size, **pool)
        self.allocator = cell_allocator(self.pool)
        self.table = torch.zeros((rows, 1000), dtype=torch.int32)
        config = EvictionConfig(gates="toy", budget=budget, decode_interval=interval)
        self.gating = Gating(config, gate_file(), self.pool, self.table, torch.float32)
        self.allocator.gating = self.gating
        self.model = Model()
        self.gating.states.attach(self.model)
        self.free_rows = list(range(1, rows))
        self.noise = torch.Generator().manual_seed(seed)
        self.peak_used = 0
        self.lists: list[list[list[int]]] = []

    def slots(self, req: Any) -> torch.Tensor:
        return self.table[req.kv.req_pool_idx, : req.kv.kv_allocated_len].long()

    def own(self, req: Any) -> torch.Tensor:
        return self.slots(req)[req.kv.cache_protected_len :]

    def begin(self, req: Any) -> None:
        """Give it a row and its prefix, as when it is first scheduled."""
        state = getattr(req, "kvtc_gated", None)
        restored = state.restored if state is not None else None
        prefix = req.prefix if restored is None else torch.cat([req.prefix, restored])
        req.kv.req_pool_idx = self.free_rows.pop()
        self.table[req.kv.req_pool_idx, : len(prefix)] = prefix.int()
        req.kv.kv_committed_len = req.kv.kv_allocated_len = len(prefix)

    def forward(self, reqs: list[Any], counts: list[int] | None = None) -> list[PageTable]:
        """One forward pass: a decode step, or chunks of `counts` tokens. Returns the page tables it read.

        `lists` are then what those should be in each layer: all cells of each request and head, by the table.
        """
        slots = self.allocator.alloc(len(reqs) if counts is None else sum(counts))
        assert slots is not None, "out of memory"
        start = 0
        for req, count in zip(reqs, counts or [1] * len(reqs), strict=True):
            kv = req.kv
            self.table[kv.req_pool_idx, kv.kv_allocated_len : kv.kv_allocated_len + count] = slots[
                start : start + count
            ].int()
            kv.kv_allocated_len = kv.kv_committed_len = kv.kv_allocated_len + count
            start += count
        self.peak_used = max(self.peak_used, self.pool.cells.used_cells)
        gating, rows = self.gating, [req.kv.req_pool_idx for req in reqs]
        gating.before_batch(reqs)
        lengths = [req.kv.kv_allocated_len for req in reqs]
        tables = [of.table for of in gating.lists(rows, lengths, slots, counts)]
        gating.states.start(rows, None if counts else [length - 1 for length in lengths], slots)
        self.model.run(torch.randn(L, len(slots), FEATURES, generator=self.noise))
        for layer in range(L):
            self.pool._store_kv_layer(layer, slots, *torch.randn(2, len(slots), H, HEAD_DIM, generator=self.noise))
        cells = [self.pool.cells.table[:, self.slots(req)].tolist() for req in reqs]
        self.lists = [
            [
                [token[head] for token in of_request[layer] if token[head] >= 0]
                for of_request in cells
                for head in range(H)
            ]
            for layer in range(L)
        ]
        gating.after_batch(reqs)
        return tables

    def finish(self, req: Any) -> None:
        """Give slots and row back in SGLang's order: a retraction is the same."""
        self.allocator.free(self.own(req))
        self.gating.release(req)
        self.free_rows.append(req.kv.req_pool_idx)
        req.kv.req_pool_idx = None
        req.kv.mark_kv_released()
        req.kv.kv_committed_len = 0
