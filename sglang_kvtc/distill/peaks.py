"""Largest attention probability of every key over many queries, without ever holding an attention matrix."""

from __future__ import annotations

import torch

_TILE_BYTES = 1 << 20
"""Most memory of the logits that are held at a time: about what a second-level cache holds."""


def raise_peaks(
    peaks: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    first_key: int = 0,
) -> None:
    """Raise `peaks` to the largest probability that any of these queries gives each key.

    peaks: f32[num_kv_heads, num_wanted], those so far, changed in place; for the keys from `first_key` on.
    queries: float[num_heads, num_queries, head_dim] and keys: float[num_kv_heads, num_keys, head_dim], after RoPE. The
    last `num_queries` keys are those of the queries themselves, which see one another causally; all earlier keys are
    seen by every query. The softmax runs over all keys given; query heads of one KV head are neighbours and share the
    maximum. A query does not raise the peak of its own token.
    """
    num_kv_heads, num_keys, _ = keys.shape
    num_queries, num_wanted = queries.shape[1], peaks.shape[1]
    grouped = queries.unflatten(0, (num_kv_heads, -1)).float() * scaling
    group_size = grouped.shape[1]
    tile = max(1, _TILE_BYTES // (4 * group_size * num_keys))
    for head in range(num_kv_heads):
        head_keys = keys[head].float()
        for start in range(0, num_queries, tile):
            stop = min(start + tile, num_queries)
            # Keys after the last query of the tile are seen by none of its queries.
            num_seen = num_keys - num_queries + stop
            logits = (grouped[head, :, start:stop].flatten(0, 1) @ head_keys[:num_seen].T).unflatten(
                0, (group_size, -1)
            )
            later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=logits.device).triu(1)
            logits[:, :, num_seen - (stop - start) :].masked_fill_(later, -torch.inf)
            probabilities = logits.softmax(dim=2)
            probabilities.diagonal(num_seen - (stop - start), dim1=1, dim2=2).zero_()
            tile_peaks = probabilities[:, :, first_key : first_key + num_wanted].amax(dim=(0, 1))
            reached = peaks[head, : len(tile_peaks)]
            torch.maximum(reached, tile_peaks, out=reached)
