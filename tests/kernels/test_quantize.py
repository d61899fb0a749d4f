"""The Triton kernels of grouped plans against the oracle bit for bit, on the GPU if there is one, else interpreted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from codec.toy_model import GROUPS, make_artifact, make_chunk, make_uniform_artifact

from sglang_kvtc.artifact.schema import GROUP_SIZES, MAX_WIDTH, Artifact, Group, SidePlan
from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.bitstream.frame import read_header, write_frame
from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.codec.codec import KVCodec, compute_dtype
from sglang_kvtc.codec.decode import token_coefficients
from sglang_kvtc.codec.encode import centred_features
from sglang_kvtc.codec.quantize import GroupedQuantizer
from sglang_kvtc.codec.rope import Rotation
from sglang_kvtc.codec.transform import CODED_SECTIONS, SideCoding
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.kernels.triton_ops import launch, pack, quantize, uniform
from sglang_kvtc.types import Side

DEVICE = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
KERNELS = ("_quantize_and_pack", "_unpack_and_dequantize")
GROUPS_OF_ALL_SIZES = (Group(0, 1, 8), Group(1, 1, 3), Group(2, 64, 5), Group(66, 16, 2), Group(82, 16, 7))


def quantizer_of(groups: Sequence[Group]) -> GroupedQuantizer:
    return GroupedQuantizer.from_plan(SidePlan(tuple(groups), 0.0))


def tables_of(groups: Sequence[Group]) -> quantize.GroupTables:
    return quantize.GroupTables.from_quantizer(quantizer_of(groups), DEVICE)


def consecutive(sizes_and_widths: Sequence[tuple[int, int]]) -> tuple[Group, ...]:
    groups, start = [], 0
    for size, width in sizes_and_widths:
        groups.append(Group(start, size, width))
        start += size
    return tuple(groups)


def rows_of(groups: Sequence[Group]) -> int:
    return sum(group.size for group in groups)


def coefficients_of(num_components: int, num_tokens: int, seed: int = 0) -> torch.Tensor:
    """f32[num_components, num_tokens] from the smallest f16 to the largest; every third token has the same value
    everywhere, in half of the cases one that f16 holds.
    """
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((num_components, num_tokens)) * 2.0 ** rng.integers(-26, 14, num_tokens)
    values[:, ::3] = values[:1, ::3]
    values[:, ::6] = values[:, ::6].astype(np.float16)
    return torch.from_numpy(values.astype(np.float32))


def assert_same_bytes(values: torch.Tensor, groups: Sequence[Group]) -> None:
    """The kernels write the oracle's params and packed symbols, and decode them to its coefficients."""
    oracle, tables = quantizer_of(groups), tables_of(groups)
    quantized = oracle.quantize(values)
    assert quantized is not None
    symbols, expected_params = quantized
    params, packed, refused = quantize.quantize_and_pack(values.to(DEVICE), tables)
    assert refused.tolist() == [0]
    assert torch.equal(params.cpu().view(torch.int16), expected_params.view(torch.int16))
    np.testing.assert_array_equal(packed.cpu().numpy(), bitpack.pack(symbols.numpy(), oracle.row_widths))
    expected, out = torch.empty(values.shape), torch.empty(values.shape, device=DEVICE)
    oracle.dequantize(symbols, params.cpu(), expected)
    assert torch.equal(quantize.unpack_and_dequantize(packed, params, tables, out).cpu(), expected)


@pytest.mark.parametrize("size", GROUP_SIZES)
def test_every_width_of_every_size_is_the_oracles_bit_for_bit(size: int) -> None:
    # The interpreter takes a second for a thousand components.
    widths = {256: (1, 3, 6, 8), 1024: (3, 8)}.get(size, range(1, MAX_WIDTH + 1))
    groups = consecutive([(size, width) for width in widths])
    assert_same_bytes(coefficients_of(rows_of(groups), 9), groups)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 9, 33, 65])
def test_rows_of_any_number_of_tokens_follow_each_other_without_gaps(num_tokens: int) -> None:
    groups = GROUPS_OF_ALL_SIZES
    assert_same_bytes(coefficients_of(rows_of(groups), num_tokens, seed=num_tokens), groups)


@pytest.mark.parametrize("seed", range(4))
def test_a_num_06_random_plans_are_the_oracles_bit_for_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # More groups of one component than a tile has, in between others.
    sizes = rng.choice((1, 1, 1, 1, 1, 16, 16, 64), 30)
    groups = consecutive([(int(size), int(rng.integers(1, MAX_WIDTH + 1))) for size in sizes])
    assert_same_bytes(coefficients_of(rows_of(groups), int(rng.integers(1, 20)), seed), groups)


def test_coefficients_half_way_between_levels_go_where_the_oracle_puts_them() -> None:
    # Divided by the scale they would all be exactly half way; multiplied by its rounded inverse they are not.
    scales = torch.linspace(0.1, 0.9, 64).half().float()
    levels = torch.cat([torch.tensor([0.0, 15.0]), torch.arange(14) + 0.5])
    assert_same_bytes(levels[:, None] * scales, (Group(0, 16, 4),))


# numpy, in which the interpreter computes, warns of numbers that f16 cannot hold.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ranges_close_to_the_largest_f16_are_rounded_as_by_the_oracle() -> None:
    values = torch.tensor([[65504.0, 65519.0, -65504.0, 0.0, 70000.0], [65504.0, 65510.0, 1e-8, -1e-9, 65504.0]])
    assert_same_bytes(values.repeat(8, 1), (Group(0, 16, 3),))
    assert_same_bytes(values, (Group(0, 1, 3), Group(1, 1, 8)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [3e38, -7e4, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("component", [0, 20])
def test_a_num_02_what_f16_cannot_hold_sets_the_flag(bad: float, component: int) -> None:
    groups = (Group(0, 1, 8), Group(1, 16, 4), Group(17, 16, 2))
    values = torch.zeros(33, 12)
    values[component, 10] = bad
    assert quantizer_of(groups).quantize(values) is None
    refused = quantize.quantize_and_pack(values.to(DEVICE), tables_of(groups))[2]
    assert refused.tolist() == [1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_num_02_tokens_of_nothing_but_nan_set_the_flag_and_others_are_as_ever() -> None:
    groups = (Group(0, 16, 4),)
    values = coefficients_of(16, 9)
    expected, packed, _ = quantize.quantize_and_pack(values.to(DEVICE), tables_of(groups))
    values[:, 8] = float("nan")
    params, repacked, refused = quantize.quantize_and_pack(values.to(DEVICE), tables_of(groups))
    assert refused.tolist() == [1]
    assert torch.equal(params[..., :8], expected[..., :8])
    # Eight symbols of 4 bits, then those of the ninth token.
    assert torch.equal(repacked.view(16, 5)[:, :4], packed.view(16, 5)[:, :4])


def test_a_num_03_a_minimum_of_both_zeros_has_the_oracles_symbols_and_coefficients() -> None:
    groups, zeros = (Group(0, 16, 4),), torch.tensor([0.0, -0.0] * 8)[:, None]
    values = torch.cat([zeros, -zeros, zeros.clone()], 1)
    values[5, 2] = 3.0
    quantized = quantizer_of(groups).quantize(values)
    assert quantized is not None
    params, packed, _ = quantize.quantize_and_pack(values.to(DEVICE), tables_of(groups))
    # As numbers: which zero is the smaller one is up to the order of comparisons, in torch too.
    assert torch.equal(params.cpu(), quantized[1])
    np.testing.assert_array_equal(packed.cpu().numpy(), bitpack.pack(quantized[0].numpy(), np.full(16, 4, np.uint8)))


def test_outputs_are_written_in_place_and_the_flag_is_never_cleared() -> None:
    groups = GROUPS_OF_ALL_SIZES
    tables, values = tables_of(groups), coefficients_of(rows_of(groups), 9).to(DEVICE)
    params, packed, _ = quantize.quantize_and_pack(values, tables)
    own = torch.full_like(params, 7.0), torch.full_like(packed, 255), torch.ones(1, dtype=torch.int32, device=DEVICE)
    written = quantize.quantize_and_pack(values, tables, params=own[0], packed=own[1], refused=own[2])
    assert all(given is returned for given, returned in zip(own, written, strict=True))
    assert torch.equal(own[0], params)
    assert torch.equal(own[1], packed)
    assert own[2].tolist() == [1]


def test_coefficients_may_have_any_strides() -> None:
    tables, values = tables_of(GROUPS), coefficients_of(49, 9).to(DEVICE)
    expected = quantize.quantize_and_pack(values, tables)
    for strided in (values.T.contiguous().T, values.repeat_interleave(2, 1)[:, ::2]):
        assert not strided.is_contiguous()
        for found, other in zip(quantize.quantize_and_pack(strided, tables), expected, strict=True):
            assert torch.equal(found, other)


@pytest.mark.parametrize("dtype", pack.OUT_DTYPES)
def test_coefficients_are_the_oracles_in_every_dtype_and_layout(dtype: torch.dtype) -> None:
    groups = GROUPS_OF_ALL_SIZES
    oracle, tables, num_components = quantizer_of(groups), tables_of(groups), rows_of(groups)
    # Within what f16 holds, but for rounding.
    quantized = oracle.quantize(coefficients_of(num_components, 33).clamp(-3e4, 3e4))
    assert quantized is not None
    symbols, params = quantized
    packed = torch.from_numpy(bitpack.pack(symbols.numpy(), oracle.row_widths)).to(DEVICE)
    expected = torch.empty(num_components, 33, dtype=dtype)
    oracle.dequantize(symbols, params, expected)
    by_token = torch.ones(33, num_components + 2, dtype=dtype, device=DEVICE)
    apart = torch.ones(2 * num_components, 66, dtype=dtype, device=DEVICE)
    for out in (by_token[:, :num_components].T, apart[::2, 1::2]):
        assert quantize.unpack_and_dequantize(packed, params.to(DEVICE), tables, out) is out
        assert torch.equal(out.cpu(), expected)
    assert (by_token[:, num_components:] == 1).all()
    assert (apart[1::2] == 1).all()
    assert (apart[:, ::2] == 1).all()


def test_groups_of_width_0_are_decoded_and_refused_by_name_before_they_are_encoded() -> None:
    groups = (Group(0, 16, 3), Group(16, 16, 0), Group(32, 1, 0), Group(33, 1, 8))
    values = coefficients_of(34, 9)
    oracle, tables = quantizer_of(groups), tables_of(groups)
    with pytest.raises(ConfigError, match="width 0"):
        quantize.quantize_and_pack(values.to(DEVICE), tables)
    quantized = oracle.quantize(values)
    assert quantized is not None
    packed = torch.from_numpy(bitpack.pack(quantized[0].numpy(), oracle.row_widths)).to(DEVICE)
    expected, out = torch.empty(34, 9), torch.empty(34, 9, device=DEVICE)
    oracle.dequantize(*quantized, expected)
    quantize.unpack_and_dequantize(packed, quantized[1].to(DEVICE), tables, out)
    assert torch.equal(out.cpu(), expected)


def test_nothing_kept_makes_no_bytes() -> None:
    params, packed, refused = quantize.quantize_and_pack(torch.empty(0, 5, device=DEVICE), tables_of(()))
    assert params.shape == (2, 0, 5)
    assert packed.shape == (0,)
    assert refused.tolist() == [0]
    quantize.unpack_and_dequantize(packed, params, tables_of(()), torch.empty(0, 5, device=DEVICE))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("coefficients", {"coefficients": torch.zeros(49, 9, dtype=torch.float64)}),
        ("coefficients", {"coefficients": torch.zeros(48, 9)}),
        ("coefficients", {"coefficients": torch.zeros(49)}),
        ("params", {"params": torch.zeros(2, 4, 10, dtype=torch.float16)}),
        ("params", {"params": torch.zeros(2, 4, 9, dtype=torch.int16)}),
        ("packed", {"packed": torch.zeros(5, dtype=torch.uint8)}),
        ("refused", {"refused": torch.zeros(2, dtype=torch.int32)}),
        ("refused", {"refused": torch.zeros(1, dtype=torch.bool)}),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(name: str, wrong: dict[str, torch.Tensor]) -> None:
    arguments: dict[str, Any] = {"coefficients": torch.zeros(49, 9), **wrong}
    arguments = {key: value.to(DEVICE) for key, value in arguments.items()}
    with pytest.raises(ConfigError, match=f"^{name} is "):
        quantize.quantize_and_pack(tables=tables_of(GROUPS), **arguments)


def test_the_decoder_refuses_tensors_that_do_not_fit_by_name() -> None:
    tables = tables_of(GROUPS)
    params, packed, _ = quantize.quantize_and_pack(torch.zeros(49, 9, device=DEVICE), tables)
    out = torch.empty(49, 9, device=DEVICE)
    for name, arguments in {
        "out": (packed, params, tables, out.double()),
        "params": (packed, params[..., :8], tables, out),
        "packed": (packed[1:], params, tables, out),
    }.items():
        with pytest.raises(ConfigError, match=f"^{name} is "):
            quantize.unpack_and_dequantize(*arguments)


def test_the_kernels_ran_and_not_their_oracle(
    record_launches: Callable[..., list[Any]], without_oracle: Callable[..., None]
) -> None:
    values, tables = coefficients_of(49, 9).to(DEVICE), tables_of(GROUPS)
    launched = record_launches(quantize, *KERNELS)
    without_oracle(GroupedQuantizer, "quantize", "dequantize")
    without_oracle(bitpack, "pack", "unpack")
    params, packed, _ = quantize.quantize_and_pack(values, tables)
    # One launch for each size of groups.
    assert [each.kernel for each in launched] == ["_quantize_and_pack"] * 2
    quantize.unpack_and_dequantize(packed, params, tables, torch.empty_like(values))
    assert [each.kernel for each in launched[2:]] == ["_unpack_and_dequantize"]
    assert all(each.options["enable_fp_fusion"] is False for each in launched)
    assert launch.IS_INTERPRETED is (DEVICE.type == "cpu")


@pytest.mark.parametrize(
    ("artifact", "module", "tables_type"),
    [
        (make_artifact(), quantize, quantize.GroupTables),
        (make_uniform_artifact(), uniform, uniform.LevelTables),
    ],
    ids=["grouped", "uniform"],
)
def test_frames_of_the_kernels_sections_are_those_of_the_codec(
    artifact: Artifact, module: Any, tables_type: Any, record_launches: Callable[..., list[Any]]
) -> None:
    config = CodecConfig()
    chunk = make_chunk(artifact, 37)
    expected = KVCodec(artifact, config).encode(chunk, FrameKind.CODED)
    assert expected.kind is FrameKind.CODED
    launched = record_launches(module, *KERNELS)
    positions = torch.arange(chunk.start_position, chunk.start_position + chunk.num_tokens)
    undo = Rotation(positions, artifact.rope, artifact.geometry.num_kv_heads, inverse=True)
    sections = {}
    for side, values, rotation in ((Side.K, chunk.keys, undo), (Side.V, chunk.values, None)):
        basis = artifact.basis(side)
        assert basis is not None
        dtype = compute_dtype(config, values.dtype)
        coding = SideCoding.from_plan(basis, artifact.plans[0].side(side), artifact.geometry.num_layers, dtype)
        coefficients = coding.transform.project(centred_features(values, coding, rotation))
        tables = tables_type.from_quantizer(coding.quantizer, DEVICE)
        params, packed, refused = module.quantize_and_pack(coefficients.to(DEVICE), tables)
        assert refused.tolist() == [0]
        params_id, symbols_id = CODED_SECTIONS[side]
        sections |= {params_id: params.cpu().numpy(), symbols_id: packed.cpu().numpy()}

        restored = coding.transform.empty_coefficients(chunk.num_tokens).T.contiguous().to(DEVICE)
        restored[:, : tables.num_components] = float("nan")
        module.unpack_and_dequantize(packed, params, tables, restored[:, : tables.num_components].T)
        symbols = bitpack.unpack(packed.cpu().numpy(), coding.quantizer.row_widths, chunk.num_tokens)
        assert torch.equal(restored.cpu(), token_coefficients(torch.from_numpy(symbols), params.cpu(), coding))
    written = write_frame(read_header(expected.frame), sections, config.coder, config.coder_level)
    assert written == expected.frame
    assert {each.kernel for each in launched} == set(KERNELS)
    assert all(each.options["enable_fp_fusion"] is False for each in launched)
