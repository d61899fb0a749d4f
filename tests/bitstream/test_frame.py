from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from bitstream import plain_reader
from bitstream.sample_frames import (
    CODERS,
    K_WIDTHS,
    PLAN,
    Sections,
    expectation,
    frame,
    header,
    resealed,
    sections,
    symbols,
)

import sglang_kvtc.bitstream
from sglang_kvtc.bitstream import bitpack, entropy
from sglang_kvtc.bitstream.entropy import Coder
from sglang_kvtc.bitstream.frame import (
    CHECKSUM_BYTES,
    ENTRY_BYTES,
    SECTIONS,
    SectionId,
    code_section,
    open_frame,
    read_frame,
    read_header,
    verify,
    write_frame,
)
from sglang_kvtc.bitstream.header import HEADER_BYTES, FrameKind
from sglang_kvtc.errors import BitstreamError, ChecksumMismatch, GeometryMismatch, TruncatedFrame, UnsupportedVersion

COUNT_AT, VERSION_AT, KIND_AT, FLAGS_AT = 6, 4, 5, 7
LARGEST_OVERHEAD_BYTES = 127


def forbid_coders(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a coder saw the data")

    monkeypatch.setattr(entropy, "encode", refuse)
    monkeypatch.setattr(entropy, "decode", refuse)


def content(array_or_bytes: object) -> bytes:
    return array_or_bytes if isinstance(array_or_bytes, bytes) else np.asarray(array_or_bytes).tobytes()


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("kind", FrameKind)
def test_sections_come_back_byte_for_byte_and_a_second_reader_agrees(kind: FrameKind, coder: str) -> None:
    given = sections(kind)
    written = write_frame(header(kind), given, coder, 6)
    opened = read_frame(written, expectation(written))
    assert opened.header == header(kind) == verify(written) == read_header(written)
    plain = plain_reader.read(written)
    for section in SECTIONS[kind]:
        assert opened.section(section).tobytes() == content(given[section]) == plain.sections[section.name]


@pytest.mark.parametrize("kind", FrameKind)
def test_writing_twice_gives_the_same_bytes(kind: FrameKind) -> None:
    assert frame(kind) == frame(kind)


def test_symbols_survive_the_whole_way() -> None:
    given = symbols(np.random.default_rng(1), K_WIDTHS, 24)
    packed = {**sections(FrameKind.CODED), SectionId.K_SYMBOLS: bitpack.pack(given, K_WIDTHS)}
    written = write_frame(header(FrameKind.CODED), packed, "deflate", 6)
    stored = read_frame(written, expectation(written)).section(SectionId.K_SYMBOLS)
    np.testing.assert_array_equal(bitpack.unpack(stored, K_WIDTHS, 24), given)


@pytest.mark.parametrize("kind", FrameKind)
def test_header_table_and_checksum_stay_small(kind: FrameKind) -> None:
    empty: Sections = dict.fromkeys(SECTIONS[kind], b"")
    assert len(write_frame(header(kind, 0), empty, "deflate", 6)) <= LARGEST_OVERHEAD_BYTES


def test_deflate_shrinks_byte_planes_of_floats() -> None:
    floats = np.linspace(1, 1.5, 4096, dtype="<f2")
    given: Sections = {SectionId.K_RAW: floats, SectionId.V_RAW: floats.tobytes()}
    entries = open_frame(write_frame(header(FrameKind.RAW), given, "deflate", 6)).entries
    assert entries[SectionId.K_RAW].element_bytes == 2
    assert entries[SectionId.K_RAW].stored_bytes < entries[SectionId.V_RAW].stored_bytes


@pytest.mark.parametrize("kind", FrameKind)
def test_a_bit_03_empty_sections_never_meet_a_coder(kind: FrameKind, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_coders(monkeypatch)
    empty: Sections = dict.fromkeys(SECTIONS[kind], b"")
    written = write_frame(header(kind, 0), empty, "deflate", 6)
    opened = read_frame(written, expectation(written))
    assert all(opened.section(section).size == 0 for section in SECTIONS[kind])


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
@pytest.mark.parametrize("kind", [FrameKind.RAW, FrameKind.CODED])
def test_a_shape_04_frames_of_no_and_few_tokens_are_exact(kind: FrameKind, num_tokens: int) -> None:
    given = sections(kind, num_tokens)
    written = frame(kind, num_tokens)
    opened = read_frame(written, expectation(written))
    assert opened.header.num_tokens == num_tokens
    assert all(opened.section(section).tobytes() == content(given[section]) for section in SECTIONS[kind])


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("size", [1, 33, 4096, 65535, 65536, 100_000])
def test_a_bit_05_incompressible_sections_are_stored_as_they_are(size: int, coder: str) -> None:
    noise = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    given: Sections = {SectionId.K_RAW: noise, SectionId.V_RAW: b""}
    written = write_frame(header(FrameKind.RAW), given, coder, 9)
    opened = open_frame(written)
    assert opened.entries[SectionId.K_RAW].coder is Coder.IDENTITY
    assert len(written) == HEADER_BYTES + 2 * ENTRY_BYTES + size + CHECKSUM_BYTES
    np.testing.assert_array_equal(opened.section(SectionId.K_RAW), noise)


@pytest.mark.parametrize("coder", ["deflate", "zstd"])
def test_a_bit_05_no_section_grows_around_the_size_where_coding_starts_to_pay(coder: str) -> None:
    """Noise after a run of zeros: streams are a byte shorter than the section, of the same size, and a byte longer."""
    rng, growths = np.random.default_rng(5), set()
    for trial in range(300):
        noise = rng.integers(0, 256, 300, np.uint8)
        noise[: trial % 60] = 0
        growth = len(entropy.encode(noise, Coder[coder.upper()], 6)) - noise.size
        growths.add(growth)
        coded = code_section(SectionId.K_RAW, noise, coder, 6)
        assert coded.entry.coder is (Coder[coder.upper()] if growth < 0 else Coder.IDENTITY)
        assert len(coded.stored) == coded.entry.stored_bytes == noise.size + min(growth, 0)
    assert {-1, 0, 1} <= growths


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("kind", FrameKind)
def test_a_bit_05_reading_and_writing_touch_no_byte_beside_the_frame(kind: FrameKind, coder: str) -> None:
    given, canary = sections(kind), b"\xa5" * 4096
    before = {section: content(given[section]) for section in given}
    written = write_frame(header(kind), given, coder, 6)
    arena = bytearray(canary + written + canary)
    opened = read_frame(memoryview(arena)[len(canary) : -len(canary)], expectation(written))
    assert {section: opened.section(section).tobytes() for section in given} == before
    assert arena == canary + written + canary
    assert {section: content(given[section]) for section in given} == before


@pytest.mark.parametrize("kind", FrameKind)
def test_a_frame_needs_exactly_the_sections_of_its_kind(kind: FrameKind) -> None:
    given = sections(kind)
    missing = dict(list(given.items())[1:])
    foreign = SectionId.K_RAW if kind is not FrameKind.RAW else SectionId.K_FP8
    for wrong in (missing, {**given, foreign: b"x"}, {}):
        with pytest.raises(BitstreamError, match=f"a {kind.name} frame has"):
            write_frame(header(kind), wrong, "deflate", 6)


def test_elements_of_other_sizes_are_refused() -> None:
    given: Sections = {SectionId.K_RAW: np.zeros(4, np.float64), SectionId.V_RAW: b""}
    with pytest.raises(BitstreamError, match="K_RAW: float64"):
        write_frame(header(FrameKind.RAW), given, "deflate", 6)


@pytest.mark.parametrize("coder", ["gdeflate", "ans", "lzma"])
def test_coders_this_version_lacks_are_refused_by_name(coder: str) -> None:
    with pytest.raises(UnsupportedVersion, match=f"(?i){coder}"):
        write_frame(header(FrameKind.RAW), sections(FrameKind.RAW), coder, 6)


def test_a_bit_02_every_flipped_bit_is_found_before_a_decoder_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = [frame(kind, num_tokens) for kind in FrameKind for num_tokens in (1, 24)]
    forbid_coders(monkeypatch)
    rng = np.random.default_rng(2)
    for trial in range(2000):
        damaged = bytearray(blobs[trial % len(blobs)])
        bit = int(rng.integers(8 * len(damaged)))
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BitstreamError):
            verify(damaged)


@pytest.mark.parametrize("kind", FrameKind)
def test_a_bit_09_cut_frames_are_truncated_frames(kind: FrameKind) -> None:
    whole = frame(kind)
    for sixteenth in range(16):
        with pytest.raises(TruncatedFrame):
            verify(whole[: len(whole) * sixteenth // 16])


@pytest.mark.parametrize("garbage", [b"\0", b"garbage", bytes(4096)])
def test_a_bit_09_trailing_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(TruncatedFrame):
        verify(frame(FrameKind.CODED) + garbage)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_a_bit_09_other_versions_are_refused_by_number(version: int) -> None:
    other = bytearray(frame(FrameKind.CODED))
    other[VERSION_AT] = version
    with pytest.raises(UnsupportedVersion, match=f"version {version}, this reader knows 1"):
        verify(resealed(other))


def test_a_bit_09_swapped_blobs_and_swapped_halves_are_refused() -> None:
    first, second = frame(FrameKind.CODED, seed=1), frame(FrameKind.CODED, start_position=536, seed=2)
    with pytest.raises(GeometryMismatch, match="start_position"):
        read_frame(second, expectation(first))
    short, long = frame(FrameKind.RAW, seed=3), frame(FrameKind.RAW, seed=4)
    half = len(short) // 2
    with pytest.raises((ChecksumMismatch, TruncatedFrame)):
        verify(short[:half] + long[half:])


def test_a_bit_10_one_bad_frame_of_a_batch_spoils_no_other() -> None:
    batch = [bytearray(frame(FrameKind.CODED, seed=seed)) for seed in range(32)]
    batch[17][100] ^= 1
    refused = []
    for seed, blob in enumerate(batch):
        try:
            opened = read_frame(blob, expectation(header(FrameKind.CODED)))
        except BitstreamError:
            refused.append(seed)
            continue
        expected = sections(FrameKind.CODED, seed=seed)[SectionId.K_SYMBOLS]
        assert opened.section(SectionId.K_SYMBOLS).tobytes() == content(expected)
    assert refused == [17]


def test_files_that_are_no_frames_are_refused() -> None:
    for other in (b"", b"KVTC", b"\x80\x04K\x01.", b"PK\x03\x04" + bytes(200), bytes(200)):
        with pytest.raises(BitstreamError):
            verify(other)


@pytest.mark.parametrize("field", ["geometry_digest", "artifact_digest", "start_position", "num_tokens"])
def test_a_frame_of_something_else_is_refused_by_the_field_that_differs(field: str) -> None:
    written = frame(FrameKind.CODED)
    expected = expectation(written)
    value = getattr(expected, field)
    other = value[::-1] if isinstance(value, bytes) else value + 1
    with pytest.raises(GeometryMismatch, match=f"^{field} of the frame is"):
        read_frame(written, dataclasses.replace(expected, **{field: other}))


@pytest.mark.parametrize("plans", [(), (PLAN + 1,), (PLAN + 1, PLAN + 2)])
def test_a_frame_of_another_plan_is_refused_and_one_of_several_accepted(plans: tuple[int, ...]) -> None:
    written = frame(FrameKind.CODED)
    wanted = dataclasses.replace(expectation(written), plans=plans)
    with pytest.raises(GeometryMismatch, match=r"^plan of the frame is"):
        read_frame(written, wanted)
    read_frame(written, dataclasses.replace(wanted, plans=(*plans, PLAN)))


@pytest.mark.parametrize("kind", [FrameKind.RAW, FrameKind.FP8])
def test_raw_and_fp8_frames_serve_every_plan_of_the_artifact(kind: FrameKind) -> None:
    written = frame(kind)
    read_frame(written, dataclasses.replace(expectation(written), plans=(PLAN + 1,)))


def test_sections_larger_than_the_model_allows_are_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    written = frame(FrameKind.CODED)
    forbid_coders(monkeypatch)
    largest = max(entry.raw_bytes for entry in open_frame(written).entries.values())
    read_frame(written, dataclasses.replace(expectation(written), max_section_bytes=largest))
    with pytest.raises(GeometryMismatch, match=f"declares {largest} bytes, at most {largest - 1} fit"):
        read_frame(written, dataclasses.replace(expectation(written), max_section_bytes=largest - 1))


@pytest.mark.parametrize("kind", FrameKind)
@pytest.mark.parametrize("coder", [Coder.DEFLATE, Coder.ZSTD], ids=lambda coder: coder.name)
@pytest.mark.parametrize("announced", [2**31, 2**32 - 4])
def test_a_header_that_announces_gigabytes_allocates_nothing(kind: FrameKind, coder: Coder, announced: int) -> None:
    """In any field: tokens in the header, the decoded size of any section in the table."""
    whole = frame(kind, coder=coder.name.lower())
    wanted, small = expectation(whole), 1 << 16
    liars = [whole[:8] + announced.to_bytes(4, "little") + whole[12:]]
    for row in range(HEADER_BYTES, HEADER_BYTES + ENTRY_BYTES * len(SECTIONS[kind]), ENTRY_BYTES):
        liar = bytearray(whole)
        liar[row + 1], liar[row + 4 : row + 8] = coder, announced.to_bytes(4, "little")
        liars.append(bytes(liar))
    for liar in map(resealed, liars):
        tracemalloc.start()
        try:
            with pytest.raises(GeometryMismatch):
                read_frame(liar, wanted)
            assert tracemalloc.get_traced_memory()[1] < small
            # Inspection has no model to compare with: then it is the decoders that must not believe the table.
            for section, entry in open_frame(liar).entries.items():
                if entry.raw_bytes == announced:
                    with pytest.raises(BitstreamError):
                        open_frame(liar).section(section)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("offset", "value", "error", "message"),
    [
        (FLAGS_AT, 1, UnsupportedVersion, "header flags 0x01"),
        (KIND_AT, 3, UnsupportedVersion, r"kind 3, this reader knows 0 \(RAW\)"),
        (KIND_AT, FrameKind.RAW, GeometryMismatch, "only CODED frames have a plan"),
        (COUNT_AT, 3, TruncatedFrame, "its table says"),
        (COUNT_AT, 255, TruncatedFrame, "table of 255 sections"),
        (HEADER_BYTES, SectionId.K_SYMBOLS, UnsupportedVersion, "got section ids"),
        (HEADER_BYTES, 77, UnsupportedVersion, "got section ids"),
        (HEADER_BYTES + 1, Coder.GDEFLATE, UnsupportedVersion, "GDEFLATE is reserved"),
        (HEADER_BYTES + 1, Coder.ANS, UnsupportedVersion, "ANS is reserved"),
        (HEADER_BYTES + 1, 9, UnsupportedVersion, "coder id 9"),
        (HEADER_BYTES + 2, 3, UnsupportedVersion, "in elements of 3"),
        (HEADER_BYTES + 3, 1, UnsupportedVersion, "K_PARAMS has flags 0x01"),
        (HEADER_BYTES + 4, 1, UnsupportedVersion, "in elements of 2"),
        (HEADER_BYTES + 5, 0, TruncatedFrame, "K_PARAMS is coded, but has"),
        (HEADER_BYTES + 8, 255, TruncatedFrame, "its table says"),
    ],
)
def test_wrong_writers_are_found_out_under_a_fitting_checksum(
    offset: int, value: int, error: type[BitstreamError], message: str
) -> None:
    wrong = bytearray(frame(FrameKind.CODED))
    assert wrong[offset] != value
    wrong[offset] = value
    with pytest.raises(error, match=message):
        verify(resealed(wrong))


def test_a_section_that_decodes_to_another_size_is_refused_when_it_is_read() -> None:
    wrong = bytearray(frame(FrameKind.CODED))
    entry = open_frame(bytes(wrong)).entries[SectionId.K_PARAMS]
    assert entry.coder is Coder.DEFLATE
    wrong[HEADER_BYTES + 4 : HEADER_BYTES + 8] = (entry.raw_bytes + 2).to_bytes(4, "little")
    opened = open_frame(resealed(wrong))
    with pytest.raises(TruncatedFrame, match="inflates to"):
        opened.section(SectionId.K_PARAMS)


def test_frames_are_read_from_any_kind_of_buffer() -> None:
    written = frame(FrameKind.RAW)
    arena = bytearray(100) + written + bytes(100)
    assert verify(memoryview(arena)[100:-100]) == verify(bytearray(written)) == verify(written)


def test_a_section_of_another_kind_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        open_frame(frame(FrameKind.RAW)).section(SectionId.K_SYMBOLS)


def test_the_worked_example_of_the_format_is_a_valid_frame() -> None:
    specification = (Path(sglang_kvtc.bitstream.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")
    example = bytes.fromhex(re.findall(r"```\n([0-9a-f \n]+)```", specification)[0])
    opened = open_frame(example)
    assert dataclasses.replace(header(FrameKind.CODED), num_tokens=3, start_position=7) == opened.header
    params = opened.section(SectionId.K_PARAMS).view("<f2").reshape(2, 1, 3)
    packed = opened.section(SectionId.K_SYMBOLS)
    coefficients = params[0] + params[1] * bitpack.unpack(packed, np.array([3, 2], np.uint8), 3)
    assert coefficients.tolist() == [[3.5, 2.0, 3.875], [1.5, 2.5, 3.375]]
    assert opened.section(SectionId.V_PARAMS).size == opened.section(SectionId.V_SYMBOLS).size == 0


def test_the_bitstream_loads_neither_torch_nor_sglang() -> None:
    program = (
        "import sys, sglang_kvtc.bitstream.frame, sglang_kvtc.bitstream.bitpack\n"
        "sys.exit(bool({'torch', 'sglang'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
