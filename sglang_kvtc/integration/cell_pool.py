"""SGLang's KV pool and slot allocator over cells: one buffer for all layers, in which any evicted KV pair makes room.

SGLang keeps its slots, one per token. Which cell holds the K and V of (layer, slot, KV head) says `eviction.cells`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_kvtc.errors import UnsupportedError
from sglang_kvtc.eviction.cell_lists import IN_PLACE_CELLS
from sglang_kvtc.eviction.cells import CellPool

if TYPE_CHECKING:
    from sglang.srt.mem_cache.prefill_budget import PrefillBudget

SCORE_DTYPE = torch.float16
"""Of stored scores: they only rank pairs, and keep_mask breaks ties by position."""


class CellKVPool(MHATokenToKVPool):
    """`size` tokens of memory as cells, and `slots_per_token` times as many slots.

    k_cells: dtype[num_cells, head_dim]; v_cells: dtype[num_cells, v_head_dim]. scores: f16[num_layers, num_slots,
    num_kv_heads] of the gates, 0 for slots nobody scored. Besides K and V, a token of memory costs 6 bytes per KV pair
    and slot (table and score) and 4 bytes per pair (free list).
    """

    def __init__(self, *args: Any, slots_per_token: int, **kwargs: Any) -> None:
        self._slots_per_token = slots_per_token
        super().__init__(*args, **kwargs)

    def _create_buffers_normal(self) -> None:
        num_cells = (self.size + 1) * self.layer_num * self.head_num
        num_slots = self.size * self._slots_per_token + 1
        self.cells = CellPool(self.layer_num, self.head_num, num_slots, num_cells, self.device)
        # Zeros, since the padding slot's cells are read before they are written.
        self.k_cells = torch.zeros((num_cells, self.head_dim), dtype=self.store_dtype, device=self.device)
        self.v_cells = torch.zeros((num_cells, self.v_head_dim), dtype=self.store_dtype, device=self.device)
        self.scores = torch.zeros(self.cells.table.shape, dtype=SCORE_DTYPE, device=self.device)
        self.k_buffer = [self.k_cells] * self.layer_num
        self.v_buffer = [self.v_cells] * self.layer_num

    @property
    def num_slots(self) -> int:
        """Slots, padding slot 0 included."""
        return self.cells.num_slots

    def get_kv_size_bytes(self) -> tuple[int, int]:
        return self.k_cells.nbytes, self.v_cells.nbytes

    @property
    def overhead_bytes(self) -> int:
        """Memory of table, scores and the pool's books (eviction.cells)."""
        return self.cells.book_bytes + self.scores.nbytes

    def wait_layer(self, layer_id: int) -> None:
        """Wait for a restore that still writes this layer; what SGLang's accessors of the buffers do first."""
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id - self.start_layer)

    def cells_of(self, slots: torch.Tensor, layers: range | None = None) -> torch.Tensor:
        """Cells i64[num_layers, n x num_kv_heads] of whole slots i64[n] in some layers, to `store` into."""
        table = self.cells.table if layers is None else self.cells.table[layers.start : layers.stop]
        return table[:, slots].flatten(1).long()

    def store(self, cells: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write dtype[n, num_kv_heads, head size] of one layer into cells i64[n x num_kv_heads]."""
        self.k_cells.index_copy_(0, cells, keys.reshape(-1, self.head_dim).to(self.k_cells.dtype))
        self.v_cells.index_copy_(0, cells, values.reshape(-1, self.v_head_dim).to(self.v_cells.dtype))

    def _store_kv_layer(self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        self.store(self.cells.table[layer_idx, loc].flatten().long(), cache_k, cache_v)

    # What addresses K and V by slot would read other tokens' cells.

    def _get_key_buffer(self, layer_id: int) -> NoReturn:
        raise UnsupportedError("something reads the KV pool by slot, but with --kvtc-gates it holds cells")

    def _get_value_buffer(self, layer_id: int) -> NoReturn:
        self._get_key_buffer(layer_id)

    def _build_kv_buffer_descs(self) -> list[Any]:
        return []

    def get_contiguous_buf_infos(self) -> NoReturn:
        self._get_key_buffer(0)

    def get_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._get_key_buffer(0)

    def load_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._get_key_buffer(0)

    def move_kv_cache(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._get_key_buffer(0)


class CellAllocator(TokenToKVPoolAllocator):
    """Hands out slots with all their cells; sizes are in whole tokens of memory.

    gating: what evicts from these slots, set once the model is loaded.
    """

    gating: Any = None

    @property
    def pool(self) -> CellKVPool:
        pool: CellKVPool = self._kvcache
        return pool

    def clear(self) -> None:
        self.pool.cells.reset()
        self.free_pages = torch.arange(1, self.pool.num_slots, dtype=torch.int64, device=self.device)
        self.release_pages = torch.empty((0,), dtype=torch.int64, device=self.device)
        self.free_group: list[torch.Tensor] | None = None
        if self.gating is not None:
            self.gating.reset()

    def available_size(self) -> int:
        return min(len(self.free_pages), self.pool.cells.free_tokens)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if need_size > self.available_size():
            return None
        slots = self.free_pages[:need_size]
        # Shorter runs are not read in place by attention, and looking for them is not free.
        as_runs = need_size * self.pool.head_num >= IN_PLACE_CELLS
        if not self.pool.cells.allocate(slots, as_runs=as_runs):
            return None
        self.free_pages = self.free_pages[need_size:]
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        if self.free_group is not None:
            self.free_group.append(self._copy_for_free_group(free_index))
            return
        slots = free_index.to(torch.int64)
        self.pool.cells.free(slots)
        self.free_pages = torch.cat((self.free_pages, slots))

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> PrefillBudget:
        from sglang_kvtc.integration.admission import CellPrefillBudget

        return CellPrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def get_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.pool.get_cpu_copy()

    def load_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.pool.load_cpu_copy()


def private_tokens(allocator: CellAllocator, rows: list[torch.Tensor]) -> int:
    """Tokens of memory, rounded up, that the slots i32[n] of some requests hold by the table itself."""
    table = allocator.pool.cells.table
    cells = sum(int((table[:, slots.long()] >= 0).sum()) for slots in rows)
    return -(-cells // allocator.pool.cells.cells_per_token)
