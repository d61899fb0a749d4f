from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bitstream import plain_reader
from golden.make_golden import HERE, bad_frames, good_frames

import sglang_kvtc.errors
from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.bitstream.frame import SectionId, open_frame, read_frame, write_frame
from sglang_kvtc.bitstream.header import FrameExpectation, FrameKind
from sglang_kvtc.errors import BitstreamError

GOOD = sorted((HERE / "v1").glob("*.kvtc"))
BAD = sorted((HERE / "bad").glob("*.kvtc"))


def description(frame: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(frame.with_suffix(".json").read_text(encoding="utf-8"))
    return loaded


def test_every_case_of_the_script_has_its_fixture() -> None:
    assert [frame.stem for frame in GOOD] == sorted(good_frames())
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
    decoded = {section.name: opened.section(section).tobytes() for section in opened.entries}
    assert {name: raw.hex() for name, raw in decoded.items()} == expected["sections"]
    assert plain_reader.read(frame.read_bytes()).sections == decoded


@pytest.mark.parametrize("frame", [frame for frame in GOOD if "k_symbols" in description(frame)], ids=lambda f: f.stem)
def test_golden_symbols_unpack_to_what_was_quantised(frame: Path) -> None:
    expected = description(frame)
    widths = np.array(expected["k_widths"], np.uint8)
    rows = [np.frombuffer(bytes.fromhex(row), np.uint8) for row in expected["k_symbols"]]
    packed = open_frame(frame.read_bytes()).section(SectionId.K_SYMBOLS)
    np.testing.assert_array_equal(bitpack.unpack(packed, widths, expected["header"]["num_tokens"]), rows)


@pytest.mark.skipif("zlib-ng" in zlib.ZLIB_RUNTIME_VERSION, reason="zlib-ng codes to other bytes than zlib")
@pytest.mark.parametrize("name", good_frames())
def test_a_change_of_written_bytes_shows_as_a_changed_fixture(name: str) -> None:
    wanted, content, coder, _ = good_frames()[name]
    assert write_frame(wanted, content, coder, 6) == (HERE / "v1" / f"{name}.kvtc").read_bytes()


@pytest.mark.parametrize("frame", BAD, ids=lambda frame: frame.stem)
def test_bad_frame_is_refused_with_its_error(frame: Path) -> None:
    expected = description(frame)
    fields = expected["expected"]
    for name in ("geometry_digest", "artifact_digest"):
        fields[name] = bytes.fromhex(fields[name])
    with pytest.raises(BitstreamError) as caught:
        opened = read_frame(frame.read_bytes(), FrameExpectation(**fields))
        for section in opened.entries:
            opened.section(section)
    assert type(caught.value) is getattr(sglang_kvtc.errors, expected["error"])
