"""Which models are accepted, and that a cache taken out of a model can be put back."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3nTextConfig,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sglang_kvtc.calibrate.causal_lm import (
    continue_from,
    load_config,
    load_model,
    load_tokenizer,
    model_geometry,
    prefill,
)
from sglang_kvtc.codec.rope import rope_spec_from_config, rotate
from sglang_kvtc.errors import ConfigError, UnsupportedError
from sglang_kvtc.types import ModelGeometry


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        (MistralConfig(), "mistral: sliding-window"),
        (Gemma2Config(), "gemma2: sliding-window"),
        (Gemma3nTextConfig(), "gemma3n_text: sliding-window"),
        (MambaConfig(), "mamba: recurrent or linear-attention layers"),
        (JambaConfig(), "jamba: recurrent"),
        (Qwen3NextConfig(), "qwen3_next: recurrent"),
        (DeepseekV3Config(), "deepseek_v3: multi-head latent attention"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "",
)
def test_b_ev_22_models_without_a_plain_cache_are_refused_by_name(
    tmp_path: Path, config: PretrainedConfig, cause: str
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=cause):
        load_config(tmp_path)


@pytest.mark.parametrize("config", [LlamaConfig(), Qwen2Config(), MistralConfig(sliding_window=None)])
def test_models_with_a_plain_cache_are_accepted(tmp_path: Path, config: PretrainedConfig) -> None:
    config.save_pretrained(tmp_path)
    assert load_config(tmp_path).num_hidden_layers == config.num_hidden_layers


def test_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(UnsupportedError, match="unheard-of"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(tmp_path)


def test_geometry_comes_from_the_configuration(tiny_llama: Path) -> None:
    expected = ModelGeometry(num_layers=2, num_kv_heads=2, head_dim=32, v_head_dim=32, dtype="bfloat16")
    assert model_geometry(load_config(tiny_llama)) == expected


def test_head_size_is_derived_when_the_configuration_leaves_it_out() -> None:
    geometry = model_geometry(Qwen2Config(hidden_size=128, num_attention_heads=4, num_key_value_heads=2))
    assert (geometry.head_dim, geometry.num_kv_heads, geometry.dtype) == (32, 2, "float32")


def test_prefill_returns_every_layer_and_token_in_cache_layout(tiny_llama: Path) -> None:
    model = load_model(tiny_llama, "float32")
    keys, values = prefill(model, range(20))
    assert keys.shape == values.shape == (2, 20, 2, 32)


def test_continuing_from_a_prefilled_cache_gives_the_logits_of_the_whole_sequence(tiny_llama: Path) -> None:
    model = load_model(tiny_llama, "float32")
    token_ids = list(range(50))
    keys, values = prefill(model, token_ids[:30])
    continued = continue_from(model, keys, values, token_ids[30:])
    with torch.inference_mode():
        whole = model(torch.tensor([token_ids])).logits[0, 30:]
        # The same sums in another order, so compare with what fp64 says about fp32.
        exact = model.double()(torch.tensor([token_ids])).logits[0, 30:]
    assert (continued - exact).abs().max() <= 2 * (whole - exact).abs().max()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 0.5},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 0.7,
            "attn_factor": 0.8,
        },
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 1024,
            "short_factor": [1 + pair / 10 for pair in range(16)],
            "long_factor": [2.0] * 16,
            "factor": 8.0,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_keys_are_rotated_as_sglang_would(tiny_llama: Path, tmp_path: Path, rope: dict[str, Any]) -> None:
    """Also those of sequences longer than the model was trained on, where transformers changes its tables."""
    shutil.copytree(tiny_llama, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 10_000.0, **rope}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    spec = rope_spec_from_config(load_config(tmp_path / "model").to_dict())
    model = load_model(tmp_path / "model", "float32")
    token_ids = [index % 256 for index in range(700)]
    keys, _ = prefill(model, token_ids)
    decoder = model.model
    states = decoder.layers[0].input_layernorm(decoder.embed_tokens(torch.tensor(token_ids)))
    before = decoder.layers[0].self_attn.k_proj(states).view(700, 2, 32)
    undone = rotate(keys[0], torch.arange(700), spec, inverse=True)
    # Angles up to 700 in fp32, a dozen roundings each, on two channels.
    assert (undone - before).abs().max() <= 2 * 14 * 700 * 2**-24 * before.abs().max()


def test_a_rope_that_agrees_is_left_as_it_is(tiny_llama: Path) -> None:
    """To the bit: transformers' own rounding."""
    found = load_model(tiny_llama, "bfloat16").model.rotary_emb.inv_freq
    assert torch.equal(found, LlamaRotaryEmbedding(LlamaConfig(head_dim=32)).inv_freq)
