from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvtc.eviction.score_codes import STEPS, decode_scores, encode_scores

SMALLEST = 2.0 ** (-255 / STEPS)
CODES = torch.arange(256, dtype=torch.uint8)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


@by_dtype
def test_every_code_comes_back(dtype: torch.dtype) -> None:
    assert torch.equal(encode_scores(decode_scores(CODES, dtype)), CODES)


@by_dtype
def test_codes_are_powers_of_two_in_even_steps_and_ascend(dtype: torch.dtype) -> None:
    scores = decode_scores(CODES, dtype)
    assert scores.dtype == dtype
    assert bool((scores[1:] > scores[:-1]).all())
    # f16 keeps 11 bits, and fewer of what is below 2^-14.
    bound = 2.0**-11 * 4 if dtype is torch.float16 else 2.0**-22
    for code, score in enumerate(scores.tolist()):
        exact = math.pow(2, (code - 255) / STEPS)
        assert abs(score / exact - 1) <= bound


def test_ends_and_what_is_no_score() -> None:
    scores = torch.tensor([0.0, -0.0, 1.0, math.nan, 2.0**-16, 1e-30, -1.0, 2.0, math.inf, -math.inf])
    assert encode_scores(scores).tolist() == [0, 0, 255, 255, 0, 0, 0, 255, 255, 0]
    assert decode_scores(torch.tensor([255], dtype=torch.uint8), torch.float16).item() == 1.0


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40))
def test_scores_come_back_within_the_stated_error_and_in_order(values: list[float]) -> None:
    ordered = sorted(values)
    codes = encode_scores(torch.tensor(ordered))
    assert codes.dtype == torch.uint8
    assert codes.tolist() == sorted(codes.tolist())
    for value, found in zip(ordered, decode_scores(codes, torch.float32).tolist(), strict=True):
        if value < SMALLEST:
            assert found == pytest.approx(SMALLEST, rel=1e-6)
        else:
            assert abs(found - value) <= 0.022 * value


def test_halves_are_coded_as_floats_are_and_keep_their_shape() -> None:
    scores = torch.rand(3, 50, 2, generator=torch.Generator().manual_seed(0)).half()
    codes = encode_scores(scores)
    assert codes.shape == scores.shape
    assert torch.equal(codes, encode_scores(scores.float()))
    assert bool(((decode_scores(codes, torch.float16).double() / scores.double() - 1).abs() <= 0.0225).all())
