"""What a model answers when evicted KV pairs are masked out of a dense cache and every token keeps its position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_kvtc.calibrate.attention_hook import attention_by

Evictions = Sequence[tuple[int, torch.Tensor]]
"""In order: tokens computed when it happened, and bool[num_layers, that many tokens, num_kv_heads] of what it left."""


def log_probs(model: Any, token_ids: Sequence[int], evictions: Evictions) -> torch.Tensor:
    """Log-probabilities after every token, f64[num_tokens, vocabulary], in one pass over all tokens.

    A token computed after an eviction and before the next sees what that eviction left, and everything younger.
    """
    num_tokens = len(token_ids)
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()

    def attend(
        layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        num_kv_heads, group = len(keys), len(queries) // len(keys)
        visible = causal.repeat(num_kv_heads, 1, 1)
        for index, (length, left) in enumerate(evictions):
            end = evictions[index + 1][0] if index + 1 < len(evictions) else num_tokens
            visible[:, length:end, :length] = left[layer].T[:, None]
        mask = visible.repeat_interleave(group, dim=0)
        keys, values = (part.repeat_interleave(group, dim=0) for part in (keys, values))
        logits = (queries @ keys.transpose(1, 2) * scaling).masked_fill(~mask, -torch.inf)
        return logits.softmax(dim=-1) @ values

    with torch.inference_mode(), attention_by(model, attend):
        logits = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits.double().log_softmax(dim=-1)
