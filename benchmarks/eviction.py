"""The eviction harness: how much a model's output changes when KV pairs of a context no longer exist.

A context is prefilled once. Then its continuation is teacher-forced while attention sees the kept (layer, token, KV
head) pairs only. Evicted pairs are masked out exactly, and every token keeps its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvtc.benchmarks.harness import Change, standard_error
from sglang_kvtc.calibrate.attention_hook import attention_by, attention_inputs, causal_attention
from sglang_kvtc.calibrate.causal_lm import continue_from, prefill

Respond = Callable[[Sequence[int]], torch.Tensor]
"""What a model expects after every token of a continuation of some context, in part evicted: log-probabilities,
f32[number of continuation tokens, vocabulary]. Every call starts from the context again."""


@dataclass(frozen=True, slots=True)
class Context:
    """A prefilled context and what its prefill showed, in the model's dtype and on its device.

    keys, values: [num_layers, num_tokens, num_kv_heads, head size], K after RoPE. queries: [num_layers, num_tokens,
    num_heads, head_dim], after RoPE; the query heads of one KV head are neighbours. hidden: [num_layers, num_tokens,
    hidden size], the states that enter attention. scaling: factor of the dot products in every layer.
    """

    token_ids: tuple[int, ...]
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    hidden: torch.Tensor
    scaling: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.queries.shape[2] // self.keys.shape[2]


def prefill_context(model: Any, token_ids: Sequence[int]) -> Context:
    """Run `token_ids` once. Raises UnsupportedError for a model that `attention_by` or `prefill` refuses."""
    seen: dict[int, torch.Tensor] = {}
    hidden: dict[int, torch.Tensor] = {}
    scalings: dict[int, float] = {}

    def attend(
        layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        seen[layer] = queries.transpose(0, 1)
        scalings[layer] = scaling
        return causal_attention(queries, keys, values, scaling)

    def receive(layer: int, states: torch.Tensor) -> None:
        hidden[layer] = states

    with attention_by(model, attend), attention_inputs(model, receive):
        keys, values = prefill(model, token_ids)
    layers = range(len(keys))
    return Context(
        token_ids=tuple(token_ids),
        keys=keys,
        values=values,
        queries=torch.stack([seen[layer] for layer in layers]),
        hidden=torch.stack([hidden[layer] for layer in layers]),
        scaling=tuple(scalings[layer] for layer in layers),
    )


def all_kept(context: Context) -> torch.Tensor:
    """The mask of the full cache: bool[num_layers, num_tokens, num_kv_heads], all True."""
    return torch.ones(context.keys.shape[:3], dtype=torch.bool, device=context.keys.device)


def continuation(model: Any, context: Context, kept: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    """What the model expects after every token of a continuation that sees only a part of its context.

    kept: bool[num_layers, num_tokens, num_kv_heads], True for the pairs that exist. Returns log-probabilities,
    f32[number of continuation tokens, vocabulary]. The full cache takes the same path, with `all_kept`.
    """
    by_head = kept.transpose(1, 2)

    def attend(
        layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        return causal_attention(queries, keys, values, scaling, kept=by_head[layer])

    with attention_by(model, attend):
        logits = continue_from(model, context.keys, context.values, token_ids)
    return logits.float().log_softmax(dim=-1)


def kl_standard_error(changes: Sequence[Change]) -> float | None:
    """Standard error, over documents, of the mean KL per token; None for a single document."""
    return standard_error([change.kl / change.num_tokens for change in changes])
