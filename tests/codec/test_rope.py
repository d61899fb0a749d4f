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
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
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
    "yarn with other bounds": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 4096},
}
"""Of which SGLang and transformers make the same. `config_of` adds the factors of longrope."""
ONLY_SGLANG: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "dynamic with alpha": {"rope_type": "dynamic", "alpha": 1000.0},
    "yarn with attention factor": YARN | {"attn_factor": 0.8},
    "yarn that extrapolates less": YARN | {"extrapolation_factor": 0.5},
    "longrope with its own magnitude": SCALINGS["longrope"] | {"short_mscale": 1.243},
}
START_POSITIONS = (0, 1, 4095, 131_071)
PAIRED = {
    f"{name}, {pairing}": (scaling, pairing == "interleaved")
    for name, scaling in (SCALINGS | ONLY_SGLANG).items()
    for pairing in ("neox", "interleaved")
    if (scaling["rope_type"], pairing) != ("longrope", "interleaved")
}
scalings = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())


def config_of(scaling: dict[str, Any], share: float = 1.0, **changes: Any) -> dict[str, Any]:
    """A configuration of 64 channels per head with this scaling, of which a share is rotated."""
    if scaling["rope_type"] == "longrope":
        pairs = int(32 * share)
        scaling = scaling | {
            "short_factor": [1 + pair / 10 for pair in range(pairs)],
            "long_factor": [2 + pair / 5 for pair in range(pairs)],
        }
    return BASE | {"rope_scaling": scaling, "partial_rotary_factor": share} | changes


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
    config = config_of(scaling, partial_rotary_factor)
    spec = rope_spec_from_config(config)
    assert spec.rotary_dim == 64 * partial_rotary_factor
    assert_is_rope_of_transformers(spec, config)


@scalings
def test_both_spellings_of_a_configuration_mean_the_same(scaling: dict[str, Any]) -> None:
    old = config_of(scaling)
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": BASE["rope_theta"]}
    if scaling == {"rope_type": "default"}:
        old["rope_scaling"] = None
    assert rope_spec_from_config(old) == rope_spec_from_config(new)


@scalings
def test_the_configuration_transformers_writes_is_understood(scaling: dict[str, Any]) -> None:
    config = config_of(scaling)
    written = LlamaConfig(**copy.deepcopy(config)).to_dict()
    assert rope_spec_from_config(written) == rope_spec_from_config(config)


def test_old_type_key_is_read() -> None:
    spec = rope_spec_from_config(BASE | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert spec.kind == "linear"


def test_su_is_longrope() -> None:
    config = config_of(SCALINGS["longrope"])
    spec = rope_spec_from_config(config | {"rope_scaling": config["rope_scaling"] | {"rope_type": "su"}})
    assert spec == rope_spec_from_config(config)
    assert spec.kind == "longrope" and spec.position_limit == 4096


def test_dynamic_is_that_of_transformers_for_the_longest_sequence() -> None:
    config = config_of(ONLY_SGLANG["dynamic"])
    longest = 4 * BASE["max_position_embeddings"]
    inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](LlamaConfig(**copy.deepcopy(config)), seq_len=longest)
    found = torch.tensor(rope_spec_from_config(config).inv_freq, dtype=torch.float64)
    # As above, and a base that is itself a rounded product.
    torch.testing.assert_close(found, inv_freq.double(), rtol=12 * 2**-24, atol=0)


@pytest.mark.parametrize("spelling", [{"rope_pct": 0.25}, {"rotary_pct": 0.25}, {"rotary_dim": 16}])
def test_partial_rotation_has_other_spellings(spelling: dict[str, Any]) -> None:
    assert rope_spec_from_config(BASE | spelling) == rope_spec_from_config(BASE | {"partial_rotary_factor": 0.25})


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
        ({"model_type": "glm4", "rope_is_neox_style": True}, True),
        ({"rope_is_neox_style": False}, True),
        ({"model_type": "ernie4_5"}, True),
        ({"model_type": "ernie4_5", "rope_is_neox_style": True}, False),
        ({"rope_interleave": True}, False),
    ],
)
def test_pairing_is_read(extra: dict[str, Any], interleaved: bool) -> None:
    assert rope_spec_from_config(BASE | extra).interleaved is interleaved


@pytest.mark.parametrize("kind", ["proportional", "mrope", "axial", "deepseek_yarn"])
def test_unsupported_rope_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=kind):
        rope_spec_from_config(BASE | {"rope_scaling": {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope"),
        ({"rope_type": "yarn", "factor": 2.0, "mrope_section": [16, 24, 24]}, "mrope"),
        ({"rope_type": "default", "use_fope": True, "num_kv_heads": 8}, "fope"),
        ({"rope_type": "default", "fope_init_factor": 0.1}, "fope"),
        ({"rope_type": "default", "num_inv_freq": 16}, "fope"),
    ],
)
def test_other_embeddings_under_a_known_type_are_refused(scaling: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        rope_spec_from_config(BASE | {"rope_scaling": scaling})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dual_chunk_attention_config": {"chunk_size": 4096}}, "dual chunk"),
        ({"rope_local_base_freq": 10_000.0}, "rope_local_base_freq"),
        ({"swa_rope_theta": 10_000.0}, "swa_rope_theta"),
        ({"layer_rope_theta": [1e4, 0.0]}, "layer_rope_theta"),
        ({"partial_rotary_factors": [1.0, 0.5]}, "partial_rotary_factors"),
        ({"rope_theta": [1e4, 1e6]}, "several rope_theta"),
        ({"alibi": True}, "ALiBi"),
        ({"position_embedding_type": "nope"}, "'nope'"),
        ({"no_rope_layers": [1, 1, 1, 0]}, "NoPE"),
        ({"no_rope_layer_interval": 4}, "NoPE"),
        ({"model_type": "llama4_text", "no_rope_layers": [1]}, "llama4_text"),
        ({"model_type": "cohere2", "sliding_window": 4096}, "cohere2"),
        ({"model_type": "exaone4", "sliding_window": 4096}, "exaone4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_layers_with_another_rope_or_none_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        rope_spec_from_config(BASE | changes)


def test_fields_that_change_nothing_are_no_reason_to_refuse() -> None:
    idle = {"alibi": False, "no_rope_layers": [1, 1], "no_rope_layer_interval": 4, "dual_chunk_attention_config": None}
    assert rope_spec_from_config(BASE | idle | {"position_embedding_type": "rope"}) == rope_spec_from_config(BASE)
    assert rope_spec_from_config(BASE | {"model_type": "exaone4", "sliding_window": None}).kind == "default"


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
        *((BASE | {"rope_scaling": {"rope_type": kind}}, "factor") for kind in ("linear", "dynamic", "llama3", "yarn")),
        (BASE | {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        (BASE | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rotary_dim": 2}, "single pair"),
        (BASE | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 31}}, "expected 32 numbers"),
        (BASE | {"rope_scaling": {"rope_type": "longrope", "short_factor": [0.0] * 32}}, "expected 32 numbers"),
        (BASE | {"rotary_dim": 16, "partial_rotary_factor": 0.5}, "[16, 32]"),
        (BASE | {"partial_rotary_factor": 0.55}, "rotates 35 of 64"),
        (BASE | {"partial_rotary_factor": 1.5}, "rotates 96 of 64"),
        ({"rope_theta": 1e4}, "hidden_size"),
    ],
)
def test_missing_or_impossible_numbers_are_named(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        rope_spec_from_config(config)


def test_interleaved_longrope_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="longrope"):
        rope_spec_from_config(config_of(SCALINGS["longrope"], rope_is_neox_style=False))


@pytest.mark.parametrize(("scaling", "interleaved"), PAIRED.values(), ids=PAIRED.keys())
@pytest.mark.parametrize("partial_rotary_factor", [1.0, 0.5, 0.25])
def test_a_pos_04_undoing_and_redoing_gives_the_keys_back(
    scaling: dict[str, Any], interleaved: bool, partial_rotary_factor: float
) -> None:
    if scaling["rope_type"] == "longrope":
        scaling = scaling | {"original_max_position_embeddings": 1 << 18}
    spec = rope_spec_from_config(config_of(scaling, partial_rotary_factor, rope_is_neox_style=not interleaved))
    assert spec.interleaved is interleaved
    keys = torch.rand(2, 5, 3, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for start in START_POSITIONS:
        positions = torch.arange(start, start + 5)
        undone = rotate(keys, positions, spec, inverse=True)
        assert (rotate(undone, positions, spec) - keys).abs().max() <= 1e-5


@pytest.mark.parametrize("inverse", [False, True])
def test_a_pos_02_beyond_the_trained_length_longrope_is_refused(inverse: bool) -> None:
    spec = rope_spec_from_config(config_of(SCALINGS["longrope"]))
    keys = torch.zeros(1, 4095, 1, 64)
    for length in (4095, 4096):
        assert (
            Rotation(torch.arange(length), spec, inverse=inverse)(keys[:, :1], slice(length - 1, length)).shape[1] == 1
        )
    with pytest.raises(UnsupportedError, match=r"'longrope' is known up to position 4095 only, not at 4096"):
        Rotation(torch.arange(4097), spec, inverse=inverse)
    assert rotate(keys[:, :0], torch.arange(0), spec, inverse).shape == (1, 0, 1, 64)


@scalings
def test_a_pos_04_keys_rotated_by_the_model_are_undone(scaling: dict[str, Any]) -> None:
    if scaling["rope_type"] == "longrope":
        scaling = scaling | {"original_max_position_embeddings": 1 << 18}
    config = config_of(scaling)
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
