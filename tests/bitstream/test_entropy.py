from __future__ import annotations

import importlib.util
import subprocess
import sys
import tracemalloc
import zlib

import numpy as np
import pyarrow
import pytest
from bitstream import plain_reader
from bitstream.sample_frames import CODERS, Sections, header

from sglang_kvtc.bitstream import entropy
from sglang_kvtc.bitstream.entropy import Coder, coder_by_id, coder_by_name, decode, encode
from sglang_kvtc.bitstream.frame import SectionId, open_frame, write_frame
from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.config import CodecConfig, from_table
from sglang_kvtc.errors import BitstreamError, ConfigError, TruncatedFrame, UnsupportedVersion

SIZES = (1, 33, 255, 4095, 65535, 65536, 65537, 300_001)
by_coder = pytest.mark.parametrize("coder", [Coder.DEFLATE, Coder.ZSTD], ids=lambda coder: coder.name)


def peaked(size: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.clip(np.random.default_rng(seed).normal(128, 20, size), 0, 255).astype(np.uint8)


def deflate(raw: bytes, level: int = 6, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> bytes:
    deflater = zlib.compressobj(level, zlib.DEFLATED, -15, 8, strategy)
    return deflater.compress(raw) + deflater.flush()


@by_coder
@pytest.mark.parametrize("level", [1, 6, 9])
@pytest.mark.parametrize("size", SIZES)
def test_a_bit_01_sizes_around_block_limits_round_trip(size: int, level: int, coder: Coder) -> None:
    for raw in (peaked(size), np.zeros(size, np.uint8), np.random.default_rng(size).integers(0, 256, size, np.uint8)):
        coded = encode(raw, coder, level)
        assert bytes(decode(memoryview(coded), coder, size)) == raw.tobytes()


@pytest.mark.parametrize("size", [0, 1, 33])
@pytest.mark.parametrize("coder", CODERS)
def test_a_bit_01_tiny_sections_are_clean_through_a_frame(size: int, coder: str) -> None:
    given: Sections = {SectionId.K_RAW: peaked(size), SectionId.V_RAW: np.zeros(size, np.uint8)}
    opened = open_frame(write_frame(header(FrameKind.RAW), given, coder, 6))
    for section, content in given.items():
        assert opened.section(section).tobytes() == bytes(memoryview(content))


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


def test_a_bit_08_libdeflate_agrees_on_a_thousand_sizes() -> None:
    libdeflate = pytest.importorskip("deflate", reason="libdeflate: pip install deflate")
    rng = np.random.default_rng(80)
    for trial in range(1000):
        raw = np.tile(peaked(int(rng.integers(1, 200)), trial), 15)[: int(rng.integers(1, 3000))]
        ours = encode(raw, Coder.DEFLATE, int(rng.integers(1, 10)))
        assert libdeflate.deflate_decompress(ours, raw.size) == raw.tobytes()
        theirs = bytes(libdeflate.deflate_compress(raw.tobytes(), int(rng.integers(1, 13))))
        assert bytes(decode(memoryview(theirs), Coder.DEFLATE, raw.size)) == raw.tobytes()


def test_a_bit_08_two_zstandard_libraries_agree_on_a_thousand_sizes() -> None:
    """Pyarrow has a build of its own."""
    rng = np.random.default_rng(81)
    for trial in range(1000):
        raw = np.tile(peaked(int(rng.integers(1, 200)), trial), 15)[: int(rng.integers(1, 3000))].tobytes()
        ours = encode(np.frombuffer(raw, np.uint8), Coder.ZSTD, int(rng.integers(1, 10)))
        assert plain_reader.decode_zstd(ours, len(raw)) == raw
        theirs = pyarrow.Codec("zstd", compression_level=int(rng.integers(1, 20))).compress(raw, asbytes=True)
        assert bytes(decode(memoryview(theirs), Coder.ZSTD, len(raw))) == raw


@by_coder
def test_coding_twice_gives_the_same_bytes(coder: Coder) -> None:
    for size in SIZES:
        assert encode(peaked(size), coder, 6) == encode(peaked(size), coder, 6)


def test_symbols_without_repeats_are_smaller_than_by_searching_matches() -> None:
    raw = peaked(300_000)
    assert len(encode(raw, Coder.DEFLATE, 6)) < len(deflate(raw.tobytes()))


def test_repeats_are_found_in_small_and_large_sections() -> None:
    for size in (10_000, 300_000):
        raw = np.tile(peaked(1000), size // 1000)
        assert len(encode(raw, Coder.DEFLATE, 6)) == len(deflate(raw.tobytes()))


@by_coder
@pytest.mark.parametrize("declared", [0, 1, 998, 999, 1001, 10_000])
def test_a_stream_of_another_length_than_declared_is_refused(declared: int, coder: Coder) -> None:
    coded = encode(peaked(1000), coder, 6)
    with pytest.raises(TruncatedFrame, match=f"table entry says {declared}"):
        decode(memoryview(coded), coder, declared)


@pytest.mark.parametrize("garbage", [b"\0", b"x" * 7, b"x" * 9, bytes(100)])
def test_bytes_after_a_stream_are_refused(garbage: bytes) -> None:
    coded = encode(peaked(1000), Coder.DEFLATE, 6)
    with pytest.raises(TruncatedFrame, match=f"{len(garbage)} bytes follow"):
        decode(memoryview(coded + garbage), Coder.DEFLATE, 1000)
    coded = encode(peaked(1000), Coder.ZSTD, 6)
    with pytest.raises(BitstreamError, match=f"{len(garbage)} bytes of unused data"):
        decode(memoryview(coded + garbage), Coder.ZSTD, 1000)


@by_coder
def test_a_cut_stream_is_refused_at_every_length(coder: Coder) -> None:
    coded = encode(peaked(300), coder, 6)
    for size in range(len(coded)):
        with pytest.raises(BitstreamError):
            decode(memoryview(coded)[:size], coder, 300)


def test_identity_needs_exactly_the_declared_bytes() -> None:
    assert bytes(decode(memoryview(b"abc"), Coder.IDENTITY, 3)) == b"abc"
    with pytest.raises(TruncatedFrame, match="has 3 bytes, its table entry says 4"):
        decode(memoryview(b"abc"), Coder.IDENTITY, 4)


def test_a_bit_03_invalid_streams_raise_and_neither_crash_nor_hang() -> None:
    """In a process of its own, so that a decoder that crashes or never comes back fails one test only."""
    program = """
import contextlib
import numpy as np
from sglang_kvtc.bitstream.entropy import Coder, decode, encode
from sglang_kvtc.errors import BitstreamError
rng = np.random.default_rng(3)
start = encode(np.arange(20, dtype=np.uint8) // 4, Coder.ZSTD, 1)[:6]
for coder, head in ((Coder.DEFLATE, b""), (Coder.ZSTD, start)):
    for _ in range(20_000):
        stored = head + rng.bytes(int(rng.integers(0, 40)))
        with contextlib.suppress(BitstreamError):
            assert len(decode(memoryview(stored), coder, 20)) == 20
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_zstandard_frame_with_a_dictionary_or_of_another_kind_is_refused() -> None:
    coded = bytearray(encode(peaked(1000), Coder.ZSTD, 6))
    coded[4:5] = bytes([coded[4] | 1, 7])
    with pytest.raises(BitstreamError, match="Dictionary"):
        decode(memoryview(coded), Coder.ZSTD, 1000)
    skippable = b"\x50\x2a\x4d\x18" + (1000).to_bytes(4, "little") + bytes(1000)
    with pytest.raises(BitstreamError, match="no Zstandard frame"):
        decode(memoryview(skippable), Coder.ZSTD, 1000)


@by_coder
@pytest.mark.parametrize(("really", "declared"), [(64 << 20, 1000), (1000, 2**32 - 1)])
def test_streams_and_sizes_that_lie_by_megabytes_cost_less_than_one(really: int, declared: int, coder: Coder) -> None:
    assert_refused_for_less_than_a_mebibyte(encode(np.zeros(really, np.uint8), coder, 6), coder, declared)


def test_a_zstandard_frame_too_short_for_the_size_it_announces_costs_nothing() -> None:
    announced = b"\x28\xb5\x2f\xfd\xe0" + (2**32 - 1).to_bytes(8, "little")
    assert plain_reader.zstd_header(announced)[0] == 2**32 - 1
    assert_refused_for_less_than_a_mebibyte(announced + bytes(1000), Coder.ZSTD, 2**32 - 1)


def assert_refused_for_less_than_a_mebibyte(coded: bytes, coder: Coder, declared: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TruncatedFrame):
            decode(memoryview(coded), coder, declared)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("coder", [Coder.GDEFLATE, Coder.ANS])
def test_reserved_coders_are_refused_by_name(coder: Coder) -> None:
    with pytest.raises(UnsupportedVersion, match=f"{coder.name} is reserved"):
        coder_by_id(coder)
    with pytest.raises(UnsupportedVersion, match=f"{coder.name} is reserved"):
        coder_by_name(coder.name.lower())


def test_unknown_coders_are_refused() -> None:
    with pytest.raises(UnsupportedVersion, match="coder id 5, expected one of identity, deflate, zstd"):
        coder_by_id(5)
    with pytest.raises(UnsupportedVersion, match="coder 'lzma', expected one of identity, deflate, zstd"):
        coder_by_name("lzma")


def test_without_its_package_zstandard_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entropy, "_HAS_ZSTANDARD", False)
    for refused in (lambda: coder_by_name("zstd"), lambda: coder_by_id(Coder.ZSTD)):
        with pytest.raises(UnsupportedVersion, match=r"needs the package zstandard: install sglang-kvtc\[zstd\]"):
            refused()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"^coder 'zstd' needs the package zstandard"):
        CodecConfig(coder="zstd")
    with pytest.raises(ConfigError, match=r"^kvtc\.toml: coder 'zstd' needs"):
        from_table({"codec": {"coder": "zstd"}}, "kvtc.toml")
    assert CodecConfig().coder == "deflate"


@pytest.mark.parametrize("coder", Coder, ids=lambda coder: coder.name)
def test_the_configuration_takes_the_coders_that_can_be_used(coder: Coder) -> None:
    table: dict[str, object] = {"codec": {"coder": coder.name.lower()}}
    if coder in entropy.SUPPORTED:
        assert coder_by_name(from_table(table, "kvtc.toml").codec.coder) is coder
    else:
        with pytest.raises(ConfigError, match=coder.name.lower()):
            from_table(table, "kvtc.toml")
