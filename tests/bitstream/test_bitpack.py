from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from bitstream import plain_reader

from sglang_kvtc.artifact.schema import GROUP_SIZES
from sglang_kvtc.bitstream.bitpack import MAX_WIDTH, pack, packed_bytes, unpack
from sglang_kvtc.errors import BitstreamError, TruncatedFrame

TOKENS = (1, 3, 7, 8, 9, 16, 61, 64)


def assert_packs(symbols: npt.NDArray[np.uint8], widths: npt.NDArray[np.uint8]) -> None:
    packed = pack(symbols, widths)
    assert packed.tobytes() == plain_reader.pack(symbols, widths)
    assert packed.size == packed_bytes(widths, symbols.shape[1])
    np.testing.assert_array_equal(unpack(packed, widths, symbols.shape[1]), symbols)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("width", range(MAX_WIDTH + 1))
def test_a_num_06_every_width_and_group_size_round_trips(width: int, group_size: int) -> None:
    rng = np.random.default_rng(width)
    widths = np.full(group_size, width, np.uint8)
    shape = (group_size, 13)
    largest = (1 << width) - 1
    assert_packs(rng.integers(0, 1 << width, shape).astype(np.uint8), widths)
    assert_packs(np.zeros(shape, np.uint8), widths)
    assert_packs(np.full(shape, largest, np.uint8), widths)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_a_num_06_mixed_widths_of_one_plan_round_trip(num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    widths = np.concatenate([np.repeat(np.arange(8, -1, -1), 16), rng.integers(0, 9, 64)]).astype(np.uint8)
    symbols = rng.integers(0, 1 << widths.astype(int)[:, None], (len(widths), num_tokens)).astype(np.uint8)
    assert_packs(symbols, widths)


def test_bits_lie_where_the_format_says() -> None:
    symbols = np.array([[5, 0, 7], [1, 2, 3]], np.uint8)
    assert pack(symbols, np.array([3, 2], np.uint8)).tobytes() == bytes.fromhex("c50139")


def test_components_of_width_zero_take_no_bytes_and_decode_to_zeros() -> None:
    widths = np.zeros(5, np.uint8)
    assert pack(np.zeros((5, 9), np.uint8), widths).size == 0
    np.testing.assert_array_equal(unpack(np.zeros(0, np.uint8), widths, 9), np.zeros((5, 9), np.uint8))


@pytest.mark.parametrize(("components", "tokens"), [(0, 0), (0, 5), (5, 0)])
def test_nothing_packs_to_nothing(components: int, tokens: int) -> None:
    assert_packs(np.zeros((components, tokens), np.uint8), np.full(components, 3, np.uint8))


def test_unpacked_symbols_are_contiguous_and_writable() -> None:
    unpacked = unpack(np.zeros(6, np.uint8), np.array([3, 3], np.uint8), 8)
    assert unpacked.flags.c_contiguous
    assert unpacked.flags.writeable


def test_strided_symbols_and_read_only_bytes_are_accepted() -> None:
    rng = np.random.default_rng(0)
    widths = np.array([8, 8, 3, 3, 1], np.uint8)
    symbols = rng.integers(0, 2, (24, 10)).astype(np.uint8)[:, ::2].T
    packed = np.frombuffer(pack(symbols, widths).tobytes(), np.uint8)
    np.testing.assert_array_equal(unpack(packed, widths, 24), symbols)


def test_padding_bits_are_ignored() -> None:
    widths = np.array([3], np.uint8)
    np.testing.assert_array_equal(unpack(np.array([0xFD], np.uint8), widths, 2), [[5, 7]])
    np.testing.assert_array_equal(unpack(np.array([0x3D], np.uint8), widths, 2), [[5, 7]])


@pytest.mark.parametrize("size", [0, 5, 7, 100])
def test_unpack_refuses_data_of_another_length(size: int) -> None:
    with pytest.raises(TruncatedFrame, match=rf"have {size} bytes, widths and tokens need 6"):
        unpack(np.zeros(size, np.uint8), np.array([3, 3], np.uint8), 8)


def test_a_num_06_widths_the_format_does_not_know_are_refused() -> None:
    with pytest.raises(BitstreamError, match="bit width 9"):
        pack(np.zeros((1, 8), np.uint8), np.array([9], np.uint8))
    with pytest.raises(BitstreamError, match="bit width 255"):
        unpack(np.zeros(8, np.uint8), np.array([255], np.uint8), 8)


def test_symbols_that_do_not_fit_their_width_are_refused_instead_of_cut() -> None:
    with pytest.raises(BitstreamError, match=r"symbol 8 in components 1\.\.2 does not fit 3 bits"):
        pack(np.array([[15], [7], [8]], np.uint8), np.array([4, 3, 3], np.uint8))
    with pytest.raises(BitstreamError, match="does not fit 0 bits"):
        pack(np.ones((1, 1), np.uint8), np.array([0], np.uint8))


def test_widths_and_symbols_must_agree() -> None:
    with pytest.raises(BitstreamError, match="2 bit widths for 3 components"):
        pack(np.zeros((3, 4), np.uint8), np.array([1, 1], np.uint8))
