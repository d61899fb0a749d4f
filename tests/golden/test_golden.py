from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitstream import plain_reader
from bitstream.reading import decoded, plainly_decoded
from golden import sizes
from golden.make_golden import HERE, bad_frames, foreign_frames, good_frames

from sglang_kvtc.artifact.schema import Group, SidePlan
from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.bitstream.entropy import SUPPORTED
from sglang_kvtc.bitstream.frame import SectionId, open_frame, write_frame
from sglang_kvtc.bitstream.header import FrameExpectation, FrameKind
from sglang_kvtc.codec.uniform import UniformQuantizer
from sglang_kvtc.errors import BitstreamError

GOOD = sorted((HERE / "v1").glob("*.kvtc"))
BAD = sorted((HERE / "bad").glob("*.kvtc"))


def description(frame: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(frame.with_suffix(".json").read_text(encoding="utf-8"))
    return loaded


def test_every_case_of_the_script_has_its_fixture() -> None:
    assert [frame.stem for frame in GOOD] == sorted([*good_frames(), *foreign_frames()])
    assert [frame.stem for frame in BAD] == sorted(bad_frames())


@pytest.mark.parametrize("frame", GOOD, ids=lambda frame: frame.stem)
def test_golden_frame_decodes_to_what_was_written(frame: Path) -> None:
    expected = description(frame)
    opened = open_frame(frame.read_bytes())
    fields = expected["header"]
    assert opened.header.kind is FrameKind[fields["kind"]]
    for name in ("num_tokens", "start_position", "plan"):
        assert getattr(opened.header, name) == fields[name]
    for name in ("geometry_digest", "artifact_digest"):
        assert getattr(opened.header, name).hex() == fields[name]
    found = {section.name: opened.section(section).tobytes() for section in opened.entries}
    assert {name: raw.hex() for name, raw in found.items()} == expected["sections"]
    plain = plain_reader.read(frame.read_bytes())
    assert plain.sections == found
    assert {name: getattr(plain, name) for name in ("num_tokens", "start_position", "plan")} == {
        name: fields[name] for name in ("num_tokens", "start_position", "plan")
    }


@pytest.mark.parametrize("frame", [frame for frame in GOOD if "k_symbols" in description(frame)], ids=lambda f: f.stem)
def test_golden_symbols_unpack_to_what_was_quantised(frame: Path) -> None:
    expected = description(frame)
    widths = np.array(expected["k_widths"], np.uint8)
    rows = [np.frombuffer(bytes.fromhex(row), np.uint8) for row in expected["k_symbols"]]
    packed, num_tokens = open_frame(frame.read_bytes()).section(SectionId.K_SYMBOLS), expected["header"]["num_tokens"]
    np.testing.assert_array_equal(bitpack.unpack(packed, widths, num_tokens), rows)
    np.testing.assert_array_equal(plain_reader.unpack(packed.tobytes(), widths, num_tokens), rows)


def test_golden_coefficients_of_a_uniform_plan() -> None:
    path = HERE / "v1" / "coded_uniform.kvtc"
    expected = description(path)
    coefficients = np.array([[float.fromhex(value) for value in row] for row in expected["k_coefficients"]])
    assert len(set(coefficients.flat)) > 100
    plain = plain_reader.uniform_coefficients(
        plain_reader.read(path.read_bytes()), "K", expected["k_groups"], expected["k_step"]
    )
    np.testing.assert_array_equal(plain, coefficients)

    starts = np.cumsum([0, *(size for size, _ in expected["k_groups"])])
    groups = tuple(Group(int(at), *group) for at, group in zip(starts, expected["k_groups"], strict=False))
    plan = SidePlan(groups, 0.0, step=expected["k_step"])
    quantizer = UniformQuantizer.from_plan(plan, np.ones(starts[-1], np.float32))
    opened = open_frame(path.read_bytes())
    symbols = bitpack.unpack(opened.section(SectionId.K_SYMBOLS), quantizer.row_widths, coefficients.shape[1])
    codes = opened.section(SectionId.K_PARAMS).copy()
    decoded = torch.empty(coefficients.shape)
    quantizer.dequantize(torch.from_numpy(symbols), torch.from_numpy(codes), decoded)
    np.testing.assert_array_equal(decoded.double(), coefficients)


def test_golden_frames_cover_kinds_coders_widths_and_small_frames() -> None:
    opened = {frame.stem: open_frame(frame.read_bytes()) for frame in GOOD}
    for kind in FrameKind:
        frames = [frame for frame in opened.values() if frame.header.kind is kind]
        assert {0, 1} <= {frame.header.num_tokens for frame in frames}
        assert {entry.coder for frame in frames for entry in frame.entries.values()} == SUPPORTED
    widths = {width for frame in GOOD for width in description(frame).get("k_widths", ())}
    assert widths == set(range(bitpack.MAX_WIDTH + 1))
    errors = {description(frame)["error"] for frame in BAD}
    assert errors == {"BitstreamError", *(error.__name__ for error in BitstreamError.__subclasses__())}


def needs_the_library_of(coder: str) -> None:
    """Other libraries, and Zstandard's other releases, code to other bytes that decode to the same."""
    if coder == "deflate" and "zlib-ng" in zlib.ZLIB_RUNTIME_VERSION:
        pytest.skip("zlib-ng codes to other bytes than zlib")
    if coder == "zstd" and (found := sizes.versions()["zstd"]) != (made := sizes.read()["versions"]["zstd"]):
        pytest.skip(f"this is {found}, the fixtures were made by {made}")


@pytest.mark.parametrize("name", good_frames())
def test_a_change_of_written_bytes_shows_as_a_changed_fixture(name: str) -> None:
    wanted, content, coder, _ = good_frames()[name]
    needs_the_library_of(coder)
    assert write_frame(wanted, content, coder, 6) == (HERE / "v1" / f"{name}.kvtc").read_bytes()


@pytest.mark.parametrize("coder", sizes.LEVELS)
def test_a_change_of_size_shows_in_the_committed_table(coder: str) -> None:
    needs_the_library_of(coder)
    committed = sizes.read()["sizes"]
    for kind, found in sizes.frame_sizes().items():
        of_coder = {label: size for label, size in found.items() if label.startswith(f"{coder} ")}
        assert of_coder == {label: size for label, size in committed[kind].items() if label in of_coder}
        assert len(of_coder) == len(sizes.LEVELS[coder])
    assert [sorted(of_kind) for of_kind in committed.values()] == [sorted(found)] * len(FrameKind)


@pytest.mark.parametrize("frame", BAD, ids=lambda frame: frame.stem)
def test_bad_frame_is_refused_with_its_error(frame: Path) -> None:
    expected = description(frame)
    fields = expected["expected"]
    for name in ("geometry_digest", "artifact_digest"):
        fields[name] = bytes.fromhex(fields[name])
    fields["plans"] = tuple(fields["plans"])
    wanted = FrameExpectation(**fields)
    assert decoded(frame.read_bytes(), wanted) == expected["error"]
    assert plainly_decoded(frame.read_bytes(), wanted) == expected["error"]
