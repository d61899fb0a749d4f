"""The quantiser of uniform plans against a plain one, and what it promises for any coefficients."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from codec.plain_codec import levels_and_back
from hypothesis import given
from hypothesis import strategies as st

import sglang_kvtc.bitstream
from sglang_kvtc.artifact.schema import LEVEL_BITS, Group, SidePlan
from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.codec.uniform import SCALE_ONE, SCALE_UNITS, UniformQuantizer, token_steps

STEP = 0.25
PLAN = SidePlan((Group(0, 3, 12), Group(3, 5, 8), Group(8, 4, 4)), 0.0, step=STEP)
STEPS = token_steps(STEP)
DEVIATIONS = torch.tensor([30.0, 12, 6, 3, 2, 1, 1, 0.5, 0.4, 0.3, 0.2, 0.15])


def quantizer_of(plan: SidePlan = PLAN, deviations: torch.Tensor = DEVIATIONS) -> UniformQuantizer:
    return UniformQuantizer.from_plan(plan, deviations.square().numpy())


def coded(coefficients: torch.Tensor, quantizer: UniformQuantizer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Symbols, codes of scales and what they decode to in fp32."""
    quantized = quantizer.quantize(coefficients)
    assert quantized is not None
    decoded = torch.empty(coefficients.shape)
    quantizer.dequantize(*quantized, decoded)
    return *quantized, decoded


@st.composite
def coefficients(draw: st.DrawFn) -> torch.Tensor:
    """f32[12, 3] with whole octaves between the coefficients of one token and those of another."""
    values = draw(st.lists(st.floats(-1, 1, width=32), min_size=36, max_size=36))
    exponents = draw(st.lists(st.integers(-24, 24), min_size=3, max_size=3))
    return torch.tensor(values).reshape(12, 3) * torch.tensor([2.0**exponent for exponent in exponents])


@given(coefficients())
def test_an_error_is_at_most_half_a_step_whatever_the_text(values: torch.Tensor) -> None:
    _, codes, decoded = coded(values, quantizer_of())
    steps = STEPS[codes.int()].double()
    # Beyond the half step, only fp32 rounding: of the distance, which is offset by up to 2^11 levels, and of products.
    rounding = 2.0**-22 * values.abs() + 2.0**-12 * steps
    assert ((decoded - values).abs() <= steps / 2 + rounding).all()


@given(coefficients())
def test_scales_and_decoded_values_are_those_of_the_plain_quantiser(values: torch.Tensor) -> None:
    _, codes, decoded = coded(values, quantizer_of())
    for token in range(values.shape[1]):
        code, expected = levels_and_back(values[:, token].double(), PLAN, DEVIATIONS.double())
        # What is needed may lie within fp32 rounding of a scale.
        assert abs(int(codes[token]) - code) <= 1
        if int(codes[token]) != code:
            continue
        step = float(STEPS[code])
        # A coefficient half way between two levels may go to either.
        tie = (decoded[:, token] - values[:, token]).abs() - (expected - values[:, token]).abs()
        assert (tie <= 2.0**-22 * values[:, token].abs() + 2.0**-12 * step).all()


def test_components_of_more_than_8_bits_have_rows_of_upper_and_of_lower_bits() -> None:
    quantizer = quantizer_of()
    assert quantizer.row_widths.tolist() == [8] * 3 + [4] * 3 + [8] * 5 + [4] * 4
    levels = torch.tensor([-2047, -129, 1000, 127, -127, 5, 0, -1, 7, -7, 3, 0])
    values = (levels * STEP)[:, None].float()
    symbols, codes, decoded = coded(values, quantizer_of(deviations=torch.full((12,), 1e9)))
    assert codes.tolist() == [SCALE_ONE]
    assert torch.equal(decoded, values)
    unsigned = (levels[:3] + 2048).tolist()
    assert symbols[:3, 0].tolist() == [value >> 4 for value in unsigned]
    assert symbols[3:6, 0].tolist() == [value & 15 for value in unsigned]
    assert symbols[6:11, 0].tolist() == (levels[3:8] + 128).tolist()
    assert symbols[11:, 0].tolist() == (levels[8:] + 8).tolist()


@pytest.mark.parametrize("width", range(LEVEL_BITS[0], LEVEL_BITS[1] + 1))
def test_every_width_reaches_as_far_as_its_levels(width: int) -> None:
    largest = 2 ** (width - 1) - 1
    quantizer = quantizer_of(SidePlan((Group(0, 1, width),), 0.0, step=1.0), torch.tensor([1e9]))
    values = torch.tensor([[largest, -largest, 0.0, 1.01 * largest]])
    symbols, codes, decoded = coded(values, quantizer)
    assert codes[:2].tolist() == [SCALE_ONE, SCALE_ONE]
    assert torch.equal(decoded[:, :3], values[:, :3])
    # Just beyond, the next scale.
    assert int(codes[3]) == SCALE_ONE + 1
    assert abs(float(decoded[0, 3]) - 1.01 * largest) <= 2.0 ** (1 / SCALE_UNITS) / 2 + 0.01
    assert all(int(row.max()) < 2**bits for row, bits in zip(symbols, quantizer.row_widths.tolist(), strict=True))


def test_an_outlier_makes_its_own_token_coarser_and_no_other() -> None:
    values = torch.randn(12, 40, generator=torch.Generator().manual_seed(0)) * DEVIATIONS[:, None]
    # Deviations so large that only the reach of the levels counts.
    quantizer = quantizer_of(deviations=torch.full((12,), 1e9))
    _, codes, decoded = coded(values, quantizer)
    values[11, 17] = 1000.0
    _, with_outlier, then = coded(values, quantizer)
    others = torch.arange(40) != 17
    assert torch.equal(then[:, others], decoded[:, others])
    assert torch.equal(with_outlier[others], codes[others])
    # The smallest of its kind: at the next one down, 7 levels of the last component would not reach.
    code = int(with_outlier[17])
    assert 7 * STEPS[code] >= 1000 > 7 * STEPS[code - 1]
    assert abs(float(then[11, 17]) - 1000) <= STEPS[code] / 2


def test_tokens_of_more_energy_have_larger_steps() -> None:
    values = torch.randn(12, 400, generator=torch.Generator().manual_seed(1)) * DEVIATIONS[:, None]
    _, codes, _ = coded(values, quantizer_of())
    _, louder, _ = coded(4 * values, quantizer_of())
    assert torch.equal(louder.int() - codes.int(), torch.full((400,), 2 * SCALE_UNITS))
    # Energy in units of the deviations is 1 on average.
    assert float((STEPS[codes.int()] / STEP).log2().mean()) == pytest.approx(0.0, abs=0.5)


def test_a_num_03_zeros_and_constants_are_recovered() -> None:
    _, _, decoded = coded(torch.zeros(12, 3), quantizer_of())
    assert not decoded.any()
    constant = 5 * STEP * torch.ones(12, 2)
    # A scale that is a whole power of two keeps multiples of the step exact.
    _, codes, decoded = coded(constant, quantizer_of(deviations=torch.full((12,), 5 * STEP)))
    assert codes.tolist() == [SCALE_ONE, SCALE_ONE]
    assert torch.equal(decoded, constant)


@pytest.mark.parametrize("bad", [3e38, float("inf"), float("-inf"), float("nan")])
def test_a_num_02_what_has_no_scale_is_not_quantised(bad: float) -> None:
    values = torch.zeros(12, 4)
    values[7, 2] = bad
    assert quantizer_of().quantize(values) is None


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 1e9])
def test_a_num_02_scales_reach_from_the_smallest_to_the_largest_numbers(size: float) -> None:
    values = size * torch.randn(12, 9, generator=torch.Generator().manual_seed(2)) * DEVIATIONS[:, None]
    _, codes, decoded = coded(values, quantizer_of())
    steps = STEPS[codes.int()]
    assert torch.isfinite(decoded).all()
    assert ((decoded - values).abs() <= steps * 0.501).all()
    assert (codes == 0).all() == (size == 1e-30)


def test_coding_again_what_was_decoded_adds_next_to_nothing() -> None:
    """As a prefix that is restored and compressed turn after turn, or KVTC's simulation of conversations."""
    groups = (Group(0, 20, 12), Group(20, 300, 8), Group(320, 680, 4))
    # Deviations fall to 0.45 steps, where coding raises the energy of a component by a third.
    deviations = torch.cat(
        [torch.logspace(1.6, 0.8, 20), torch.logspace(0.6, -0.43, 300), torch.linspace(0.37, 0.11, 680)]
    )
    quantizer = quantizer_of(SidePlan(groups, 0.0, step=STEP), deviations)
    values = torch.randn(1000, 300, generator=torch.Generator().manual_seed(5)) * deviations[:, None]
    errors, decoded = [], values
    for _ in range(12):
        _, _, decoded = coded(decoded, quantizer)
        errors.append(float((decoded - values).square().sum()))
    assert errors[-1] < 1.2 * errors[0]
    assert errors[-1] == errors[3]


def test_components_that_never_varied_do_not_count_for_the_scale() -> None:
    deviations = DEVIATIONS.clone()
    deviations[7] = 0
    values = DEVIATIONS[:, None].clone()
    values[7] = 0
    # Seven of the eight components that count; a little less, since a scale is not below what it is for.
    values *= (8 / 7) ** 0.5 * (1 - 2.0**-10)
    assert coded(values, quantizer_of(deviations=deviations))[1].tolist() == [SCALE_ONE]


def test_nothing_kept_and_no_tokens() -> None:
    empty = quantizer_of(SidePlan((), 0.0, step=STEP))
    symbols, codes, _ = coded(torch.zeros(0, 5), empty)
    assert symbols.shape == (0, 5)
    assert codes.tolist() == [SCALE_ONE] * 5
    symbols, codes, _ = coded(torch.zeros(12, 0), quantizer_of())
    assert symbols.shape == (15, 0)
    assert len(codes) == 0


def test_long_runs_are_worked_on_in_blocks_to_the_same_result() -> None:
    groups = (Group(0, 300, 12), Group(300, 600, 8), Group(900, 259, 4))
    quantizer = quantizer_of(SidePlan(groups, 0.0, step=STEP), torch.ones(1159))
    values = torch.randn(1159, 7, generator=torch.Generator().manual_seed(3))
    symbols, codes, decoded = coded(values, quantizer)
    assert len(symbols) == len(quantizer.row_widths) == 2 * 300 + 600 + 259
    steps = STEPS[codes.int()]
    assert ((decoded - values).abs() <= steps * 0.5001).all()
    assert torch.equal((decoded / steps).round() * steps, decoded)


def test_steps_are_powers_of_the_fourth_root_of_two_of_8_significant_bits() -> None:
    expected = [0.3 * 2.0 ** ((code - 128) / 4) for code in range(256)]
    steps = token_steps(0.3).double()
    np.testing.assert_allclose(steps, expected, rtol=2.0**-8)
    significands = steps / torch.exp2(steps.log2().floor())
    assert torch.equal(significands * 128, (significands * 128).round())


def test_products_of_levels_and_steps_are_exact_in_fp32() -> None:
    plan = SidePlan((Group(0, 1, LEVEL_BITS[1]),), 0.0, step=0.3)
    quantizer = UniformQuantizer.from_plan(plan, np.ones(1, np.float32))
    symbols = torch.randint(256, (2, 256), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    codes = torch.arange(256).to(torch.uint8)
    decoded = torch.empty(1, 256)
    quantizer.dequantize(symbols, codes, decoded)
    levels = symbols[0].double() * 256 + symbols[1].double() - 2**15
    assert torch.equal(decoded[0].double(), levels * token_steps(0.3).double())


def test_the_worked_example_of_the_format() -> None:
    specification = (Path(sglang_kvtc.bitstream.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")
    params, packed, *more = re.findall(r"```\n([0-9a-f \n]+)```", specification)[1].strip().split("\n")
    groups = (Group(0, 1, 12), Group(1, 2, 4))
    quantizer = UniformQuantizer.from_plan(SidePlan(groups, 0.0, step=0.1), np.ones(3, np.float32))
    content = np.frombuffer(bytes.fromhex(packed + "".join(more)), np.uint8)
    symbols = torch.from_numpy(bitpack.unpack(content, quantizer.row_widths, 3))
    codes = torch.tensor(list(bytes.fromhex(params)), dtype=torch.uint8)
    decoded = torch.empty(3, 3)
    quantizer.dequantize(symbols, codes, decoded)
    steps = [0.10009765625, 0.1416015625, 0.0250244140625]
    levels = [[-300, 0, 77], [1, -2, 3], [0, 7, -7]]
    assert decoded.tolist() == [[level * step for level, step in zip(row, steps, strict=True)] for row in levels]
    assert float(decoded[0, 0]) == -30.029296875
