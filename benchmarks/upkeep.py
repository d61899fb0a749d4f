"""Time of what gated eviction does in a decode step beside the model: allocating, listing, buffering, evicting.

The same calls that a server makes, on a pool, tables and buffers of the same sizes, but with a stand-in for the model:
attention modules that compute nothing, whose hidden states are random, as are then the scores. What a step of the
model does to the caches of the cores is imitated by reading a buffer between two steps, which is not timed.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from sglang_kvtc.config import EvictionConfig
from sglang_kvtc.gates.io import GateFile
from sglang_kvtc.integration.cell_pool import CellAllocator, CellKVPool
from sglang_kvtc.integration.eviction_options import slots_per_token
from sglang_kvtc.integration.gating import Gating
from sglang_kvtc.types import ModelGeometry

INTERVALS = 3
"""Times `decode_interval` steps that are timed: an eviction of each request falls due in each."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
OTHER_BYTES = 256 << 20
"""About what the weights of the demo model take."""


class Upkeep:
    """Gated requests that decode without a model."""

    def __init__(
        self,
        gates: GateFile,
        geometry: ModelGeometry,
        keep_fraction: float,
        num_requests: int,
        prompt_tokens: int,
        other_bytes: int = OTHER_BYTES,
    ) -> None:
        """Prompts of random hidden states, scored and evicted from. other_bytes: read between two steps."""
        config = EvictionConfig(budget={"keep_fraction": keep_fraction})
        self.interval = config.decode_interval
        self._lengths = [prompt_tokens] * num_requests
        most = prompt_tokens + INTERVALS * self.interval
        dtype = DTYPES[geometry.dtype]
        self._pool = CellKVPool(
            num_requests * most,
            1,
            dtype,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.num_layers,
            "cpu",
            False,
            slots_per_token=slots_per_token(config),
        )
        self._allocator = CellAllocator(self._pool.size, dtype=dtype, device="cpu", kvcache=self._pool, need_sort=False)
        self._rows = list(range(1, num_requests + 1))
        self._req_to_token = torch.zeros((num_requests + 1, most), dtype=torch.int32)
        self.gating = Gating(config, gates, self._pool, self._req_to_token, dtype)
        self._allocator.gating = self.gating
        self._model = _Layers(geometry.num_layers)
        self.gating.states.attach(self._model)
        self._requests = [_request(row) for row in self._rows]
        for request in self._requests:
            self.gating.enter(request, publishes=False)
        self._rng = torch.Generator().manual_seed(0)
        self._hidden_size = gates.gates.config.input_features
        self._dtype = dtype
        self._other = torch.ones(other_bytes // 4)
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        for request, row in zip(self._requests, self._rows, strict=True):
            self._prefill(request, row, prompt_tokens)

    def measure(self) -> dict[str, float]:
        """Milliseconds of a step by what they go into, each a median.

        allocate_ms: slots and cells. tables_ms: page tables. states_ms: hidden states copied in every layer. evict_ms:
        scoring what was copied, choosing, freeing and rebuilding page tables, spread over the steps between evictions.
        """
        self._seconds.clear()
        for _ in range(INTERVALS * self.interval):
            self._step()
        # An eviction ends an interval, and the next one begins with new page tables.
        firsts = range(0, INTERVALS * self.interval, self.interval)
        usual = {
            name: statistics.median(
                seconds for first in firsts for seconds in taken[first + 1 : first + self.interval - 1]
            )
            for name, taken in self._seconds.items()
        }
        evicting = [
            self._seconds["evict"][first + self.interval - 1] + self._seconds["tables"][first] - usual["tables"]
            for first in firsts
        ]
        usual["evict"] += statistics.median(evicting) / self.interval
        return {f"{name}_ms": 1e3 * seconds for name, seconds in usual.items()}

    def _prefill(self, request: SimpleNamespace, row: int, num_tokens: int) -> None:
        slots = self._allocate(num_tokens)
        self._req_to_token[row, :num_tokens] = slots.int()
        request.kv.kv_committed_len = num_tokens
        self.gating.before_batch([request])
        self.gating.lists([row], [num_tokens], slots, [num_tokens])
        self.gating.states.start([row], None, slots)
        self._model(self._hidden_states(num_tokens))
        self.gating.after_batch([request])

    def _step(self) -> None:
        self._other.sum()
        states = self._hidden_states(len(self._rows))
        positions = list(self._lengths)
        with self._timed("allocate"):
            slots = self._allocate(len(self._rows))
        self._req_to_token[self._rows, positions] = slots.int()
        self._lengths = [length + 1 for length in positions]
        for request, length in zip(self._requests, self._lengths, strict=True):
            request.kv.kv_committed_len = length
        with self._timed("tables"):
            self.gating.lists(self._rows, self._lengths, slots, None)
            self._pool.cells_of(slots)
        with self._timed("states"):
            self.gating.before_batch(self._requests)
            self.gating.states.start(self._rows, positions, slots)
            self._model(states)
        with self._timed("evict"):
            self.gating.after_batch(self._requests)

    def _allocate(self, num_tokens: int) -> torch.Tensor:
        slots = self._allocator.alloc(num_tokens)
        assert slots is not None
        return slots

    def _hidden_states(self, num_tokens: int) -> torch.Tensor:
        return torch.randn(num_tokens, self._hidden_size, generator=self._rng).to(self._dtype)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name].append(time.perf_counter() - start)


class _Attention(torch.nn.Module):
    """An attention module that computes nothing, by the names that SGLang's models use."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.attn = SimpleNamespace(
            layer_id=layer,
            sliding_window_size=-1,
            use_irope=False,
            xai_temperature_len=-1,
            is_cross_attention=False,
            attn_type=SimpleNamespace(value="decoder"),
            logit_cap=0.0,
            k_scale=None,
            v_scale=None,
        )

    def forward(self, *, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class _Layers(torch.nn.Module):
    """A model whose layers are attention modules that compute nothing."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"self_attn": _Attention(layer)}) for layer in range(num_layers)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            attention: Callable[..., torch.Tensor] = layer["self_attn"]  # type: ignore[index]
            hidden_states = attention(hidden_states=hidden_states)
        return hidden_states


def _request(row: int) -> SimpleNamespace:
    """What gating reads of SGLang's request."""
    return SimpleNamespace(
        kv=SimpleNamespace(req_pool_idx=row, kv_committed_len=0, cache_protected_len=0, holds_kv=True),
        sampling_params=SimpleNamespace(custom_params=None),
        extra_key=None,
    )
