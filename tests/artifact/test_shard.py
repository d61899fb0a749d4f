"""The parts of a model on tensor and pipeline parallel ranks, against SGLang's own division of layers and weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from artifact.toy_artifact import GEOMETRY, artifact

from sglang_kvtc.artifact.io import load_artifact, save_artifact
from sglang_kvtc.artifact.shard import SHARD_KEY, Shard, shard_of, shards_of
from sglang_kvtc.errors import ArtifactError, ConfigError
from sglang_kvtc.types import ModelGeometry

HEAD_DIM = 4


def geometry(num_layers: int = 32, num_kv_heads: int = 8) -> ModelGeometry:
    return ModelGeometry(num_layers, num_kv_heads, HEAD_DIM, HEAD_DIM, "bfloat16")


@pytest.mark.parametrize("num_layers", [1, 2, 7, 30, 32, 61])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 4, 7, 8])
def test_stages_have_the_layers_that_sglang_gives_them(num_layers: int, pp_size: int) -> None:
    from sglang.srt.distributed.utils import get_pp_indices  # noqa: TID251 - what we have to agree with

    if pp_size > num_layers:
        with pytest.raises(ConfigError, match=f"--pp {pp_size}"):
            shards_of(geometry(num_layers), 1, pp_size)
        return
    found = [shard.layers for shard in shards_of(geometry(num_layers), 1, pp_size)]
    assert found == [get_pp_indices(num_layers, rank, pp_size) for rank in range(pp_size)]


@pytest.mark.parametrize(("num_kv_heads", "tp_size"), [(8, 1), (8, 2), (8, 8), (4, 8), (1, 4), (2, 8), (6, 3)])
def test_a_rank_06_ranks_have_the_kv_heads_whose_weights_sglang_loads(
    num_kv_heads: int, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.configs.model_config import ModelConfig  # noqa: TID251 - what we have to agree with
    from sglang.srt.layers import linear  # noqa: TID251

    num_heads, hidden_size = 8 * num_kv_heads, 3
    # Every row of the whole K projection says which KV head it makes.
    heads = torch.arange(num_kv_heads).repeat_interleave(HEAD_DIM)
    weight = heads[:, None].repeat(1, hidden_size).float()
    for rank, shard in enumerate(shards_of(geometry(num_kv_heads=num_kv_heads), tp_size, 1)):
        group = SimpleNamespace(rank_in_group=rank, world_size=tp_size)
        monkeypatch.setattr(linear, "_resolve_linear_group", lambda _, group=group: group)
        layer = linear.QKVParallelLinear(
            hidden_size, HEAD_DIM, num_heads, num_kv_heads, bias=False, params_dtype=torch.float32
        )
        layer.weight_loader(layer.weight, weight, "k")
        first = num_heads // tp_size * HEAD_DIM
        loaded = layer.weight[first : first + layer.num_kv_heads * HEAD_DIM, 0]
        assert loaded.unique().tolist() == list(range(*shard.kv_heads))
        config = SimpleNamespace(get_total_num_kv_heads=lambda: num_kv_heads, is_draft_model=False)
        assert shard.geometry(geometry(num_kv_heads=num_kv_heads)).num_kv_heads == ModelConfig.get_num_kv_heads(
            config, tp_size
        )


def test_the_ranks_of_every_stage_cover_the_model() -> None:
    shards = shards_of(geometry(), 2, 3)
    assert [(shard.tp_rank, shard.pp_rank) for shard in shards] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    counts = torch.zeros(32, 8)
    for shard in shards:
        counts[shard.part] += 1
    assert bool((counts == 1).all())
    assert len({shard.name for shard in shards}) == 6


@pytest.mark.parametrize(
    ("tp", "pp", "flag"), [(3, 1, "--tp 3"), (0, 1, "--tp 0"), (12, 1, "--tp 12"), (1, 0, "--pp 0")]
)
def test_divisions_that_sglang_refuses_are_refused_by_flag(tp: int, pp: int, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        shards_of(geometry(), tp, pp)


def of_rank(shard: Shard) -> dict[str, str]:
    return {**artifact().provenance, SHARD_KEY: shard.record()}


def test_a_shard_record_comes_back_with_its_artifact(tmp_path: Path) -> None:
    shard = Shard(1, 4, 2, 3, layers=(4, 6), kv_heads=(2, 4))
    save_artifact(dataclasses.replace(artifact(), provenance=of_rank(shard)), tmp_path)
    assert shard_of(load_artifact(tmp_path).provenance) == shard
    assert shard_of(artifact().provenance) is None


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (Shard(4, 4, 0, 1, (0, 2), (0, 2)), "tp rank 4 of 4"),
        (Shard(0, 1, -1, 2, (0, 2), (0, 2)), "pp rank -1 of 2"),
        (Shard(0, 2, 0, 1, (0, 3), (0, 2)), r"layers is \[0, 3\): the geometry has 2"),
        (Shard(0, 2, 0, 1, (0, 2), (1, 2)), r"kv_heads is \[1, 2\): the geometry has 2"),
        (Shard(0, 2, 0, 1, (-2, 0), (0, 2)), r"layers is \[-2, 0\)"),
    ],
)
def test_a_rank_06_a_shard_that_does_not_fit_the_geometry_is_refused(
    shard: Shard, message: str, tmp_path: Path
) -> None:
    assert (GEOMETRY.num_layers, GEOMETRY.num_kv_heads) == (2, 2)
    with pytest.raises(ArtifactError, match=message):
        save_artifact(dataclasses.replace(artifact(), provenance=of_rank(shard)), tmp_path)


@pytest.mark.parametrize("record", ["", "[]", json.dumps({"tp_rank": 0}), '{"tp_rank": "0"}'])
def test_a_shard_record_that_is_none_is_refused(record: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"provenance\.shard"):
        save_artifact(dataclasses.replace(artifact(), provenance={SHARD_KEY: record}), tmp_path)
