"""Ten thousand damaged frames, drawn the same way in every run, and the same reading as a fuzzer does it."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from bitstream.mutations import mutated
from bitstream.reading import assert_same_outcome, decoded, is_sealed, plainly_decoded, watched_decoders
from bitstream.sample_frames import CODERS, GEOMETRY, expectation, frame, resealed
from codec.toy_model import make_artifact, make_chunk, make_uniform_artifact

from sglang_kvtc.artifact.schema import Artifact
from sglang_kvtc.bitstream.header import FrameKind, max_section_bytes
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.errors import BitstreamError
from sglang_kvtc.types import TokenRange

TOKENS = 24
WHOLE = [frame(kind, tokens, coder=coder) for kind in FrameKind for tokens in (0, 1, TOKENS) for coder in CODERS]
NAMED = {"TruncatedFrame", "UnsupportedVersion", "ChecksumMismatch", "GeometryMismatch", "BitstreamError"}


def peak_bytes(blob: bytes, of: bytes) -> tuple[dict[str, bytes] | str, int]:
    """What reading `blob` in place of `of` gives, and the most memory it took."""
    wanted = expectation(of)
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    outcome = decoded(blob, wanted)
    return outcome, tracemalloc.get_traced_memory()[1] - before


def test_a_bit_02_ten_thousand_damaged_frames_are_refused_by_name_or_decode_within_bounds() -> None:
    rng, outcomes = random.Random(2), Counter[str]()
    section_limit = max_section_bytes(GEOMETRY, TOKENS)
    tracemalloc.start()
    try:
        # A section lies in the decoder's buffer and once more as elements; all else, reading a whole frame needs too.
        memory_limit = max(peak_bytes(whole, whole)[1] for whole in WHOLE) + 2 * section_limit
        with watched_decoders(section_limit) as decoders:
            for _ in range(10_000):
                whole, damaged = mutated(rng, WHOLE)
                called_before = decoders.calls
                outcome, taken = peak_bytes(damaged, whole)
                assert taken <= memory_limit
                if not is_sealed(damaged):
                    assert isinstance(outcome, str), "damaged bytes were decoded"
                    assert decoders.calls == called_before
                assert_same_outcome(outcome, plainly_decoded(damaged, expectation(whole)))
                outcomes[outcome if isinstance(outcome, str) else "decoded"] += 1
    finally:
        tracemalloc.stop()
    assert outcomes.keys() == {*NAMED, "decoded"}
    # The draw must go on reaching what lies behind the checksum.
    assert outcomes["ChecksumMismatch"] < 5000
    assert decoders.calls > 1000


@pytest.mark.parametrize("kind", FrameKind)
@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("make", [make_artifact, make_uniform_artifact], ids=["grouped", "uniform"])
def test_wrong_writers_get_tensors_of_the_right_shape_or_a_named_error(
    kind: FrameKind, coder: str, make: Callable[[], Artifact]
) -> None:
    """The whole decoder, up to one layer of keys and values."""
    artifact = make()
    codec = KVCodec(artifact, CodecConfig(coder=coder))
    chunk = make_chunk(artifact, 20)
    whole = codec.encode(chunk, kind).frame
    rng, opened = random.Random(f"{kind} {coder}"), 0
    for _ in range(300):
        _, damaged = mutated(rng, [whole])
        try:
            decoder = codec.open(resealed(damaged), chunk.start_position, 20)
        except BitstreamError:
            continue
        opened += 1
        keys, values = decoder.reconstruct(range(1, 2), TokenRange(0, chunk.num_tokens))
        assert (keys.shape, values.shape) == ((1, 20, 2, 16), (1, 20, 2, 12))
        assert keys.dtype is values.dtype is torch.bfloat16
    assert 0 < opened < 300
