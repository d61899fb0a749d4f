"""Reading bytes of unknown origin, watched: which decoder is called with what, and how the outcome compares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import xxhash
from bitstream import plain_reader
from bitstream.plain_reader import INCOMPLETE_CODES, Refused

from sglang_kvtc.bitstream import entropy
from sglang_kvtc.bitstream.entropy import Coder
from sglang_kvtc.bitstream.frame import CHECKSUM_BYTES, read_frame
from sglang_kvtc.bitstream.header import FrameExpectation
from sglang_kvtc.errors import BitstreamError

STREAM_ERRORS = {"BitstreamError", "TruncatedFrame"}


@dataclass
class Decoders:
    """Calls of the entropy decoders so far."""

    calls: int = 0


def is_sealed(blob: bytes) -> bool:
    """Whether the last bytes are the checksum of those before."""
    return xxhash.xxh3_64_digest(blob[:-CHECKSUM_BYTES]) == blob[-CHECKSUM_BYTES:]


@contextmanager
def watched_decoders(max_section_bytes: int) -> Iterator[Decoders]:
    """Fail when an entropy decoder sees a byte of a frame whose checksum does not fit, or is asked for too much."""
    decode, seen = entropy.decode, Decoders()

    def watching(stored: memoryview, coder: Coder, raw_bytes: int) -> bytes | memoryview:
        frame = stored.obj
        assert isinstance(frame, bytes)
        assert is_sealed(frame), "a decoder saw unchecked bytes"
        assert raw_bytes <= max_section_bytes, f"{raw_bytes} bytes were asked for, the limit is {max_section_bytes}"
        seen.calls += 1
        return decode(stored, coder, raw_bytes)

    with mock.patch.object(entropy, "decode", watching):
        yield seen


def decoded(frame: bytes, wanted: FrameExpectation) -> dict[str, bytes] | str:
    """The sections by name, or the name of the error; any other exception is a bug and passes through."""
    try:
        opened = read_frame(frame, wanted)
        return {section.name: opened.section(section).tobytes() for section in opened.entries}
    except BitstreamError as error:
        assert str(error)
        return type(error).__name__


def plainly_decoded(frame: bytes, wanted: FrameExpectation) -> dict[str, bytes] | str:
    """What FORMAT.md says `decoded` should give."""
    try:
        return plain_reader.read(frame, wanted).sections
    except Refused as refused:
        return INCOMPLETE_CODES if refused.reason == INCOMPLETE_CODES else refused.error


def assert_same_outcome(found: dict[str, bytes] | str, expected: dict[str, bytes] | str) -> None:
    """Equal, but for two liberties of DEFLATE libraries: which of several faults of a stream they report, and whether
    they mind Huffman codes that are incomplete where the missing part is not used.
    """
    if expected == INCOMPLETE_CODES:
        assert isinstance(found, dict) or found in STREAM_ERRORS
    elif isinstance(found, str) and isinstance(expected, str):
        assert found == expected or {found, expected} == STREAM_ERRORS, f"refused with {found} instead of {expected}"
    else:
        assert found == expected
