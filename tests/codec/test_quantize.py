from __future__ import annotations

import numpy as np
import pytest
import torch
from codec.plain_codec import quantize_and_back
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvtc.artifact.schema import GROUP_SIZES, MAX_WIDTH, Group, SidePlan
from sglang_kvtc.codec.quantize import GroupedQuantizer

WIDTHS = range(1, MAX_WIDTH + 1)


def coded(coefficients: torch.Tensor, groups: tuple[Group, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Symbols, params and what they decode to in fp32."""
    quantizer = GroupedQuantizer.from_plan(SidePlan(groups, 0.0))
    quantized = quantizer.quantize(coefficients)
    assert quantized is not None
    decoded = torch.empty(coefficients.shape)
    quantizer.dequantize(*quantized, decoded)
    return *quantized, decoded


def gaussian(size: int, num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, num_tokens, generator=torch.Generator().manual_seed(seed))


@st.composite
def group_values(draw: st.DrawFn) -> torch.Tensor:
    """f32[16, 3] with whole octaves between the coefficients of one token and those of another."""
    values = draw(st.lists(st.floats(-1, 1, width=32), min_size=48, max_size=48))
    exponents = draw(st.lists(st.integers(-24, 14), min_size=3, max_size=3))
    return torch.tensor(values).reshape(16, 3) * torch.tensor([2.0**exponent for exponent in exponents])


@given(group_values(), st.sampled_from(WIDTHS))
def test_an_error_is_at_most_half_a_step(values: torch.Tensor, width: int) -> None:
    symbols, params, decoded = coded(values, (Group(0, 16, width),))
    scale = params[1, 0].double()
    assert int(symbols.max()) < 2**width
    # Beyond the half step, only the fp32 rounding of distances and products.
    rounding = 4 * 2.0**-24 * (values.abs().amax(dim=0) + 2**width * scale)
    assert ((decoded - values).abs() <= scale / 2 + rounding).all()


@given(group_values(), st.sampled_from(WIDTHS))
def test_levels_span_the_range_and_hardly_more(values: torch.Tensor, width: int) -> None:
    _, params, _ = coded(values, (Group(0, 16, width),))
    shift, scale = params[:, 0].double()
    low, high = values.amin(dim=0).double(), values.amax(dim=0).double()
    steps = 2**width - 1
    assert (shift <= low).all()
    # The division that gives the scale is in fp32.
    assert (shift + scale * steps * (1 + 2.0**-23) >= high).all()
    below = torch.from_numpy(np.nextafter(params[0, 0].numpy(), np.float16(np.inf))).double()
    smaller = torch.from_numpy(np.nextafter(params[1, 0].numpy(), np.float16(-1))).double()
    assert (below > low).all()
    assert ((scale == 0) | (shift + smaller * steps < high)).all()


@given(group_values(), st.sampled_from(WIDTHS))
def test_decoded_values_are_those_of_the_plain_quantiser(values: torch.Tensor, width: int) -> None:
    group = Group(0, 16, width)
    _, params, decoded = coded(values, (group,))
    for token in range(values.shape[1]):
        expected = quantize_and_back(values[:, token].double(), group)
        # A coefficient half way between two levels may go to either.
        tie = (decoded[:, token] - values[:, token]).abs() - (expected - values[:, token]).abs()
        rounding = 4 * 2.0**-24 * (values[:, token].abs().max() + 2**width * params[1, 0, token].double())
        assert (tie <= rounding).all()


@pytest.mark.parametrize("constant", [-100.0, -0.5, 0.0, 0.5, 100.0])
@pytest.mark.parametrize("size", [1, 16])
def test_a_num_03_constant_value_is_recovered(constant: float, size: int) -> None:
    for width in WIDTHS:
        _, _, decoded = coded(torch.full((size, 2), constant), (Group(0, size, width),))
        assert (decoded == constant).all()


@given(st.floats(-6e4, 6e4), st.sampled_from(WIDTHS))
def test_a_num_03_constant_that_f16_cannot_hold_is_off_by_one_f16_rounding(constant: float, width: int) -> None:
    _, _, decoded = coded(torch.full((16, 1), constant), (Group(0, 16, width),))
    spacing = float(np.spacing(np.float16(abs(constant))))
    assert abs(float(decoded[0, 0]) - constant) <= spacing / 2
    assert (decoded == decoded[0, 0]).all()


@pytest.mark.parametrize("spread", [1e-8, 1e-4, 1.0, 6e4])
def test_a_num_02_params_of_any_range_are_finite_and_errors_half_a_step(spread: float) -> None:
    for width in WIDTHS:
        values = (torch.rand(16, 8, generator=torch.Generator().manual_seed(1)) - 0.5) * spread
        _, params, decoded = coded(values, (Group(0, 16, width),))
        assert torch.isfinite(params).all()
        assert ((decoded - values).abs() <= params[1, 0].double() / 2 * (1 + 2**-10)).all()


@pytest.mark.parametrize("bad", [3e38, -7e4, float("inf"), float("nan")])
def test_a_num_02_what_f16_cannot_hold_is_not_quantised(bad: float) -> None:
    values = torch.zeros(33, 4)
    quantizer = GroupedQuantizer.from_plan(SidePlan((Group(0, 1, 8), Group(1, 16, 4), Group(17, 16, 2)), 0.0))
    assert quantizer.quantize(values) is not None
    values[20, 2] = bad
    assert quantizer.quantize(values) is None


def test_a_num_06_widths_and_sizes_may_mix_in_one_plan() -> None:
    groups, start = [], 0
    for size in GROUP_SIZES:
        for width in range(MAX_WIDTH + 1):
            groups.append(Group(start, size, width))
            start += size
    values = gaussian(start, 3)
    symbols, params, decoded = coded(values, tuple(groups))
    for index, group in enumerate(groups):
        rows = slice(group.start, group.start + group.size)
        alone = coded(values[rows], (Group(0, group.size, group.width),))
        assert torch.equal(symbols[rows], alone[0])
        assert torch.equal(params[:, index], alone[1][:, 0])
        assert torch.equal(decoded[rows], alone[2])
        assert int(symbols[rows].max()) < 2**group.width


def test_a_group_of_width_0_is_its_mean() -> None:
    values = gaussian(16, 5)
    symbols, _, decoded = coded(values, (Group(0, 16, 0),))
    assert not symbols.any()
    assert ((decoded - values.mean(dim=0)).abs() <= 2**-10 * values.abs().max()).all()
