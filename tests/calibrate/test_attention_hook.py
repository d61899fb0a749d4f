from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM

from sglang_kvtc.calibrate import attention_hook
from sglang_kvtc.calibrate.attention_hook import attention_by, attention_inputs, attention_modules, causal_attention
from sglang_kvtc.calibrate.causal_lm import load_model
from sglang_kvtc.errors import UnsupportedError

TOKEN_IDS = torch.arange(40)[None]


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return load_model(tiny_llama, "float32")


def plain_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, kept: torch.Tensor | None
) -> torch.Tensor:
    """One head and one query at a time, in fp64."""
    num_heads, num_new, _ = queries.shape
    num_kv_heads, num_keys, _ = keys.shape
    outputs = torch.empty(num_heads, num_new, values.shape[2], dtype=torch.float64)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        for new in range(num_new):
            own = num_keys - num_new + new
            seen = [
                key for key in range(own + 1) if key >= num_keys - num_new or kept is None or bool(kept[kv_head, key])
            ]
            logits = keys[kv_head, seen].double() @ queries[head, new].double() * scaling
            outputs[head, new] = logits.softmax(dim=0) @ values[kv_head, seen].double()
    return outputs


@given(
    num_kv_heads=st.integers(1, 3),
    group_size=st.integers(1, 3),
    num_new=st.integers(1, 9),
    num_earlier=st.integers(0, 9),
    tile=st.integers(1, 10),
    with_kept=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_new_tokens_see_earlier_kept_ones_and_one_another_causally(
    num_kv_heads: int, group_size: int, num_new: int, num_earlier: int, tile: int, with_kept: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(num_kv_heads * group_size, num_new, 8, generator=generator)
    keys = torch.randn(num_kv_heads, num_earlier + num_new, 8, generator=generator)
    values = torch.randn(num_kv_heads, num_earlier + num_new, 8, generator=generator)
    kept = torch.rand(num_kv_heads, num_earlier, generator=generator) < 0.5 if with_kept else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_hook, "_TILE_QUERIES", tile)
        found = causal_attention(queries, keys, values, 0.3, kept)
    torch.testing.assert_close(found.double(), plain_attention(queries, keys, values, 0.3, kept), rtol=1e-4, atol=1e-5)


def test_a_model_answers_the_same_through_the_hook_and_as_before_afterwards(model: Any) -> None:
    layers: list[int] = []

    def attend(
        layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        layers.append(layer)
        assert queries.shape == (4, 40, 32)
        assert keys.shape == values.shape == (2, 40, 32)
        return causal_attention(queries, keys, values, scaling)

    with torch.inference_mode():
        before = model(TOKEN_IDS).logits
        with attention_by(model, attend):
            through = model(TOKEN_IDS).logits
        after = model(TOKEN_IDS).logits
    assert layers == [0, 1]
    torch.testing.assert_close(through, before, rtol=1e-4, atol=1e-4)
    assert torch.equal(after, before)


def test_what_replaces_attention_decides_the_output(model: Any) -> None:
    with torch.inference_mode():
        before = model(TOKEN_IDS).logits
        with attention_by(model, lambda layer, queries, keys, values, scaling: torch.zeros_like(queries)):
            assert not torch.allclose(model(TOKEN_IDS).logits, before)


def test_an_error_inside_leaves_the_model_as_it_was(model: Any) -> None:
    def fail(*arguments: object) -> torch.Tensor:
        raise RuntimeError("inside")

    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="inside"), attention_by(model, fail):
        model(TOKEN_IDS)
    assert model.config._attn_implementation == before


def test_several_sequences_at_once_are_refused(model: Any) -> None:
    with pytest.raises(UnsupportedError, match="a batch of 2 sequences"), attention_by(model, causal_attention):
        model(TOKEN_IDS.repeat(2, 1))


def test_attention_with_soft_capping_is_refused_by_name() -> None:
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    model = Gemma2ForCausalLM(config).eval()
    refused = pytest.raises(UnsupportedError, match=r"Gemma2Attention: attention with .*softcap")
    with refused, torch.inference_mode(), attention_by(model, causal_attention):
        model(torch.arange(8)[None])


def test_hidden_states_are_those_that_enter_each_layer(model: Any) -> None:
    seen: dict[int, torch.Tensor] = {}
    with torch.inference_mode(), attention_inputs(model, seen.__setitem__):
        outputs = model(TOKEN_IDS, output_hidden_states=True)
    for layer, block in enumerate(model.model.layers):
        torch.testing.assert_close(seen[layer], block.input_layernorm(outputs.hidden_states[layer])[0])
    seen.clear()
    with torch.inference_mode():
        model(TOKEN_IDS)
    assert not seen


def test_there_is_one_attention_module_per_layer(model: Any) -> None:
    assert attention_modules(model) == [block.self_attn for block in model.model.layers]
    with pytest.raises(UnsupportedError, match="0 attention modules for 2 layers"):
        attention_modules(type("Empty", (), {"modules": lambda self: [], "config": model.config})())
