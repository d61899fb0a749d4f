"""Our rotation against SGLang's own rotary modules, on the same tensors, and what the server start refuses."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sglang.srt.models
import torch
from artifact.toy_artifact import lossless_artifact
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import factory, get_rope

from sglang_kvtc.artifact.schema import Artifact, RopeSpec
from sglang_kvtc.codec import rope as rope_module
from sglang_kvtc.codec.rope import rope_spec_from_config, rotate
from sglang_kvtc.errors import ArtifactError, KVTCError, UnsupportedError
from sglang_kvtc.integration.compat import check_rope

HEAD_DIM, HEADS = 32, 3
MAX_POSITIONS = 131_200
BASE = 500_000.0
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 32.5, "original_max_position_embeddings": 4096}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": MAX_POSITIONS}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic with alpha": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn with mscale of zero": YARN | {"mscale": 0.707, "mscale_all_dim": 0.0},
    "yarn with half an mscale": YARN | {"mscale": 0.707},
    "yarn with attention factor": YARN | {"attention_factor": 0.8},
    "yarn with attn factor": YARN | {"attn_factor": 0.8, "extrapolation_factor": 0.9},
    "yarn without truncation": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "longrope": LONGROPE,
    "longrope with its own magnitude": LONGROPE | {"short_mscale": 1.243, "long_mscale": 1.3},
}
CASES = {
    f"{name}, {share}, {pairing}": (scaling, share, pairing == "interleaved")
    for name, scaling in KINDS.items()
    for share in (1.0, 0.5, 0.25)
    for pairing in ("neox", "interleaved")
    if (scaling["rope_type"], pairing) != ("longrope", "interleaved")
}


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang keeps every rotary module it made, tables and all, for the life of the process."""
    with monkeypatch.context() as patch:
        patch.setattr(factory, "_ROPE_DICT", {})
        yield


def config_of(scaling: dict[str, Any], share: float = 1.0, interleaved: bool = False, **changes: Any) -> dict[str, Any]:
    if scaling["rope_type"] == "longrope":
        pairs = int(HEAD_DIM * share) // 2
        scaling = scaling | {
            "short_factor": [1 + pair / 10 for pair in range(pairs)],
            "long_factor": [2 + pair / 5 for pair in range(pairs)],
        }
    return {
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": BASE,
        "rope_scaling": scaling,
        "partial_rotary_factor": share,
        "rope_is_neox_style": not interleaved,
        **changes,
    }


def engine_rope(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """What SGLang's models make of a configuration."""
    return get_rope(
        config["head_dim"],
        rotary_dim=config["head_dim"],
        max_position=config["max_position_embeddings"],
        base=config["rope_theta"],
        is_neox_style=config["rope_is_neox_style"],
        rope_scaling=config["rope_scaling"],
        dtype=dtype,
        partial_rotary_factor=config["partial_rotary_factor"],
    )


def rotated_by_engine(rotary: Any, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """keys: dtype[num_tokens, HEADS, HEAD_DIM]; models pass heads and channels as one dimension."""
    flat = keys.flatten(1)
    return rotary(positions, flat.clone(), flat.clone())[1].view(keys.shape)


def random_keys(num_tokens: int) -> torch.Tensor:
    return torch.rand(num_tokens, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0)) * 2 - 1


@dataclass(frozen=True)
class Case:
    spec: RopeSpec
    artifact: Artifact
    rotary: Any


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    config = config_of(*request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "_ROPE_DICT", {})
        yield Case(rope_spec_from_config(config), artifact_of(config), engine_rope(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pos_04_keys_rotated_by_the_engine_are_undone(case: Case, dtype: torch.dtype) -> None:
    keys = random_keys(5).to(dtype)
    for start in (0, 1, 4095, 131_071):
        positions = torch.arange(start, start + 5)
        in_cache = rotated_by_engine(case.rotary, keys, positions).bfloat16()
        assert not torch.equal(in_cache, keys.bfloat16())
        assert (rotate(in_cache, positions, case.spec, inverse=True) - keys.float()).abs().max() <= 1e-2


def test_a_pos_04_frequencies_are_those_of_the_engines_table(case: Case) -> None:
    spec, rotary = case.spec, case.rotary
    table = rotary.short_cos_sin_cache if spec.kind == "longrope" else rotary.cos_sin_cache
    assert table.shape[1] == spec.rotary_dim
    cos, sin = table.double().chunk(2, dim=-1)
    # SGLang computes in fp32: see compat.check_rope.
    roundings = 10 + 8 * getattr(rotary, "scaling_factor", 1)
    for position in (1, 100, 4095, 131_071):
        angles = position * torch.tensor(spec.inv_freq, dtype=torch.float64)
        found = torch.atan2(sin[position], cos[position])
        off = torch.remainder(found - angles + math.pi, 2 * math.pi) - math.pi
        assert (off.abs() <= (roundings * angles + 4) * 2**-24).all()
    magnitude = torch.full_like(sin[1], spec.attention_factor)
    torch.testing.assert_close(torch.hypot(sin[1], cos[1]), magnitude, rtol=4 * 2**-24, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rope_of_the_loaded_model_is_accepted(case: Case, dtype: torch.dtype) -> None:
    rotary = copy.deepcopy(case.rotary).to(dtype)
    check_rope(Model(rotary, rotary), case.artifact, MAX_POSITIONS)


def test_a_pos_02_around_the_trained_length_the_choice_is_the_engines() -> None:
    """At the trained length itself SGLang reads the long table's first row, above it all rows are of the long table."""
    trained = 4096
    config = config_of(LONGROPE | {"original_max_position_embeddings": trained}, max_position_embeddings=4 * trained)
    spec, rotary = rope_spec_from_config(config), engine_rope(config)
    unlimited = dataclasses.replace(spec, position_limit=None)

    def error(length: int) -> torch.Tensor:
        positions, keys = torch.arange(length), random_keys(length)
        undone = rotate(rotated_by_engine(rotary, keys, positions), positions, unlimited, inverse=True)
        return (undone - keys).abs().amax(dim=(1, 2))

    for length in (trained - 1, trained):
        assert error(length).max() <= 2e-3
        rotate(random_keys(length), torch.arange(length), spec, inverse=True)
    assert spec.position_limit == trained
    assert error(trained + 1)[:-1].max() <= 2e-3 and error(trained + 1)[-1] > 0.1
    assert error(trained + 2)[trained // 2 :].min() > 0.1
    for length in (trained + 1, trained + 2):
        with pytest.raises(UnsupportedError, match="'longrope' is known up to position 4095 only"):
            rotate(random_keys(length), torch.arange(length), spec, inverse=True)


def test_a_pos_01_a_longrope_that_may_change_between_batches_is_refused() -> None:
    """How a prefix was rotated depends on what else was in the batch, so no namespace can keep the two apart."""
    trained, prefix = 2048, 1056
    config = config_of(LONGROPE | {"original_max_position_embeddings": trained}, max_position_embeddings=4 * trained)
    artifact, rotary = artifact_of(config), engine_rope(config)
    keys = random_keys(prefix + 1)
    alone = rotated_by_engine(rotary, keys[:prefix], torch.arange(prefix))
    beside_a_long_one = rotated_by_engine(rotary, keys, torch.tensor([*range(prefix), trained + 1]))[:prefix]
    assert (alone - beside_a_long_one).abs().max() > 0.1

    check_rope(Model(rotary), artifact, trained)
    for context_length in (trained + 1, 4 * trained):
        with pytest.raises(UnsupportedError, match=r"keys of one position differ .* use --context-length 2048"):
            check_rope(Model(rotary), artifact, context_length)


def test_a_pos_03_positions_beyond_the_engines_table() -> None:
    """SGLang's table is too short until it grows; ours are computed, and a server whose table is short is refused."""
    config = config_of(KINDS["default"], max_position_embeddings=64)
    spec, rotary = rope_spec_from_config(config), engine_rope(config)
    positions, keys = torch.arange(61, 69), random_keys(8)
    with pytest.raises(IndexError):
        rotated_by_engine(rotary, keys, positions)
    with pytest.raises(UnsupportedError, match="has 64 rows for requests of up to 69 tokens: use --context-length 64"):
        check_rope(Model(rotary), artifact_of(config), 69)
    rotary._ensure_cos_sin_cache_length(68)
    check_rope(Model(rotary), artifact_of(config), 69)
    by_engine = rotated_by_engine(rotary, keys, positions)
    assert (rotate(keys, positions, spec) - by_engine).abs().max() <= 1e-5 * keys.abs().max()


class Attention(torch.nn.Module):
    """The attention of SGLang's models, as far as its names go."""

    def __init__(self, rotary: Any, layer: int) -> None:
        super().__init__()
        self.rotary_emb = rotary
        self.attn = RadixAttention(HEADS, HEAD_DIM, 1.0, num_kv_heads=HEADS, layer_id=layer)


class Model(torch.nn.Module):
    def __init__(self, *rotary: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Attention(module, layer) for layer, module in enumerate(rotary))


def artifact_of(config: dict[str, Any]) -> Artifact:
    toy = lossless_artifact()
    geometry = dataclasses.replace(toy.geometry, head_dim=HEAD_DIM, v_head_dim=HEAD_DIM)
    return dataclasses.replace(toy, geometry=geometry, rope=rope_spec_from_config(config))


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"rope_theta": 500_100.0}, ArtifactError, "otherwise"),
        ({"rope_scaling": KINDS["linear"] | {"factor": 2.0}}, ArtifactError, "otherwise"),
        ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.05}}, ArtifactError, "otherwise"),
        ({"rope_scaling": YARN | {"truncate": False}}, ArtifactError, "otherwise"),
        ({"rope_scaling": LLAMA3}, ArtifactError, "otherwise"),
        ({"partial_rotary_factor": 0.5}, ArtifactError, "(32, 16, False)"),
        ({"rope_is_neox_style": False}, ArtifactError, "(32, 32, True)"),
        ({"head_dim": 64, "partial_rotary_factor": 0.5}, ArtifactError, "(64, 32, False)"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]}}, UnsupportedError, "MRotaryEmbedding"),
        ({"rope_scaling": {"rope_type": "proportional"}}, UnsupportedError, "Gemma4RotaryEmbedding"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_rope_than_the_artifacts_is_refused_by_name(
    changes: dict[str, Any], error: type[KVTCError], named: str, dtype: torch.dtype
) -> None:
    said = config_of(YARN if changes.get("rope_scaling", {}).get("rope_type") == "yarn" else KINDS["default"])
    rotary = engine_rope(said, dtype), engine_rope(said | changes, dtype)
    with pytest.raises(error, match=r"layers\.1 ") as refusal:
        check_rope(Model(*rotary), artifact_of(said), 100_000)
    assert named in str(refusal.value)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "dynamic with alpha"])
def test_rows_that_the_engine_adds_by_another_rule_are_refused(kind: str) -> None:
    """SGLang lengthens a table to the context length without the scaling it was built with."""
    config = config_of(KINDS[kind], max_position_embeddings=4096)
    rotary = engine_rope(config)
    built = len(rotary.cos_sin_cache)
    rotary._ensure_cos_sin_cache_length(built + 256)
    check_rope(Model(rotary), artifact_of(config), built)
    with pytest.raises(ArtifactError, match=r"otherwise .* smaller --context-length"):
        check_rope(Model(rotary), artifact_of(config), built + 1)


def test_a_model_whose_rope_cannot_be_found_is_refused() -> None:
    config = config_of(KINDS["default"], max_position_embeddings=64)
    artifact, rotary = artifact_of(config), engine_rope(config)
    with pytest.raises(UnsupportedError, match=r"layers\.1 of Model has no rotary embedding"):
        check_rope(Model(rotary, None), artifact, 64)
    with pytest.raises(UnsupportedError, match="Model has no attention layers"):
        check_rope(Model(), artifact, 64)


def test_deepseek_yarn_is_no_rope_of_plain_attention() -> None:
    """Which is why it is refused: SGLang's module takes keys of latent attention only."""
    config = config_of(YARN | {"rope_type": "deepseek_yarn"}, share=0.5)
    with pytest.raises(UnsupportedError, match="deepseek_yarn"):
        rope_spec_from_config(config)
    with pytest.raises(RuntimeError):
        rotated_by_engine(engine_rope(config), random_keys(5), torch.arange(5))


INTERLEAVED_SOURCES = {
    "chatglm.py": {"chatglm"},
    "cohere2_moe.py": {"cohere2_moe"},
    "commandr.py": {"cohere", "cohere2"},
    "glm4.py": {"glm4"},
    "gpt_j.py": {"gptj"},
}
"""Model files of SGLang that turn neighbouring channels, and their model types."""
REFUSED_SOURCES = {
    # Latent attention, multimodal positions, or a rope per layer.
    "bailing_moe_v3.py",
    "deepseek_v2.py",
    "deepseek_v4.py",
    "ernie45_moe_vl.py",
    "mistral_large_3.py",
    "modeling.py",
    "muse_spark.py",
    "sarvam_moe.py",
    # Only of GGUF files, which have no fingerprint.
    "exaone4.py",
    "exaone_moe.py",
    "hunyuan.py",
    "llama4.py",
}
UNLESS_TOLD_SOURCES = {"ernie4.py", "ernie45_moe_vl.py"}


def test_the_table_of_interleaved_models_is_sglangs() -> None:
    sources = {path.name: path.read_text() for path in Path(sglang.srt.models.__path__[0]).rglob("*.py")}
    fixed = re.compile(r"is_neox_style\s*=\s*(False|not )")
    assert {name for name, text in sources.items() if fixed.search(text)} == {*INTERLEAVED_SOURCES, *REFUSED_SOURCES}
    unless_told = re.compile(r'"rope_is_neox_style", False')
    assert {name for name, text in sources.items() if unless_told.search(text)} == UNLESS_TOLD_SOURCES
    # SGLang serves `glm` through transformers, whose code turns neighbouring channels too.
    assert {"glm"}.union(*INTERLEAVED_SOURCES.values()) == rope_module._INTERLEAVED_MODEL_TYPES
    assert {"ernie4_5", "ernie4_5_moe"} == rope_module._INTERLEAVED_UNLESS_TOLD
