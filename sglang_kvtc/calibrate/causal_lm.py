"""The model under calibration: a Hugging Face causal LM whose cache is plain K and V of every token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging as transformers_logging

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.codec.rope import rope_spec_from_config
from sglang_kvtc.errors import ConfigError, UnsupportedError
from sglang_kvtc.types import ModelGeometry

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_config(model_dir: Path) -> Any:
    """Read the text decoder's configuration of a Hugging Face directory.

    Raises ConfigError when the directory holds none, UnsupportedError (naming the cause) for a model whose cache is
    not one key and one value per token, layer and KV head.
    """
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"--model {model_dir}: no Hugging Face model directory (it has no config.json)")
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedError(f"--model {model_dir}: transformers does not know this model: {error}") from error
    config = config.get_text_config(decoder=True)
    _check_cache(config)
    return config


def load_model(model_dir: Path, dtype: str, device: str = "cpu") -> Any:
    """Load the causal LM in `dtype` (a key of DTYPES) for inference, rotating keys as SGLang does.

    Raises UnsupportedError for a rope we do not know, or one this model does not keep where it can be set.
    """
    with no_loading_bars():
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=DTYPES[dtype], local_files_only=True)
    rotate_as(model, rope_spec_from_config(model.config.get_text_config(decoder=True).to_dict()))
    return model.to(device).eval().requires_grad_(False)


def rotate_as(model: Any, rope: RopeSpec) -> None:
    """Give a model on the CPU the rope of SGLang, where transformers reads its configuration otherwise (codec.rope).

    That is `dynamic`, which has one table for all lengths there, and some spellings of yarn and longrope. Frequencies
    that agree stay as they are, to the bit. Raises UnsupportedError where the model then rotates by another rope.
    """
    inv_freq, position = torch.tensor(rope.inv_freq, dtype=torch.float64), 100
    angles = position * inv_freq
    # Both sides compute in fp32, with a dozen roundings.
    tolerance = (14 * angles + 4) * 2**-24 * rope.attention_factor
    found = [part for part in model.modules() if hasattr(part, "inv_freq") and hasattr(part, "attention_scaling")]
    for module in found:
        ours = inv_freq.to(module.inv_freq)
        if ours.shape != module.inv_freq.shape or not torch.allclose(module.inv_freq, ours, rtol=12 * 2**-24, atol=0):
            module.inv_freq = ours
        module.attention_scaling = rope.attention_factor
        # Or its forward pass would compute the frequencies again for the length of a sequence.
        module.rope_type = "default"
        cos = module(torch.zeros(1), torch.tensor([[position]]))[0].flatten().double()
        if cos.numel() != rope.rotary_dim:
            raise UnsupportedError(f"{type(module).__name__} rotates {cos.numel()} channels, not {rope.rotary_dim}")
        # Every angle twice, side by side or one half after the other.
        off = cos.sort().values - (angles.cos() * rope.attention_factor).repeat(2).sort().values
        if (off.abs() > tolerance.max()).any():
            raise UnsupportedError(
                f"{type(module).__name__} of {type(model).__name__} has another rope than {rope.kind!r}"
            )
    if not found:
        raise UnsupportedError(f"{type(model).__name__} keeps its rotary embedding where it cannot be checked")


@contextlib.contextmanager
def no_loading_bars() -> Iterator[None]:
    """Keep transformers from drawing bars over our own progress and into logs."""
    were_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            transformers_logging.enable_progress_bar()


def load_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies beside the model. Raises ConfigError when there is none."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--model {model_dir}: its tokenizer cannot be loaded: {error}") from error
    return tokenizer


def model_geometry(config: Any) -> ModelGeometry:
    """KV geometry of an unsharded model; the KV dtype is that of the weights, as SGLang's `auto` takes it."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = str(config.dtype or torch.float32).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedError(f"a KV cache of dtype {dtype}: expected one of {', '.join(DTYPES)}")
    return ModelGeometry(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        v_head_dim=getattr(config, "v_head_dim", None) or head_dim,
        dtype=dtype,
    )


def prefill(model: Any, token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one sequence and return its cache.

    Returns keys: dtype[num_layers, num_tokens, num_kv_heads, head_dim], after RoPE, and values with v_head_dim, on the
    model's device. Raises UnsupportedError when the model keeps another cache than its configuration says.
    """
    cache = DynamicCache(config=model.config)
    input_ids = torch.tensor([token_ids], device=model.device)
    with torch.inference_mode():
        # The base model: no logits, which would cost more than the rest for a large vocabulary.
        model.base_model(input_ids=input_ids, past_key_values=cache, use_cache=True)
    geometry = model_geometry(model.config.get_text_config(decoder=True))
    k_shape = (1, geometry.num_kv_heads, len(token_ids), geometry.head_dim)
    v_shape = (*k_shape[:-1], geometry.v_head_dim)
    layers = cache.layers
    if len(layers) != geometry.num_layers or any(
        type(layer) is not DynamicLayer or layer.keys.shape != k_shape or layer.values.shape != v_shape
        for layer in layers
    ):
        raise UnsupportedError(f"{type(model).__name__} does not keep {k_shape} keys and {v_shape} values per layer")
    keys = torch.stack([layer.keys[0].transpose(0, 1) for layer in layers])
    values = torch.stack([layer.values[0].transpose(0, 1) for layer in layers])
    return keys, values


def continue_from(model: Any, keys: torch.Tensor, values: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of `token_ids` as the continuation of a given cache: [num_tokens, vocabulary], in the model's dtype.

    keys, values: as `prefill` returns them, in any float dtype.
    """
    with torch.inference_mode():
        input_ids = torch.tensor([token_ids], device=model.device)
        cache = filled_cache(model, keys, values)
        logits: torch.Tensor = model(input_ids=input_ids, past_key_values=cache, use_cache=True).logits[0]
    return logits


def filled_cache(model: Any, keys: torch.Tensor, values: torch.Tensor) -> DynamicCache:
    """A cache to continue from, in the model's dtype. keys, values: as `prefill` returns them, in any float dtype."""
    cache = DynamicCache(config=model.config)
    for layer, heads in enumerate(zip(keys, values, strict=True)):
        cache.update(*(side.transpose(0, 1)[None].to(model.device, model.dtype) for side in heads), layer)
    return cache


def _check_cache(config: Any) -> None:
    name = config.model_type
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedError(f"{name}: multi-head latent attention (MLA) caches latents, not keys and values")
    layers = DynamicCache(config=config).layers
    kinds = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if any("LinearAttention" in kind for kind in kinds):
        raise UnsupportedError(f"{name}: recurrent or linear-attention layers ({', '.join(kinds)})")
    if any("Sliding" in kind for kind in kinds):
        raise UnsupportedError(f"{name}: sliding-window or chunked attention ({', '.join(kinds)})")
    if kinds:
        raise UnsupportedError(f"{name}: its cache has more than keys and values ({', '.join(kinds)})")
    if len(layers) != config.num_hidden_layers:
        raise UnsupportedError(f"{name}: {config.num_hidden_layers} layers share {len(layers)} caches")
