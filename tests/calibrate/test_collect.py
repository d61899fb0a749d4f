"""Rows collected from a model against its own projections, and which statistics they go to."""

from pathlib import Path
from typing import Any

import torch

from sglang_kvtc.artifact.shard import shards_of
from sglang_kvtc.calibrate.causal_lm import load_config, load_model, model_geometry
from sglang_kvtc.calibrate.collect import ALLOCATION_ONE_IN, SINK_TOKENS, Collection, collect, feature_rows
from sglang_kvtc.calibrate.corpus import TokenSequence
from sglang_kvtc.calibrate.progress import SilentProgress
from sglang_kvtc.calibrate.statistics import Covariance, Reservoir
from sglang_kvtc.codec.allocate import SAMPLE_TOKENS
from sglang_kvtc.codec.rope import rope_spec_from_config
from sglang_kvtc.types import Side


def test_rows_are_k_before_rope_and_v_without_sinks(tiny_llama: Path) -> None:
    config = load_config(tiny_llama)
    model = load_model(tiny_llama, "float32")
    token_ids = list(range(40))
    captured: dict[tuple[int, str], torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        for name in ("k_proj", "v_proj"):

            def keep(
                module: object, inputs: object, output: torch.Tensor, key: tuple[int, str] = (index, name)
            ) -> None:
                captured[key] = output[0]

            getattr(layer.self_attn, name).register_forward_hook(keep)
    keys, values = feature_rows(model, token_ids, rope_spec_from_config(config.to_dict()))
    for rows, name in ((keys, "k_proj"), (values, "v_proj")):
        projected = torch.cat([captured[index, name] for index in range(config.num_hidden_layers)], dim=1)[SINK_TOKENS:]
        # Rotating and unrotating: two fp32 products and a sum each, so a few roundings of the largest value.
        resolution = 8 * torch.finfo(torch.float32).eps * float(projected.abs().max())
        torch.testing.assert_close(rows, projected, atol=resolution, rtol=0)


def collected(model_dir: Path, sequences: list[TokenSequence], tp: int = 1, pp: int = 1, **changes: Any) -> Collection:
    config = load_config(model_dir)
    model = load_model(model_dir, "float32")
    shards = shards_of(model_geometry(config), tp, pp)
    settings: dict[str, Any] = {"pca_rows": None, "seed": 0, "device": model.device} | changes
    collection = Collection.empty(model_geometry(config), shards, **settings)
    collect(model, sequences, rope_spec_from_config(config.to_dict()), collection, seed=0, progress=SilentProgress())
    return collection


def test_sequences_for_the_allocation_are_kept_out_of_the_covariance(tiny_llama: Path) -> None:
    sequences = [
        TokenSequence(str(number), tuple(range(number, number + 24))) for number in range(2 * ALLOCATION_ONE_IN)
    ]
    model, rope = load_model(tiny_llama, "float32"), rope_spec_from_config(load_config(tiny_llama).to_dict())
    collection = collected(tiny_llama, sequences)
    assert collection.num_sequences == len(sequences)
    per_sequence = 24 - SINK_TOKENS
    for side in Side:
        (statistics,) = (of_part[side] for of_part in collection.statistics)
        assert statistics.moments.num_rows == per_sequence * (len(sequences) - 2)
        aside = statistics.allocation.rows
        assert len(aside) == min(2 * per_sequence, SAMPLE_TOKENS)
        own = [feature_rows(model, sequence.token_ids, rope)[side] for sequence in sequences]
        assert sum(torch.equal(aside[:per_sequence], rows) for rows in own) == 1


def test_sampled_rows_of_a_randomized_pca_are_bounded(tiny_llama: Path) -> None:
    collection = collected(tiny_llama, [TokenSequence("a", tuple(range(64)))] * 6, pca_rows=100)
    moments = collection.statistics[0][Side.K].moments
    assert isinstance(moments, Reservoir)
    assert moments.rows.shape == (100, 128)


def test_parts_get_their_blocks_of_the_covariance_from_one_pass(tiny_llama: Path) -> None:
    sequences = [TokenSequence(str(number), tuple(range(number, number + 40))) for number in range(6)]
    whole = collected(tiny_llama, sequences).statistics[0]
    parts = collected(tiny_llama, sequences, tp=4, pp=2)
    # Two KV heads on four ranks: replicas share their part.
    assert [(shard.layers, shard.kv_heads) for shard in parts.shards] == [
        ((0, 1), (0, 1)),
        ((0, 1), (1, 2)),
        ((1, 2), (0, 1)),
        ((1, 2), (1, 2)),
    ]
    features = torch.arange(128).view(2, 2, 32)
    for shard, statistics in zip(parts.shards, parts.statistics, strict=True):
        own = features[shard.part].flatten()
        for side in Side:
            found, expected = statistics[side].moments, whole[side].moments
            assert isinstance(found, Covariance)
            assert isinstance(expected, Covariance)
            mean, covariance = expected.moments()
            # The same sums over the same rows; only the order of a product's terms may differ.
            resolution = torch.finfo(torch.float32).eps * float(covariance.diagonal().max()) * len(sequences) ** 0.5
            torch.testing.assert_close(found.moments()[0], mean[own], atol=resolution, rtol=0)
            torch.testing.assert_close(found.moments()[1], covariance[own][:, own], atol=resolution, rtol=0)
            assert torch.equal(statistics[side].allocation.rows, whole[side].allocation.rows[:, own])
