from __future__ import annotations

import itertools

import torch
from codec.toy_model import GEOMETRY, make_artifact, make_chunk, with_a_finer_plan
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.codec.decode import CodedFrame, OpenFrame, join_frames
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.types import Side, TokenRange

MAX_TOKENS = 40
ARTIFACT = make_artifact()
CODEC = KVCodec(ARTIFACT, CodecConfig(compute_dtype="float32"))


def opened(kind: FrameKind, num_tokens: int, start_position: int) -> OpenFrame:
    frame = CODEC.encode(make_chunk(ARTIFACT, num_tokens, start_position), kind).frame
    return CODEC.open(frame, start_position, num_tokens)


@st.composite
def parts(draw: st.DrawFn) -> list[tuple[OpenFrame, TokenRange]]:
    found, position = [], draw(st.integers(0, 100_000))
    for kind in draw(st.lists(st.sampled_from([FrameKind.CODED, FrameKind.CODED, *FrameKind]), max_size=7)):
        num_tokens = draw(st.integers(1, 24))
        start = draw(st.integers(0, num_tokens - 1))
        tokens = TokenRange(start, draw(st.integers(start + 1, num_tokens)))
        found.append((opened(kind, num_tokens, position), tokens))
        position += num_tokens
    return found


@given(parts())
def test_merged_frames_hold_exactly_what_their_parts_hold(parts: list[tuple[OpenFrame, TokenRange]]) -> None:
    merged = list(join_frames(parts, MAX_TOKENS))
    assert sum(num_parts for _, _, num_parts in merged) == len(parts)
    rest = iter(parts)
    for frame, tokens, num_parts in merged:
        own = [next(rest) for _ in range(num_parts)]
        assert len(tokens) == sum(len(part) for _, part in own)
        if num_parts == 1:
            assert (frame, tokens) == own[0]
            continue
        assert isinstance(frame, CodedFrame)
        assert len(tokens) <= MAX_TOKENS
        keys = torch.randn(len(tokens), GEOMETRY.num_kv_heads, GEOMETRY.head_dim)
        rotated, offset = frame.rotation(keys), 0
        for part, window in own:
            assert isinstance(part, CodedFrame)
            place, source = slice(offset, offset + len(window)), slice(window.start, window.stop)
            for side in Side:
                assert torch.equal(frame.coefficients[side][place], part.coefficients[side][source])
            assert torch.equal(rotated[place], part.rotation(keys[place], source))
            offset += len(window)


@given(parts())
def test_neighbouring_coded_frames_are_merged_while_they_fit(parts: list[tuple[OpenFrame, TokenRange]]) -> None:
    merged = list(join_frames(parts, MAX_TOKENS))
    for (one, few, _), (other, more, _) in itertools.pairwise(merged):
        both_coded = isinstance(one, CodedFrame) and isinstance(other, CodedFrame)
        # The next part alone did not fit any more, and it is at most 24 tokens of the next frame.
        assert not both_coded or len(few) + min(len(more), 24) > MAX_TOKENS


def test_a_merged_frame_gives_the_engine_the_same_kv() -> None:
    found = [(opened(FrameKind.CODED, 16, start), TokenRange(0, 16)) for start in (0, 16)]
    ((frame, tokens, _),) = join_frames(found, MAX_TOKENS)
    layers = range(GEOMETRY.num_layers)
    apart = [part.reconstruct(layers, window) for part, window in found]
    for side, whole in enumerate(frame.reconstruct(layers, tokens)):
        # bfloat16 keeps eight bits, and products of another height may round the last one differently.
        torch.testing.assert_close(whole, torch.cat([pair[side] for pair in apart], dim=1), rtol=2**-7, atol=0)


def test_neighbouring_frames_of_different_plans_are_not_joined() -> None:
    artifact = with_a_finer_plan()
    codec = KVCodec(artifact, CodecConfig(sink_tokens=0, window_tokens=32, chunk_tokens=32))
    chunk = make_chunk(artifact, 96, 10)
    found = [
        (codec.open(part.frame, tokens.start, len(tokens)), TokenRange(0, len(tokens)))
        for tokens, part in codec.encode_node(chunk.keys, chunk.values, 10)
    ]
    joined = list(join_frames(found, 1024))
    assert [(len(tokens), num_parts) for _, tokens, num_parts in joined] == [(64, 2), (32, 1)]
    for frame, tokens, num_parts in joined:
        parts = found[:2] if num_parts == 2 else found[2:]
        alone = [part.reconstruct(range(GEOMETRY.num_layers), its_tokens) for part, its_tokens in parts]
        for rebuilt, expected in zip(
            frame.reconstruct(range(GEOMETRY.num_layers), tokens), zip(*alone, strict=True), strict=True
        ):
            torch.testing.assert_close(rebuilt, torch.cat(expected, dim=1), rtol=2**-7, atol=2**-20)
