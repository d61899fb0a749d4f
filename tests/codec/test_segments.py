from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.codec.segments import node_segments
from sglang_kvtc.config import CodecConfig

CONFIGS = st.builds(
    CodecConfig,
    sink_tokens=st.integers(0, 8),
    window_tokens=st.integers(0, 150),
    window_format=st.sampled_from(["fp8", "raw"]),
    chunk_tokens=st.integers(16, 100),
)


def summary(start: int, num_tokens: int, config: CodecConfig, **options: int) -> list[tuple[int, int, str]]:
    return [
        (tokens.start, tokens.stop, kind.name) for tokens, kind in node_segments(start, num_tokens, config, **options)
    ]


def test_a_first_node_has_sinks_chunks_and_a_window() -> None:
    assert summary(0, 1156, CodecConfig()) == [
        (0, 4, "RAW"),
        (4, 516, "CODED"),
        (516, 1028, "CODED"),
        (1028, 1156, "FP8"),
    ]


def test_a_later_node_has_no_sinks() -> None:
    assert summary(500, 200, CodecConfig(window_format="raw")) == [(500, 572, "CODED"), (572, 700, "RAW")]


def test_a_node_that_starts_among_the_sinks_keeps_the_rest_of_them_raw() -> None:
    assert summary(2, 40, CodecConfig(window_tokens=8)) == [(2, 4, "RAW"), (4, 34, "CODED"), (34, 42, "FP8")]


@given(CONFIGS, st.integers(0, 40), st.integers(0, 700), st.booleans(), st.integers(1, 64))
def test_segments_cover_the_node_and_keep_the_rules(
    config: CodecConfig, start: int, num_tokens: int, lossless: bool, min_coded_tokens: int
) -> None:
    segments = node_segments(start, num_tokens, config, lossless=lossless, min_coded_tokens=min_coded_tokens)
    stop = start + num_tokens
    covered = [position for tokens, _ in segments for position in range(tokens.start, tokens.stop)]
    assert covered == list(range(start, stop))
    assert all(1 <= len(tokens) <= config.chunk_tokens for tokens, _ in segments)
    window = FrameKind.FP8 if config.window_format == "fp8" else FrameKind.RAW
    sink_stop = min(max(start, config.sink_tokens), stop)
    span = stop - config.window_tokens - sink_stop
    for tokens, kind in segments:
        if lossless or num_tokens == 1 or tokens.start < config.sink_tokens:
            assert kind is FrameKind.RAW
        elif span >= min_coded_tokens and tokens.start < stop - config.window_tokens:
            assert kind is FrameKind.CODED
        else:
            assert kind is window
        assert lossless or not tokens.start < sink_stop < tokens.stop
    sizes = [len(tokens) for tokens, kind in segments if kind is FrameKind.CODED]
    assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_tokens", [2, 4, 50, 132])
def test_a_shape_04_a_node_within_sinks_and_window_has_no_coded_part(num_tokens: int) -> None:
    kinds = {kind for _, _, kind in summary(0, num_tokens, CodecConfig())}
    assert "CODED" not in kinds


def test_a_shape_04_no_tokens_make_no_frames_and_one_token_is_raw() -> None:
    assert summary(9000, 0, CodecConfig(window_tokens=0)) == []
    for window_tokens in (0, 128):
        assert summary(9000, 1, CodecConfig(window_tokens=window_tokens)) == [(9000, 9001, "RAW")]


def test_too_few_tokens_between_sinks_and_window_join_the_window() -> None:
    config = CodecConfig(window_tokens=8)
    assert summary(100, 39, config, min_coded_tokens=32) == [(100, 139, "FP8")]
    assert summary(100, 40, config, min_coded_tokens=32) == [(100, 132, "CODED"), (132, 140, "FP8")]
