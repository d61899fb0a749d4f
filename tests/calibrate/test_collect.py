"""Streaming statistics, and rows collected from a model against its own projections."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_kvtc.calibrate.causal_lm import load_config, load_model, model_geometry
from sglang_kvtc.calibrate.collect import ALLOCATION_ONE_IN, SINK_TOKENS, Covariance, Reservoir, collect, feature_rows
from sglang_kvtc.calibrate.corpus import TokenSequence
from sglang_kvtc.calibrate.progress import SilentProgress
from sglang_kvtc.codec.allocate import SAMPLE_TOKENS
from sglang_kvtc.codec.rope import rope_spec_from_config
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import Side


@pytest.mark.parametrize("sizes", [[1], [5, 2043, 7], [2048], [5000], [300] * 20], ids=str)
def test_covariance_in_blocks_equals_the_covariance_of_all_rows(sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    # An offset a thousand times the spread, which a plain sum of squares in fp32 would drown in.
    rows = torch.randn(sum(sizes), 24, generator=generator) + 1000
    moments = Covariance(24, torch.device("cpu"))
    for part in rows.split(sizes):
        moments.add(part)
    mean, covariance = moments.finish()
    expected_mean = rows.double().mean(dim=0)
    centred = rows.double() - expected_mean
    expected = centred.T @ centred / len(rows)
    # Every product of two fp32 deviations is rounded, and the sums of a block.
    resolution = torch.finfo(torch.float32).eps * 2048**0.5 * max(float(expected.diagonal().max()), 1.0)
    torch.testing.assert_close(mean, expected_mean, atol=1000 * torch.finfo(torch.float32).eps, rtol=0)
    torch.testing.assert_close(covariance, expected, atol=resolution, rtol=0)


def test_covariance_of_many_features_is_whole_on_both_sides_of_the_diagonal() -> None:
    rows = torch.randn(300, 1700, generator=torch.Generator().manual_seed(0))
    moments = Covariance(1700, torch.device("cpu"))
    moments.add(rows)
    _, covariance = moments.finish()
    expected = torch.cov(rows.T.double(), correction=0)
    resolution = torch.finfo(torch.float32).eps * 300**0.5 * float(expected.diagonal().max())
    torch.testing.assert_close(covariance, expected, atol=resolution, rtol=0)


def test_covariance_of_nothing_asks_for_more_tokens() -> None:
    with pytest.raises(ConfigError, match="--tokens"):
        Covariance(4, torch.device("cpu")).finish()


def test_covariance_memory_does_not_grow_with_the_rows() -> None:
    moments = Covariance(16, torch.device("cpu"))

    def held_bytes() -> int:
        return sum(value.nbytes for value in vars(moments).values() if isinstance(value, torch.Tensor))

    moments.add(torch.zeros(4096, 16))
    before = held_bytes()
    moments.add(torch.zeros(40960, 16))
    assert held_bytes() == before


def test_reservoir_keeps_all_rows_until_it_is_full() -> None:
    reservoir = Reservoir(10, 1, torch.float32, seed=0)
    reservoir.add(torch.arange(4.0)[:, None])
    reservoir.add(torch.arange(4.0, 8.0)[:, None])
    assert reservoir.rows.flatten().tolist() == list(range(8))


def test_reservoir_samples_all_rows_alike() -> None:
    counts = np.zeros(200)
    trials = 2000
    for seed in range(trials):
        reservoir = Reservoir(20, 1, torch.float32, seed)
        for part in torch.arange(200.0)[:, None].split(33):
            reservoir.add(part)
        kept = reservoir.rows.flatten().long().numpy()
        assert len(set(kept.tolist())) == 20
        counts[kept] += 1
    # Each count is binomial with mean trials / 10; six standard deviations hold for 200 of them at once.
    deviation = (trials * 0.1 * 0.9) ** 0.5
    assert np.abs(counts - trials * 0.1).max() < 6 * deviation


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


def test_sequences_for_the_allocation_are_kept_out_of_the_covariance(tiny_llama: Path) -> None:
    config = load_config(tiny_llama)
    geometry, rope = model_geometry(config), rope_spec_from_config(config.to_dict())
    sequences = [
        TokenSequence(str(number), tuple(range(number, number + 24))) for number in range(2 * ALLOCATION_ONE_IN)
    ]
    model = load_model(tiny_llama, "float32")
    statistics = collect(model, sequences, geometry, rope, pca_rows=None, seed=0, progress=SilentProgress())
    per_sequence = 24 - SINK_TOKENS
    for side in Side:
        moments = statistics[side].moments
        moments.finish()
        assert moments.num_rows == per_sequence * (len(sequences) - 2)
        aside = statistics[side].allocation.rows
        assert len(aside) == min(2 * per_sequence, SAMPLE_TOKENS)
        own = [feature_rows(model, sequence.token_ids, rope)[side] for sequence in sequences]
        assert sum(torch.equal(aside[:per_sequence], rows) for rows in own) == 1


def test_sampled_rows_of_a_randomized_pca_are_bounded(tiny_llama: Path) -> None:
    config = load_config(tiny_llama)
    sequences = [TokenSequence("a", tuple(range(64)))] * 6
    model = load_model(tiny_llama, "bfloat16")
    statistics = collect(
        model,
        sequences,
        model_geometry(config),
        rope_spec_from_config(config.to_dict()),
        pca_rows=100,
        seed=0,
        progress=SilentProgress(),
    )
    assert statistics[Side.K].moments.rows.shape == (100, model_geometry(config).features(Side.K))
