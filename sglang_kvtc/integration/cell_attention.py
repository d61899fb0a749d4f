"""Attention of SGLang's requests over cells, under the name of the stock CPU backend.

SGLang asks for a backend's name in many places, so ours takes the place of `torch_native` in its registry and builds
the stock one unless the KV pool holds cells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_kvtc.errors import UnsupportedError
from sglang_kvtc.integration.cell_pool import CellKVPool
from sglang_kvtc.integration.gating import Gating

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

BACKEND_NAME = "torch_native"


class CellAttentionBackend(TorchNativeAttnBackend):
    """Reads the cells of each KV head of each request through page tables (eviction.page_table), and writes them."""

    def __init__(self, runner: Any) -> None:
        """Loads the gates and hooks the model. Raises a KVTCError for a model or gates that do not fit."""
        super().__init__(runner)
        self._pool: CellKVPool = self.token_to_kv_pool
        self._gating = Gating.of_runner(runner)
        # Of the forward pass under way, by layer: what attention reads, and where K and V of the new tokens go.
        self._lists: list[Any] = []
        self._cells = torch.empty(0)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_idle():
            return
        rows = forward_batch.req_pool_indices.tolist()
        lengths = forward_batch.seq_lens.tolist()
        slots = forward_batch.out_cache_loc.long()
        is_decode = forward_batch.forward_mode.is_decode()
        new_lens = None if is_decode else forward_batch.extend_seq_lens.tolist()
        self._lists = self._gating.lists(rows, lengths, slots, new_lens)
        self._cells = self._pool.cells_of(slots)
        positions = [length - 1 for length in lengths] if is_decode else None
        self._gating.states.start(rows, positions, slots)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return self._attend(self._gating.attention.extend, q, k, v, layer, save_kv_cache)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return self._attend(self._gating.attention.decode, q, k, v, layer, save_kv_cache)

    def _attend(
        self,
        attention: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        if not save_kv_cache or k is None:
            raise UnsupportedError(f"layer {layer.layer_id} shares the KV of another layer: use a server without gates")
        pool, index = self._pool, layer.layer_id - self._pool.start_layer
        pool.wait_layer(layer.layer_id)
        pool.store(
            self._cells[index],
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
        )
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        attended = attention(queries, pool.k_cells, pool.v_cells, self._lists[index], layer.scaling)
        return attended.flatten(1)


def register() -> None:
    """Take the stock backend's place. Without cells the stock one is built, by its own factory."""
    stock: Callable[[Any], Any] = ATTENTION_BACKENDS[BACKEND_NAME]

    @register_attention_backend(BACKEND_NAME)
    def create(runner: Any) -> Any:
        return CellAttentionBackend(runner) if isinstance(runner.token_to_kv_pool, CellKVPool) else stock(runner)

    create.is_of_kvtc = True


def is_registered() -> bool:
    """Whether SGLang would build our backend."""
    return getattr(ATTENTION_BACKENDS[BACKEND_NAME], "is_of_kvtc", False)
