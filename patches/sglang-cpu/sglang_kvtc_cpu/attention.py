"""Attention of new tokens over a cached prefix on SGLang's `torch_native` backend, without redundant queries.

The stock backend pads the queries of a request to its whole length, so a request whose prefix is cached pays for the
attention of every prefix token again. Here only the new tokens are queries. A request without a cached prefix is
computed exactly as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

TARGET = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend"


def load() -> None:
    """Entry point of SGLang's general plugins. Without effect where an accelerator exists."""
    if torch.cuda.is_available() or torch.accelerator.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, attend_new_queries, HookType.AROUND)


def attend_new_queries(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """AROUND hook; arguments as in the stock method, which still serves all but causal self-attention.

    query, output: [num_tokens, num_heads, head_size] of the new tokens of all requests. k_cache, v_cache: [slots,
    num_kv_heads, head_size]. Writes into `output` and returns it.
    """
    special = encoder_lens is not None or options.get("is_cross_attn")
    if special or not options.get("causal") or options.get("sliding_window_size") is not None:
        return original(
            backend,
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_prefix_lens,
            extend_seq_lens,
            encoder_lens,
            **options,
        )
    start = 0
    for row, num_kv, num_new in zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True
    ):
        slots = req_to_token[row, :num_kv]
        new = slice(start, start + num_new)
        # [1, heads, tokens, head_size]
        q = query[new].transpose(0, 1)[None]
        k, v = (cache[slots].transpose(0, 1)[None].to(query.dtype) for cache in (k_cache, v_cache))
        # The last new token sees everything, so a single one needs no mask.
        mask = None
        if 1 < num_new < num_kv:
            mask = torch.ones(num_new, num_kv, dtype=torch.bool).tril(diagonal=num_kv - num_new)
        attended = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=num_new == num_kv,
            scale=options.get("scaling"),
            enable_gqa=bool(options.get("enable_gqa")),
        )
        output[new] = attended[0].transpose(0, 1)
        start += num_new
    return output
