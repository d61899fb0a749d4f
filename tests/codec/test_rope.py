from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from codec import plain_codec
from codec.toy_model import GEOMETRY, rope_of
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, PhiConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.codec.rope import Rotation, rope_spec_from_config, rotate
from sglang_kvtc.errors import ConfigError, UnsupportedError

BASE: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 1,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn with attention factor": YARN | {"attention_factor": 0.8},
    "yarn with other bounds": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
}
START_POSITIONS = (0, 1, 4095, 131_071)
scalings = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())


def transformers_rope(config: dict[str, Any]) -> PhiRotaryEmbedding:
    """Of Phi, since Llama ignores a partial rotary factor. Configurations write into what they are given."""
    return PhiRotaryEmbedding(PhiConfig(**copy.deepcopy({"partial_rotary_factor": 1.0} | config)))


def assert_is_rope_of_transformers(spec: RopeSpec, config: dict[str, Any]) -> None:
    rope = transformers_rope(config)
    # transformers computes in fp32: a power, a division and a few products, each within half a unit in the last place.
    torch.testing.assert_close(
        torch.tensor(spec.inv_freq, dtype=torch.float64), rope.inv_freq.double(), rtol=8 * 2**-24, atol=0
    )
    assert spec.attention_factor == pytest.approx(rope.attention_scaling, rel=1e-12)


@scalings
@pytest.mark.parametrize("partial_rotary_factor", [1.0, 0.5, 0.25])
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any], partial_rotary_factor: float) -> None:
    config = BASE | {"rope_scaling": scaling, "partial_rotary_factor": partial_rotary_factor}
    spec = rope_spec_from_config(config)
    assert spec.rotary_dim == 64 * partial_rotary_factor
    assert_is_rope_of_transformers(spec, config)


@scalings
def test_both_spellings_of_a_configuration_mean_the_same(scaling: dict[str, Any]) -> None:
    old = BASE | {"rope_scaling": None if scaling == {"rope_type": "default"} else scaling}
    new = {key: value for key, value in BASE.items() if key != "rope_theta"}
    new["rope_parameters"] = {**scaling, "rope_theta": BASE["rope_theta"]}
    assert rope_spec_from_config(old) == rope_spec_from_config(new)


@scalings
def test_the_configuration_transformers_writes_is_understood(scaling: dict[str, Any]) -> None:
    written = LlamaConfig(**BASE, rope_scaling=dict(scaling)).to_dict()
    assert rope_spec_from_config(written) == rope_spec_from_config(BASE | {"rope_scaling": scaling})


def test_old_type_key_is_read() -> None:
    spec = rope_spec_from_config(BASE | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert spec.kind == "linear"


def test_training_length_of_the_model_wins_over_that_of_the_rope_parameters() -> None:
    config = BASE | {"rope_scaling": LLAMA3, "original_max_position_embeddings": 2048}
    assert_is_rope_of_transformers(rope_spec_from_config(config), config)


def test_head_dim_need_not_be_the_share_of_a_head() -> None:
    assert rope_spec_from_config(BASE | {"head_dim": 96}).rotary_dim == 96


@pytest.mark.parametrize(
    ("extra", "interleaved"),
    [
        ({}, False),
        ({"model_type": "llama"}, False),
        ({"model_type": "glm4"}, True),
        ({"rope_interleave": True}, True),
        ({"rope_is_neox_style": False}, True),
        ({"rope_is_neox_style": True, "model_type": "ernie4_5"}, False),
    ],
)
def test_pairing_is_read(extra: dict[str, Any], interleaved: bool) -> None:
    assert rope_spec_from_config(BASE | extra).interleaved is interleaved


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "proportional", "mrope", "axial"])
def test_unsupported_rope_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=kind):
        rope_spec_from_config(BASE | {"rope_scaling": {"rope_type": kind, "factor": 2.0}})


def test_multimodal_positions_are_refused_under_any_type() -> None:
    with pytest.raises(UnsupportedError, match="mrope"):
        rope_spec_from_config(BASE | {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}})


def test_rope_that_differs_between_layers_is_refused() -> None:
    parameters = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(UnsupportedError, match="full_attention, sliding_attention"):
        rope_spec_from_config(BASE | {"rope_parameters": parameters})


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({key: value for key, value in BASE.items() if key != "rope_theta"}, "rope_theta"),
        (BASE | {"rope_theta": -1.0}, "rope_theta"),
        (BASE | {"rope_theta": math.nan}, "rope_theta"),
        (BASE | {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        (BASE | {"partial_rotary_factor": 0.55}, "rotates 35 of 64"),
        (BASE | {"partial_rotary_factor": 1.5}, "rotates 96 of 64"),
        ({"rope_theta": 1e4}, "hidden_size"),
    ],
)
def test_missing_or_impossible_numbers_are_named(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        rope_spec_from_config(config)


@scalings
@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "interleaved"])
@pytest.mark.parametrize("partial_rotary_factor", [1.0, 0.5, 0.25])
def test_a_pos_04_undoing_and_redoing_gives_the_keys_back(
    scaling: dict[str, Any], interleaved: bool, partial_rotary_factor: float
) -> None:
    config = BASE | {"rope_scaling": scaling, "partial_rotary_factor": partial_rotary_factor}
    spec = rope_spec_from_config(config | {"rope_interleave": interleaved})
    keys = torch.rand(2, 5, 3, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for start in START_POSITIONS:
        positions = torch.arange(start, start + 5)
        undone = rotate(keys, positions, spec, inverse=True)
        assert (rotate(undone, positions, spec) - keys).abs().max() <= 1e-5


@scalings
def test_a_pos_04_keys_rotated_by_the_model_are_undone(scaling: dict[str, Any]) -> None:
    config = BASE | {"rope_scaling": scaling}
    spec, rope = rope_spec_from_config(config), transformers_rope(config)
    keys = torch.rand(1, 3, 5, 64, generator=torch.Generator().manual_seed(0)) - 0.5
    for start in START_POSITIONS:
        positions = torch.arange(start, start + 5)
        cos, sin = rope(keys, positions[None])
        _, rotated = apply_rotary_pos_emb(keys, keys, cos, sin)
        in_cache = rotated.bfloat16().transpose(1, 2)
        undone = rotate(in_cache.float(), positions, spec, inverse=True)
        assert (undone.transpose(1, 2) - keys).abs().max() <= 1e-2


@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "interleaved"])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotation_is_the_plain_one(interleaved: bool, inverse: bool, rotary_dim: int) -> None:
    spec = rope_of(GEOMETRY, rotary_dim=rotary_dim, interleaved=interleaved, factor=1.25)
    keys = torch.randn(3, 7, 2, 16, generator=torch.Generator().manual_seed(0))
    expected = plain_codec.rotate(keys.double(), 131_071, spec, inverse)
    found = rotate(keys, torch.arange(131_071, 131_078), spec, inverse)
    # Two products, a sum and a rounded sine and cosine.
    assert (found - expected).abs().max() <= 4 * 2**-24 * 1.25 * 2 * keys.abs().max()
    assert torch.equal(found[..., rotary_dim:], keys[..., rotary_dim:])


def test_a_pos_03_positions_have_no_table_to_run_out_of() -> None:
    spec = rope_spec_from_config(BASE | {"max_position_embeddings": 64})
    keys = torch.randn(1, 8, 1, 64, generator=torch.Generator().manual_seed(0))
    for start in (61, 2**31 - 4):
        found = rotate(keys, torch.arange(start, start + 8), spec)
        expected = plain_codec.rotate(keys.double(), start, spec, inverse=False)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=6))
def test_positions_may_come_in_any_order(positions: list[int]) -> None:
    spec = rope_of(GEOMETRY)
    keys = torch.randn(2, len(positions), 2, 16, generator=torch.Generator().manual_seed(0))
    together = rotate(keys, torch.tensor(positions), spec)
    for index, position in enumerate(positions):
        alone = rotate(keys[:, index : index + 1], torch.tensor([position]), spec)
        assert torch.equal(together[:, index : index + 1], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_result_is_fp32_and_the_input_unchanged(dtype: torch.dtype) -> None:
    keys = torch.randn(1, 4, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = keys.clone()
    rotated = rotate(keys, torch.arange(4), rope_of(GEOMETRY))
    assert rotated.dtype is torch.float32
    assert torch.equal(keys, before)


def test_a_rotation_can_be_applied_to_a_part_of_its_tokens() -> None:
    spec = rope_of(GEOMETRY)
    keys = torch.randn(2, 9, 2, 16, generator=torch.Generator().manual_seed(0))
    rotation = Rotation(torch.arange(50, 59), spec, GEOMETRY.num_kv_heads)
    assert torch.equal(rotation(keys[:, 3:5], slice(3, 5)), rotation(keys)[:, 3:5])
