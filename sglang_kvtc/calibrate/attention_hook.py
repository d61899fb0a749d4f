"""Putting one's own function in the place of a causal LM's attention, and seeing what enters every attention layer.

Works with every architecture whose attention goes through transformers' attention interface.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from sglang_kvtc.errors import UnsupportedError

_NAME = "kvtc"
_TILE_QUERIES = 1024
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "sliding_window", "position_bias")


class Attend(Protocol):
    """Attention of one layer over its cache."""

    def __call__(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """queries: dtype[num_heads, num_tokens, head_dim] of the newest tokens, after RoPE; keys and values:
        dtype[num_kv_heads, cached tokens, head size], the new ones last. Query heads of one KV head are neighbours.
        scaling: factor of the dot products. Returns dtype[num_heads, num_tokens, v_head_dim].
        """
        ...


@contextlib.contextmanager
def attention_by(model: Any, attend: Attend) -> Iterator[None]:
    """Compute every attention layer of `model` with `attend`, for one sequence at a time, until the context ends.

    Raises UnsupportedError for a model that attends in another way than softmax over all earlier tokens.
    """

    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        found = [name for name in _UNSUPPORTED_ARGUMENTS if kwargs.get(name) is not None]
        if found or len(query) != 1:
            cause = f"attention with {', '.join(found)}" if found else f"a batch of {len(query)} sequences"
            raise UnsupportedError(f"{type(module).__name__}: {cause} is not supported")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = attend(int(module.layer_idx), query[0], key[0], value[0], scale)  # type: ignore[arg-type]
        return output.transpose(0, 1)[None], None

    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, forward)
    # `attend` sees which tokens are new, and needs no mask.
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    model.set_attn_implementation(_NAME)
    try:
        if model.config._attn_implementation != _NAME:
            raise UnsupportedError(f"{type(model).__name__} does not use transformers' attention interface")
        yield
    finally:
        model.set_attn_implementation(before)


def causal_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain attention of the newest tokens, with the arguments and the result of `Attend`.

    kept: bool[num_kv_heads, earlier tokens], the cached pairs before the new tokens that exist; all by default.
    """
    num_new, num_keys = queries.shape[1], keys.shape[1]
    group_size = len(queries) // len(keys)
    if kept is None and num_new == num_keys:
        return _attention(queries, keys, values, scaling, is_causal=True)
    # In tiles of the queries, so that no mask of all queries by all keys is made.
    outputs = []
    for start in range(0, num_new, _TILE_QUERIES):
        tile = queries[:, start : start + _TILE_QUERIES]
        num_seen = num_keys - num_new + start + tile.shape[1]
        mask = _causal_mask(tile.shape[1], num_seen, queries.dtype, queries.device)
        if kept is not None:
            mask = mask.repeat(len(keys), 1, 1)
            mask[:, :, : num_keys - num_new].masked_fill_(~kept[:, None], -torch.inf)
            mask = mask.repeat_interleave(group_size, dim=0)
        outputs.append(_attention(tile, keys[:, :num_seen], values[:, :num_seen], scaling, mask=mask))
    return torch.cat(outputs, dim=1)


@functools.lru_cache(maxsize=8)
def _causal_mask(num_queries: int, num_keys: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """0 where the last `num_queries` of `num_keys` tokens may look, -inf elsewhere. Every layer asks for the same."""
    return torch.full((num_queries, num_keys), -torch.inf, dtype=dtype, device=device).triu(num_keys - num_queries + 1)


def _attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        queries[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=len(queries) != len(keys),
    )[0]


def attention_modules(model: Any) -> list[torch.nn.Module]:
    """The attention modules of `model` by layer. Raises UnsupportedError for what `attention_by` refuses."""
    modules = [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention")
    ]
    modules.sort(key=lambda module: int(module.layer_idx))
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if [int(module.layer_idx) for module in modules] != list(range(num_layers)):
        raise UnsupportedError(f"{type(model).__name__}: {len(modules)} attention modules for {num_layers} layers")
    return modules


@contextlib.contextmanager
def attention_inputs(model: Any, receive: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """Hand `receive` the layer and its hidden states, dtype[num_tokens, hidden size], as they enter attention."""

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        receive(int(module.layer_idx), hidden_states[0])  # type: ignore[arg-type]

    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in attention_modules(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
