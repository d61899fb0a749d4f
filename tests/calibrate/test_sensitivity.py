"""The Fisher information of the KV cache, against one that sums over the vocabulary, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from calibrate.tiny_llama import save_tiny_llama

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.calibrate.causal_lm import filled_cache, load_model, prefill
from sglang_kvtc.calibrate.collect import SINK_TOKENS
from sglang_kvtc.calibrate.corpus import TokenSequence
from sglang_kvtc.calibrate.progress import SilentProgress
from sglang_kvtc.calibrate.sensitivity import POWER, Sensitivity, measure_sensitivity, sensitivity_sequences
from sglang_kvtc.codec.rope import rope_spec_from_config, rotate
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import Side

QUIET = SilentProgress()
LENGTH, CONTEXT, CODED = 18, 15, slice(SINK_TOKENS, 14)
"""A sixth continues the rest; one of the 15 tokens before it is its window."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(save_tiny_llama(tmp_path_factory.mktemp("tiny")), "float32")


@pytest.fixture(scope="module")
def rope(model: Any) -> RopeSpec:
    return rope_spec_from_config(model.config.to_dict())


def sequence(seed: int, length: int = LENGTH) -> TokenSequence:
    generator = torch.Generator().manual_seed(seed)
    return TokenSequence(str(seed), tuple(torch.randint(256, (length,), generator=generator).tolist()))


def log_probs_of(model: Any, keys: torch.Tensor, values: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    cache = filled_cache(model, keys, values)
    logits = model(input_ids=torch.tensor([token_ids]), past_key_values=cache, use_cache=True).logits[0]
    return torch.log_softmax(logits, dim=-1)


def cache_of(model: Any, token_ids: Sequence[int], rope: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """K before RoPE and V, which can be differentiated by."""
    keys, values = (cache.clone() for cache in prefill(model, token_ids))
    return rotate(keys, torch.arange(len(token_ids)), rope, inverse=True).requires_grad_(), values.requires_grad_()


def plain_information(model: Any, token_ids: Sequence[int], rope: RopeSpec) -> list[torch.Tensor]:
    """Sum over the vocabulary of p g g^T, averaged over continuation and coded tokens: K and V."""
    keys, values = cache_of(model, token_ids[:CONTEXT], rope)
    rotated = rotate(keys, torch.arange(CONTEXT), rope)
    log_probs = log_probs_of(model, rotated, values, token_ids[CONTEXT:])
    rows, vocabulary = log_probs.shape
    selected = torch.eye(rows * vocabulary).view(-1, rows, vocabulary)
    probabilities = log_probs.detach().exp().flatten().double()
    found = []
    for gradients in torch.autograd.grad(log_probs, (keys, values), selected, is_grads_batched=True):
        coded = gradients[:, :, CODED].double()
        found.append(torch.einsum("y,ylthd,ylthe->lhde", probabilities, coded, coded) / coded.shape[2] / rows)
    return found


def test_it_is_the_information_of_the_cache_before_rope(model: Any, rope: RopeSpec) -> None:
    expected = plain_information(model, sequence(0).token_ids, rope)
    draws = [measure_sensitivity(model, [sequence(0)], rope, seed=seed, progress=QUIET) for seed in range(100)]
    for side in Side:
        found = torch.stack([draw.k if side is Side.K else draw.v for draw in draws])
        error = (found.mean(dim=0) - expected[side]).flatten(2)
        spread = found.std(dim=0).flatten(2) / len(draws) ** 0.5
        # Tokens are drawn, so each number has a standard error. Their squares over it are 1 on average.
        assert 0.5 < float((error / spread).square().mean()) < 1.5


def test_it_predicts_what_a_small_error_does_to_the_output(model: Any, rope: RopeSpec) -> None:
    token_ids = sequence(1).token_ids
    information = plain_information(model, token_ids, rope)
    cache = [tensor.detach() for tensor in cache_of(model, token_ids[:CONTEXT], rope)]
    positions = torch.arange(CONTEXT)

    def expected_after(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return log_probs_of(model, rotate(keys, positions, rope), values, token_ids[CONTEXT:]).double()

    reference = expected_after(*cache)
    generator = torch.Generator().manual_seed(0)
    for side in Side:
        for layer in range(2):
            noise = torch.zeros_like(cache[side])
            scale = 0.02 * float(cache[side].std())
            divergences = []
            for _ in range(40):
                noise[layer, CODED] = scale * torch.randn(noise[layer, CODED].shape, generator=generator)
                changed = list(cache)
                changed[side] = cache[side] + noise
                divergences.append(float((reference.exp() * (reference - expected_after(*changed))).sum()))
            traces = information[side][layer].diagonal(dim1=-2, dim2=-1).sum()
            predicted = float(traces) / 2 * scale**2 * (CODED.stop - CODED.start) * (LENGTH - CONTEXT)
            standard_error = np.std(divergences) / len(divergences) ** 0.5
            assert abs(np.mean(divergences) - predicted) < 4 * standard_error


def test_the_longest_sequences_are_used_and_a_seed_decides(model: Any, rope: RopeSpec) -> None:
    longer = [sequence(number, 60 - number) for number in range(20)]
    assert sensitivity_sequences([sequence(50), *longer, sequence(51)]) == longer
    found = measure_sensitivity(model, longer, rope, seed=3, progress=QUIET)
    again = measure_sensitivity(model, longer, rope, seed=3, progress=QUIET)
    assert torch.equal(found.k, again.k) and torch.equal(found.v, again.v)
    assert found.num_sequences == 20 and 0 < found.standard_error < 1
    assert "20 sequences" in found.describe()
    other = measure_sensitivity(model, longer, rope, seed=4, progress=QUIET)
    assert not torch.equal(found.k, other.k)


@pytest.mark.parametrize("length", [0, 5, 8])
def test_text_too_short_to_be_continued_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=f"the longest has {length} tokens"):
        sensitivity_sequences([sequence(0, length)])


def information_of(*diagonals: Sequence[float]) -> torch.Tensor:
    """One layer, a head per diagonal."""
    return torch.stack([torch.diag(torch.tensor(diagonal, dtype=torch.float64)) for diagonal in diagonals])[None]


def informations(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """What the diagonals of weights stand for, up to a factor: [num_layers, num_kv_heads, head size]."""
    return np.diagonal(weights, axis1=2, axis2=3).astype(np.float64) ** (2 / POWER)


def test_weights_are_roots_in_one_unit_for_both_sides() -> None:
    k, v = Sensitivity(information_of([4, 4], [16, 16]), information_of([64, 64]), 1, 0.0).weights()
    squares = [informations(weights)[0, head, 0] for weights, head in ((k, 0), (k, 1), (v, 0))]
    assert squares == pytest.approx([squares[0], 4 * squares[0], 16 * squares[0]])
    assert np.prod(squares) == pytest.approx(1)
    for weights in (k, v):
        np.testing.assert_array_equal(weights, weights.swapaxes(2, 3))
        assert weights.dtype == np.float32


def test_directions_and_heads_without_information_still_cost_something() -> None:
    k, v = Sensitivity(information_of([8, 0], [0, 0]), information_of([1, 1], [1, 1]), 1, 0.0).weights()
    (first, second), (third, _) = informations(k)[0]
    assert first / second == pytest.approx((0.9 * 8 + 0.1 * 4) / (0.1 * 4))
    # The mean over the heads of K is 2 per channel.
    assert second / third == pytest.approx(0.1 * 4 / (1e-4 * 2))
    assert np.isfinite(v).all()


def test_a_model_that_does_not_read_its_cache_is_refused() -> None:
    nothing = information_of([0, 0])
    with pytest.raises(ConfigError, match="does not depend on its KV cache"):
        Sensitivity(nothing, nothing, 1, 0.0).weights()
