"""The Triton kernels of uniform plans against the oracle, on the GPU if there is one, else interpreted.

Frames of both kinds of plans are compared in test_quantize.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_kvtc.artifact.schema import LEVEL_BITS, Group, SidePlan
from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.bitstream.frame import SectionId, open_frame
from sglang_kvtc.codec.uniform import SCALE_ONE, UniformQuantizer
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.kernels.triton_ops import launch, pack, uniform

DEVICE = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
GOLDEN = Path(__file__).parents[1] / "golden" / "v1" / "coded_uniform"
STEP = 0.25
WIDTHS = ((5, 16), (1, 9), (20, 12), (30, 8), (3, 10), (17, 5), (9, 2))
"""Components and width of neighbouring runs."""


def quantizer_of(runs: Sequence[tuple[int, int]] = WIDTHS, step: float = STEP, seed: int = 0) -> UniformQuantizer:
    """Components of falling variance; the fourth one, if there is one, never varied."""
    groups, start = [], 0
    for size, width in runs:
        groups.append(Group(start, size, width))
        start += size
    variances = np.random.default_rng(seed).uniform(0.5, 2, start) * 8.0 / np.arange(1, start + 1)
    variances[3:4] = 0
    return UniformQuantizer.from_plan(SidePlan(tuple(groups), 0.0, step=step), variances.astype(np.float32))


def coefficients_of(quantizer: UniformQuantizer, num_tokens: int, seed: int = 0) -> torch.Tensor:
    """f32[num_components, num_tokens]: tokens of any energy, zeros, and some with an outlier that sets the step."""
    rng = np.random.default_rng(seed)
    num_components = len(quantizer.inverse_levels)
    values = rng.standard_normal((num_components, num_tokens)) * 2.0 ** rng.integers(-12, 12, num_tokens)
    values *= np.linspace(3, 0.1, num_components)[:, None]
    values[:, 1::5] = 0
    if num_components:
        outliers = np.arange(2, num_tokens, 5)
        values[rng.integers(num_components, size=len(outliers)), outliers] *= 1e4
    return torch.from_numpy(values.astype(np.float32))


def assert_codes_match(codes: torch.Tensor, values: torch.Tensor, quantizer: UniformQuantizer) -> torch.Tensor:
    """Codes are the oracle's but for tokens that need, in fp64, a step of the table up to the rounding of an fp32 sum.

    Returns the oracle's codes.
    """
    quantized = quantizer.quantize(values)
    assert quantized is not None
    expected = quantized[1]
    exact = values.double()
    units = exact * quantizer.inverse_deviations.double()
    needed = units.square().mean(dim=0).sqrt() * quantizer.steps[SCALE_ONE].double()
    needed = torch.maximum(needed, (exact * quantizer.inverse_levels.double()).abs().amax(dim=0))
    table = quantizer.steps.double()
    nearest = (table[None, :] / needed[:, None].clamp(min=1e-300) - 1).abs().amin(dim=1)
    # A sum of n squares in any order is off by at most n + 1 roundings, of which the root leaves half.
    is_near = nearest <= len(values) * 2.0**-24
    assert torch.equal(codes[~is_near], expected[~is_near])
    assert ((codes.int() - expected.int()).abs() <= 1).all()
    return expected


def assert_matches_oracle(values: torch.Tensor, quantizer: UniformQuantizer) -> None:
    """Codes as above, and given the codes, packed symbols and coefficients bit for bit."""
    tables = uniform.LevelTables.from_quantizer(quantizer, DEVICE)
    codes, packed, refused = uniform.quantize_and_pack(values.to(DEVICE), tables)
    assert refused.tolist() == [0]
    expected_codes = assert_codes_match(codes.cpu(), values, quantizer)
    same = (codes.cpu() == expected_codes).numpy()
    quantized = quantizer.quantize(values)
    assert quantized is not None
    symbols = bitpack.unpack(packed.cpu().numpy(), quantizer.row_widths, values.shape[1])
    np.testing.assert_array_equal(symbols[:, same], quantized[0].numpy()[:, same])
    # The filling of rows, too.
    np.testing.assert_array_equal(packed.cpu().numpy(), bitpack.pack(symbols, quantizer.row_widths))
    expected, out = torch.empty(values.shape), torch.empty(values.shape, device=DEVICE)
    quantizer.dequantize(torch.from_numpy(symbols), codes.cpu(), expected)
    assert torch.equal(uniform.unpack_and_dequantize(packed, codes, tables, out).cpu(), expected)


@pytest.mark.parametrize("width", range(LEVEL_BITS[0], LEVEL_BITS[1] + 1))
def test_every_width_is_the_oracles(width: int) -> None:
    quantizer = quantizer_of([(37, width)])
    assert_matches_oracle(coefficients_of(quantizer, 9, seed=width), quantizer)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 9, 33, 65])
def test_rows_of_any_number_of_tokens_follow_each_other_without_gaps(num_tokens: int) -> None:
    quantizer = quantizer_of()
    assert_matches_oracle(coefficients_of(quantizer, num_tokens, seed=num_tokens), quantizer)


@pytest.mark.parametrize("seed", range(4))
def test_a_num_06_random_plans_are_the_oracles(seed: int) -> None:
    rng = np.random.default_rng(seed)
    runs = [(int(rng.integers(1, 40)), int(width)) for width in rng.permutation(np.arange(2, 17))[:6]]
    quantizer = quantizer_of(runs, step=float(2.0 ** rng.uniform(-10, 10)), seed=seed)
    assert_matches_oracle(coefficients_of(quantizer, int(rng.integers(1, 20)), seed), quantizer)


def test_more_components_than_one_program_adds_up_are_the_oracles() -> None:
    quantizer = quantizer_of([(uniform.SPLIT_ROWS + 70, 6)])
    assert_matches_oracle(coefficients_of(quantizer, 9), quantizer)


def test_needs_that_are_a_step_of_the_table_take_it() -> None:
    # What a token needs is the reach of one component, a single product: there nothing may differ.
    quantizer = UniformQuantizer.from_plan(SidePlan((Group(0, 1, 2),), 0.0, step=STEP), np.array([1e20], np.float32))
    table = quantizer.steps[100:160]
    values = torch.cat([table, torch.nextafter(table, table / 2), torch.nextafter(table, table * 2)])[None]
    tables = uniform.LevelTables.from_quantizer(quantizer, DEVICE)
    codes, _, _ = uniform.quantize_and_pack(values.to(DEVICE), tables)
    expected = torch.arange(100, 160)
    assert codes.tolist() == torch.cat([expected, expected, expected + 1]).tolist()


def test_coefficients_half_way_between_levels_go_where_the_oracle_puts_them() -> None:
    # Deviations so large that the reach of the levels sets the step. Divided by it, coefficients would all be exactly
    # half way; multiplied by its rounded inverse they are not.
    plan = SidePlan((Group(0, 15, 4),), 0.0, step=STEP)
    quantizer = UniformQuantizer.from_plan(plan, np.full(15, 1e20, np.float32))
    levels = torch.cat([torch.tensor([6.75]), torch.arange(-7, 7) + 0.5])
    assert_matches_oracle(levels[:, None] * quantizer.steps[100:164], quantizer)


# numpy, in which the interpreter computes, warns of what is not finite.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [3e38, -1e30, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("component", [3, 84])
def test_a_num_02_what_has_no_step_sets_the_flag(bad: float, component: int) -> None:
    quantizer = quantizer_of()
    tables = uniform.LevelTables.from_quantizer(quantizer, DEVICE)
    values = torch.zeros(85, 20)
    values[component, 18] = bad
    assert quantizer.quantize(values) is None
    assert uniform.quantize_and_pack(values.to(DEVICE), tables)[2].tolist() == [1]


def test_outputs_are_written_in_place_and_the_flag_is_never_cleared() -> None:
    quantizer = quantizer_of()
    tables = uniform.LevelTables.from_quantizer(quantizer, DEVICE)
    values = coefficients_of(quantizer, 9).to(DEVICE)
    codes, packed, _ = uniform.quantize_and_pack(values, tables)
    own = torch.full_like(codes, 7), torch.full_like(packed, 255), torch.ones(1, dtype=torch.int32, device=DEVICE)
    # Coefficients may have any strides, too.
    by_token = values.T.contiguous().T
    written = uniform.quantize_and_pack(by_token, tables, codes=own[0], packed=own[1], refused=own[2])
    assert all(given is returned for given, returned in zip(own, written, strict=True))
    assert torch.equal(own[0], codes)
    assert torch.equal(own[1], packed)
    assert own[2].tolist() == [1]


@pytest.mark.parametrize("dtype", pack.OUT_DTYPES)
def test_coefficients_are_the_oracles_in_every_dtype_and_layout(dtype: torch.dtype) -> None:
    quantizer = quantizer_of()
    rng = np.random.default_rng(0)
    symbols = rng.integers(0, 1 << quantizer.row_widths.astype(int)[:, None], (len(quantizer.row_widths), 33), np.int64)
    packed = torch.from_numpy(bitpack.pack(symbols.astype(np.uint8), quantizer.row_widths)).to(DEVICE)
    # Up to 2**15 times the step: within what f16 holds.
    codes = torch.from_numpy(rng.integers(0, SCALE_ONE, 33).astype(np.uint8))
    expected = torch.empty(85, 33, dtype=dtype)
    quantizer.dequantize(torch.from_numpy(symbols.astype(np.uint8)), codes, expected)
    tables = uniform.LevelTables.from_quantizer(quantizer, DEVICE)
    by_token = torch.ones(33, 87, dtype=dtype, device=DEVICE)
    apart = torch.ones(170, 66, dtype=dtype, device=DEVICE)
    for out in (by_token[:, :85].T, apart[::2, 1::2]):
        assert uniform.unpack_and_dequantize(packed, codes.to(DEVICE), tables, out) is out
        assert torch.equal(out.cpu(), expected)
    assert (by_token[:, 85:] == 1).all()
    assert (apart[1::2] == 1).all()
    assert (apart[:, ::2] == 1).all()


def test_golden_coefficients_of_a_uniform_plan() -> None:
    expected = json.loads(GOLDEN.with_suffix(".json").read_text(encoding="utf-8"))
    coefficients = [[float.fromhex(value) for value in row] for row in expected["k_coefficients"]]
    quantizer = quantizer_of(expected["k_groups"], step=expected["k_step"])
    opened = open_frame(GOLDEN.with_suffix(".kvtc").read_bytes())
    codes, packed = (
        torch.from_numpy(opened.section(section).copy()).to(DEVICE)
        for section in (SectionId.K_PARAMS, SectionId.K_SYMBOLS)
    )
    out = torch.empty(len(coefficients), len(coefficients[0]), device=DEVICE)
    uniform.unpack_and_dequantize(packed, codes, uniform.LevelTables.from_quantizer(quantizer, DEVICE), out)
    assert out.double().tolist() == coefficients


def test_nothing_kept_makes_no_bytes() -> None:
    tables = uniform.LevelTables.from_quantizer(quantizer_of([]), DEVICE)
    codes, packed, refused = uniform.quantize_and_pack(torch.empty(0, 5, device=DEVICE), tables)
    assert codes.tolist() == [SCALE_ONE] * 5
    assert packed.shape == (0,)
    assert refused.tolist() == [0]
    uniform.unpack_and_dequantize(packed, codes, tables, torch.empty(0, 5, device=DEVICE))


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    tables = uniform.LevelTables.from_quantizer(quantizer_of(), DEVICE)
    values = torch.zeros(85, 9, device=DEVICE)
    codes, packed, refused = uniform.quantize_and_pack(values, tables)
    for name, wrong in {
        "coefficients": {"coefficients": values[:84]},
        "codes": {"codes": codes[:8]},
        "packed": {"packed": packed.int()},
        "refused": {"refused": refused.float()},
    }.items():
        with pytest.raises(ConfigError, match=f"^{name} is "):
            uniform.quantize_and_pack(**{"coefficients": values, "tables": tables, **wrong})
    for name, arguments in {
        "out": (packed, codes, tables, values.int()),
        "codes": (packed, codes.int(), tables, values),
        "packed": (packed[1:], codes, tables, values),
    }.items():
        with pytest.raises(ConfigError, match=f"^{name} is "):
            uniform.unpack_and_dequantize(*arguments)


def test_the_kernels_ran_and_not_their_oracle(
    record_launches: Callable[..., list[Any]], without_oracle: Callable[..., None]
) -> None:
    quantizer = quantizer_of()
    tables = uniform.LevelTables.from_quantizer(quantizer, DEVICE)
    values = coefficients_of(quantizer, 9).to(DEVICE)
    names = ["_measure", "_choose_steps", "_quantize_and_pack", "_unpack_and_dequantize"]
    launched = record_launches(uniform, *names)
    without_oracle(UniformQuantizer, "quantize", "dequantize")
    without_oracle(bitpack, "pack", "unpack")
    codes, packed, _ = uniform.quantize_and_pack(values, tables)
    uniform.unpack_and_dequantize(packed, codes, tables, torch.empty_like(values))
    assert [each.kernel for each in launched] == names
    assert all(each.options["enable_fp_fusion"] is False for each in launched)
    assert launch.IS_INTERPRETED is (DEVICE.type == "cpu")
