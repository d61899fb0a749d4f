from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from bitstream import plain_reader
from bitstream.sample_frames import ARTIFACT_DIGEST, CODERS, GEOMETRY_DIGEST, PLAN, Sections, frame, resealed
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.bitstream.frame import SECTIONS, open_frame, read_frame, verify, write_frame
from sglang_kvtc.bitstream.header import FrameExpectation, FrameHeader, FrameKind
from sglang_kvtc.bitstream.shuffle import ELEMENT_BYTES, shuffle, unshuffle
from sglang_kvtc.errors import BitstreamError

U32 = st.integers(0, 2**32 - 1)
WHOLE = tuple(frame(kind, tokens, coder=coder) for kind in FrameKind for tokens in (1, 24) for coder in CODERS)
SECTION_LIMIT = 1 << 16


@st.composite
def symbol_arrays(draw: st.DrawFn) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """(symbols, widths) of any widths in any order; runs of equal width are likely."""
    runs = draw(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 5)), max_size=8))
    widths = np.array([width for width, length in runs for _ in range(length)], np.uint8)
    num_tokens = draw(st.integers(0, 70))
    rng = np.random.default_rng(draw(U32))
    symbols = rng.integers(0, 1 << widths.astype(int)[:, None], (len(widths), num_tokens)).astype(np.uint8)
    return symbols, widths


@st.composite
def frames(draw: st.DrawFn) -> tuple[FrameHeader, Sections, str, int]:
    """Any header and any contents, compressible or not."""
    kind = draw(st.sampled_from(FrameKind))
    plan = draw(st.integers(1, 2**32 - 1)) if kind is FrameKind.CODED else 0
    geometry_digest, artifact_digest = (
        draw(st.binary(min_size=8, max_size=8)),
        draw(st.binary(min_size=16, max_size=16)),
    )
    header = FrameHeader(kind, draw(U32), draw(U32), geometry_digest, artifact_digest, plan)
    rng = np.random.default_rng(draw(U32))
    contents: Sections = {}
    for section in SECTIONS[kind]:
        dtype = draw(st.sampled_from(["u1", "<u2", "<u4"]))
        largest = draw(st.sampled_from([1, 20, 256]))
        contents[section] = rng.integers(0, largest, draw(st.integers(0, 3000))).astype(dtype)
    return header, contents, draw(st.sampled_from(CODERS)), draw(st.integers(1, 9))


def refuse_or_decode(damaged: bytes | bytearray) -> None:
    """Read everything a caller could ask for; only a BitstreamError may come out."""
    header = verify(damaged)
    expected = FrameExpectation(
        header.geometry_digest,
        header.artifact_digest,
        (header.plan,),
        header.start_position,
        header.num_tokens,
        SECTION_LIMIT,
    )
    opened = read_frame(damaged, expected)
    for section, entry in opened.entries.items():
        assert opened.section(section).size == entry.raw_bytes


@given(symbol_arrays())
def test_symbols_of_any_widths_round_trip_and_lie_as_specified(
    arrays: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]],
) -> None:
    symbols, widths = arrays
    packed = bitpack.pack(symbols, widths)
    assert packed.tobytes() == plain_reader.pack(symbols, widths)
    np.testing.assert_array_equal(bitpack.unpack(packed, widths, symbols.shape[1]), symbols)


@given(symbol_arrays(), st.binary())
def test_unpacking_any_bytes_gives_symbols_in_range_or_an_error(
    arrays: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], noise: bytes
) -> None:
    symbols, widths = arrays
    size = bitpack.packed_bytes(widths, symbols.shape[1])
    packed = np.resize(np.frombuffer(noise, np.uint8), size) if noise else np.zeros(size, np.uint8)
    unpacked = bitpack.unpack(packed, widths, symbols.shape[1])
    assert not (unpacked >> np.minimum(widths, 7)[:, None])[widths < 8].any()
    np.testing.assert_array_equal(unpacked, plain_reader.unpack(packed.tobytes(), widths, symbols.shape[1]))


@given(st.binary(max_size=500), st.sampled_from(ELEMENT_BYTES))
def test_byte_planes_are_inverted_exactly(noise: bytes, element_bytes: int) -> None:
    elements = np.frombuffer(noise, np.uint8)[: len(noise) // element_bytes * element_bytes]
    np.testing.assert_array_equal(unshuffle(shuffle(elements, element_bytes), element_bytes), elements)


@given(frames())
def test_any_frame_is_written_twice_the_same_and_read_by_two_readers(
    case: tuple[FrameHeader, Sections, str, int],
) -> None:
    header, contents, coder, level = case
    written = write_frame(header, contents, coder, level)
    assert write_frame(header, contents, coder, level) == written
    opened, plain = open_frame(written), plain_reader.read(written)
    assert opened.header == header
    for field in ("kind", "num_tokens", "start_position", "plan", "geometry_digest", "artifact_digest"):
        assert getattr(plain, field) == getattr(header, field)
    for section, content in contents.items():
        assert opened.section(section).tobytes() == np.asarray(content).tobytes() == plain.sections[section.name]
    raw_bytes = sum(np.asarray(content).nbytes for content in contents.values())
    assert len(written) <= raw_bytes + 100


@given(st.sampled_from(WHOLE), st.data())
def test_any_changed_bytes_are_refused(whole: bytes, data: st.DataObject) -> None:
    damaged = bytearray(whole)
    offsets = st.integers(0, len(whole) - 1)
    for offset, flip in data.draw(st.dictionaries(offsets, st.integers(1, 255), min_size=1, max_size=20)).items():
        damaged[offset] ^= flip
    with pytest.raises(BitstreamError):
        verify(damaged)


@given(st.sampled_from(WHOLE), st.data())
def test_any_truncation_is_refused(whole: bytes, data: st.DataObject) -> None:
    with pytest.raises(BitstreamError):
        verify(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.sampled_from(WHOLE), st.binary(min_size=1, max_size=300))
def test_any_bytes_before_or_after_a_frame_are_refused(whole: bytes, garbage: bytes) -> None:
    with pytest.raises(BitstreamError):
        verify(whole + garbage)
    if not garbage.startswith(b"KVTC"):
        with pytest.raises(BitstreamError):
            verify(garbage + whole)


@given(st.lists(st.sampled_from(WHOLE), min_size=2, max_size=2, unique=True), st.data())
def test_any_mixture_of_two_frames_is_refused(pair: list[bytes], data: st.DataObject) -> None:
    first, second = pair
    cut = data.draw(st.integers(1, min(len(first), len(second)) - 1))
    mixed = first[:cut] + second[cut:]
    if mixed not in pair:
        with pytest.raises(BitstreamError):
            verify(mixed)


@given(st.binary(max_size=400))
def test_any_other_bytes_are_refused(noise: bytes) -> None:
    for blob in (noise, b"KVTC\x01" + noise):
        with pytest.raises(BitstreamError):
            verify(blob)


@given(st.sampled_from(WHOLE), st.data())
def test_a_wrong_writer_under_a_fitting_checksum_is_refused_or_decodes_to_the_declared_sizes(
    whole: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(whole)
    offsets = st.one_of(st.integers(0, min(91, len(whole) - 9)), st.integers(0, len(whole) - 9))
    for offset, value in data.draw(st.dictionaries(offsets, st.integers(0, 255), min_size=1, max_size=8)).items():
        damaged[offset] = value
    try:
        refuse_or_decode(resealed(damaged))
    except BitstreamError as error:
        assert str(error)


@given(st.sampled_from(FrameKind), st.integers(0, 24), U32)
def test_a_frame_is_read_only_at_its_own_position(kind: FrameKind, num_tokens: int, position: int) -> None:
    written = frame(kind, num_tokens, position)
    expected = FrameExpectation(GEOMETRY_DIGEST, ARTIFACT_DIGEST, (PLAN,), position, num_tokens, SECTION_LIMIT)
    read_frame(written, expected)
    for other in (position + 1, position - 1):
        with pytest.raises(BitstreamError):
            read_frame(written, dataclasses.replace(expected, start_position=other))
