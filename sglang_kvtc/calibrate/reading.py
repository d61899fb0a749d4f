"""Reading on from a given cache: many short continuations in one pass, and one long one whose K and V are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_kvtc.calibrate.causal_lm import filled_cache


def first_choices(
    model: Any, keys: torch.Tensor, values: torch.Tensor, continuations: Sequence[Sequence[int]]
) -> list[list[int]]:
    """What the model expects most after every token of several continuations of one cache, none of which sees another.

    keys, values: as `causal_lm.prefill` returns them, in any float dtype; not changed. All continuations go through the
    model as one sequence with a mask and positions of their own, so that the cache is there once.
    """
    num_cached = keys.shape[1]
    lengths = [len(token_ids) for token_ids in continuations]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    index = torch.cat([torch.arange(length) for length in lengths])
    is_seen = (owner[:, None] == owner[None]) & (index[:, None] >= index[None])
    is_seen = torch.cat([torch.ones(len(owner), num_cached, dtype=torch.bool), is_seen], dim=1)
    mask = torch.zeros(is_seen.shape, dtype=model.dtype).masked_fill_(~is_seen, -torch.inf)
    token_ids = torch.tensor([token for ids in continuations for token in ids])
    with torch.inference_mode():
        logits: torch.Tensor = model(
            input_ids=token_ids[None].to(model.device),
            position_ids=(num_cached + index)[None].to(model.device),
            attention_mask=mask[None, None].to(model.device),
            past_key_values=filled_cache(model, keys, values),
            use_cache=True,
        ).logits[0]
    return [choices.tolist() for choices in logits.argmax(dim=-1).split(lengths)]


def read_on(
    model: Any, keys: torch.Tensor, values: torch.Tensor, token_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Continue a cache by `token_ids` and keep what the model adds to it.

    keys, values: as `causal_lm.prefill` returns them, in any float dtype; not changed. Returns log-probabilities after
    every token, f32[num_tokens, vocabulary], and the K and V of the new tokens alone, in the dtype of `keys`.
    """
    cache = filled_cache(model, keys, values)
    num_cached = keys.shape[1]
    with torch.inference_mode():
        input_ids = torch.tensor([token_ids], device=model.device)
        logits = model(input_ids=input_ids, past_key_values=cache, use_cache=True).logits[0]
    new_keys = torch.stack([layer.keys[0, :, num_cached:].transpose(0, 1) for layer in cache.layers])
    new_values = torch.stack([layer.values[0, :, num_cached:].transpose(0, 1) for layer in cache.layers])
    return logits.float().log_softmax(dim=-1), new_keys.to(keys.dtype), new_values.to(values.dtype)
