"""Which models are accepted, and that a cache taken out of a model can be put back."""

from pathlib import Path

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

from sglang_kvtc.calibrate.causal_lm import (
    continue_from,
    load_config,
    load_model,
    load_tokenizer,
    model_geometry,
    prefill,
)
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
