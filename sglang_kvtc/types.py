"""Shapes and small value types shared by all layers. Torch is imported for typing only."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Side(enum.IntEnum):
    """Which of the two caches: K and V have separate bases and plans."""

    K = 0
    V = 1


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """KV geometry of one shard of a model.

    K and V may differ in head size (`head_dim`, `v_head_dim`); the number of layers and KV heads is that of this
    shard. `dtype` is the name of the KV cache dtype: "bfloat16", "float16" or "float32".
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str

    def features(self, side: Side) -> int:
        """Width p of the cross-layer feature vector of one token: layers x KV heads x head size."""
        return self.num_layers * self.num_kv_heads * (self.head_dim if side is Side.K else self.v_head_dim)

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def bytes_per_token(self) -> int:
        """Bytes of uncompressed K and V of one token in the cache dtype."""
        return (self.features(Side.K) + self.features(Side.V)) * self.element_bytes


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Half-open token range [start, stop); absolute positions in a sequence unless said otherwise."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def chunks(self, max_tokens: int) -> Iterator[TokenRange]:
        """Consecutive ranges of at most `max_tokens` tokens that cover this one."""
        for start in range(self.start, self.stop, max_tokens):
            yield TokenRange(start, min(start + max_tokens, self.stop))


@dataclass(frozen=True, slots=True)
class KVChunk:
    """K and V of consecutive tokens of one sequence, as they lie in the engine's cache (K after RoPE).

    keys:   dtype[num_layers, num_tokens, num_kv_heads, head_dim]
    values: dtype[num_layers, num_tokens, num_kv_heads, v_head_dim]
    start_position: absolute position of the first token.
    """

    keys: torch.Tensor
    values: torch.Tensor
    start_position: int

    @property
    def num_tokens(self) -> int:
        return int(self.keys.shape[1])
