from __future__ import annotations

import contextlib
import tracemalloc
import zlib

import numpy as np
import pytest

from sglang_kvtc.bitstream.entropy import Coder, coder_by_id, coder_by_name, decode, encode
from sglang_kvtc.errors import BitstreamError, TruncatedFrame, UnsupportedVersion

SIZES = (1, 33, 255, 4095, 65535, 65536, 65537, 300_001)


def peaked(size: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.clip(np.random.default_rng(seed).normal(128, 20, size), 0, 255).astype(np.uint8)


def deflate(raw: bytes, level: int = 6, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> bytes:
    deflater = zlib.compressobj(level, zlib.DEFLATED, -15, 8, strategy)
    return deflater.compress(raw) + deflater.flush()


@pytest.mark.parametrize("level", [1, 6, 9])
@pytest.mark.parametrize("size", SIZES)
def test_a_bit_01_sizes_around_block_limits_round_trip(size: int, level: int) -> None:
    raw = peaked(size)
    coded = encode(raw, Coder.DEFLATE, level)
    assert bytes(decode(memoryview(coded), Coder.DEFLATE, size)) == raw.tobytes()


def test_a_bit_08_two_decoders_and_two_encoders_agree_on_a_thousand_sizes() -> None:
    rng = np.random.default_rng(8)
    strategies = (zlib.Z_DEFAULT_STRATEGY, zlib.Z_FILTERED, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE, zlib.Z_FIXED)
    for trial in range(1000):
        size = int(rng.integers(1, 3000))
        raw = np.tile(peaked(int(rng.integers(1, 200)), trial), 15)[:size].tobytes()
        ours = encode(np.frombuffer(raw, np.uint8), Coder.DEFLATE, int(rng.integers(1, 10)))
        assert zlib.decompress(ours, -15) == raw
        theirs = deflate(raw, int(rng.integers(0, 10)), strategies[trial % len(strategies)])
        assert bytes(decode(memoryview(theirs), Coder.DEFLATE, len(raw))) == raw


def test_coding_twice_gives_the_same_bytes() -> None:
    for size in SIZES:
        assert encode(peaked(size), Coder.DEFLATE, 6) == encode(peaked(size), Coder.DEFLATE, 6)


def test_symbols_without_repeats_are_smaller_than_by_searching_matches() -> None:
    raw = peaked(300_000)
    assert len(encode(raw, Coder.DEFLATE, 6)) < len(deflate(raw.tobytes()))


def test_repeats_are_found_in_small_and_large_sections() -> None:
    for size in (10_000, 300_000):
        raw = np.tile(peaked(1000), size // 1000)
        assert len(encode(raw, Coder.DEFLATE, 6)) == len(deflate(raw.tobytes()))


@pytest.mark.parametrize("declared", [0, 1, 998, 999, 1001, 10_000])
def test_a_stream_of_another_length_than_declared_is_refused(declared: int) -> None:
    coded = encode(peaked(1000), Coder.DEFLATE, 6)
    with pytest.raises(TruncatedFrame, match=f"its table entry says {declared}"):
        decode(memoryview(coded), Coder.DEFLATE, declared)


@pytest.mark.parametrize("garbage", [b"\0", b"x" * 7, b"x" * 9, bytes(100)])
def test_bytes_after_a_stream_are_refused(garbage: bytes) -> None:
    coded = encode(peaked(1000), Coder.DEFLATE, 6)
    with pytest.raises(TruncatedFrame, match=f"{len(garbage)} bytes follow"):
        decode(memoryview(coded + garbage), Coder.DEFLATE, 1000)


def test_a_cut_stream_is_refused_at_every_length() -> None:
    coded = encode(peaked(300), Coder.DEFLATE, 6)
    for size in range(len(coded)):
        with pytest.raises(BitstreamError):
            decode(memoryview(coded)[:size], Coder.DEFLATE, 300)


def test_identity_needs_exactly_the_declared_bytes() -> None:
    assert bytes(decode(memoryview(b"abc"), Coder.IDENTITY, 3)) == b"abc"
    with pytest.raises(TruncatedFrame, match="has 3 bytes, its table entry says 4"):
        decode(memoryview(b"abc"), Coder.IDENTITY, 4)


def test_invalid_streams_raise_and_never_crash() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20_000):
        stored = rng.bytes(int(rng.integers(0, 40)))
        with contextlib.suppress(BitstreamError):
            assert len(decode(memoryview(stored), Coder.DEFLATE, 20)) == 20


@pytest.mark.parametrize(("really", "declared"), [(64 << 20, 1000), (1000, 2**32 - 1)])
def test_streams_and_sizes_that_lie_by_megabytes_cost_less_than_one(really: int, declared: int) -> None:
    coded = memoryview(deflate(bytes(really)))
    tracemalloc.start()
    try:
        with pytest.raises(TruncatedFrame):
            decode(coded, Coder.DEFLATE, declared)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("coder", [Coder.GDEFLATE, Coder.ANS, Coder.ZSTD])
def test_reserved_coders_are_refused_by_name(coder: Coder) -> None:
    with pytest.raises(UnsupportedVersion, match=f"{coder.name} is reserved"):
        coder_by_id(coder)
    with pytest.raises(UnsupportedVersion, match=f"{coder.name} is reserved"):
        coder_by_name(coder.name.lower())


def test_unknown_coders_are_refused() -> None:
    with pytest.raises(UnsupportedVersion, match="coder id 5, expected one of identity, deflate"):
        coder_by_id(5)
    with pytest.raises(UnsupportedVersion, match="coder 'lzma', expected one of identity, deflate"):
        coder_by_name("lzma")
