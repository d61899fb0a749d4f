from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.codec.segments import NodePlans, node_segments
from sglang_kvtc.config import CodecConfig

CONFIGS = st.builds(
    CodecConfig,
    sink_tokens=st.integers(0, 8),
    window_tokens=st.integers(0, 150),
    window_format=st.sampled_from(["coded", "fp8", "raw"]),
    chunk_tokens=st.integers(16, 100),
)
PLANS = NodePlans(body=16, window=8)


def summary(
    start: int, num_tokens: int, config: CodecConfig, plans: NodePlans = PLANS, **options: int
) -> list[tuple[int, int, str]]:
    """Start, stop, and the kind of a frame with its plan."""
    return [
        (tokens.start, tokens.stop, f"{kind.name}{plan or ''}")
        for tokens, kind, plan in node_segments(start, num_tokens, config, plans, **options)
    ]


def test_a_first_node_has_sinks_chunks_and_a_window() -> None:
    coded = [(0, 4, "RAW"), (4, 516, "CODED16"), (516, 1028, "CODED16")]
    assert summary(0, 1156, CodecConfig()) == [*coded, (1028, 1156, "CODED8")]
    assert summary(0, 1156, CodecConfig(window_format="fp8")) == [*coded, (1028, 1156, "FP8")]


def test_a_window_of_the_same_plan_is_part_of_the_body() -> None:
    assert summary(500, 200, CodecConfig(), NodePlans(16, 16)) == [(500, 700, "CODED16")]
    assert summary(500, 100, CodecConfig(), NodePlans(16, 16)) == [(500, 600, "CODED16")]


def test_a_later_node_has_no_sinks() -> None:
    assert summary(500, 200, CodecConfig(window_format="raw")) == [(500, 572, "CODED16"), (572, 700, "RAW")]


def test_a_node_that_starts_among_the_sinks_keeps_the_rest_of_them_raw() -> None:
    assert summary(2, 40, CodecConfig(window_tokens=8)) == [(2, 4, "RAW"), (4, 34, "CODED16"), (34, 42, "CODED8")]


@given(CONFIGS, st.integers(0, 40), st.integers(0, 700), st.booleans(), st.integers(1, 64))
def test_segments_cover_the_node_and_keep_the_rules(
    config: CodecConfig, start: int, num_tokens: int, lossless: bool, min_coded_tokens: int
) -> None:
    plans = None if lossless else PLANS
    segments = node_segments(start, num_tokens, config, plans, min_coded_tokens=min_coded_tokens)
    stop = start + num_tokens
    covered = [position for tokens, *_ in segments for position in range(tokens.start, tokens.stop)]
    assert covered == list(range(start, stop))
    assert all(1 <= len(tokens) <= config.chunk_tokens for tokens, *_ in segments)
    window = {"coded": (FrameKind.CODED, 8), "fp8": (FrameKind.FP8, 0), "raw": (FrameKind.RAW, 0)}
    sink_stop = min(max(start, config.sink_tokens), stop)
    span = stop - config.window_tokens - sink_stop
    for tokens, kind, plan in segments:
        if lossless or num_tokens == 1 or tokens.start < config.sink_tokens:
            assert (kind, plan) == (FrameKind.RAW, 0)
        elif span >= min_coded_tokens and tokens.start < stop - config.window_tokens:
            assert (kind, plan) == (FrameKind.CODED, 16)
        else:
            assert (kind, plan) == window[config.window_format]
        assert lossless or not tokens.start < sink_stop < tokens.stop
    sizes = [len(tokens) for tokens, _, plan in segments if plan == PLANS.body]
    assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_tokens", [2, 4, 50, 132])
def test_a_shape_04_a_node_within_sinks_and_window_has_no_coded_part(num_tokens: int) -> None:
    kinds = {kind for _, _, kind in summary(0, num_tokens, CodecConfig(window_format="fp8"))}
    assert kinds <= {"RAW", "FP8"}
    assert {kind for _, _, kind in summary(0, num_tokens, CodecConfig())} <= {"RAW", "CODED8"}


def test_a_shape_04_no_tokens_make_no_frames_and_one_token_is_raw() -> None:
    assert summary(9000, 0, CodecConfig(window_tokens=0)) == []
    for window_tokens in (0, 128):
        assert summary(9000, 1, CodecConfig(window_tokens=window_tokens)) == [(9000, 9001, "RAW")]


def test_too_few_tokens_between_sinks_and_window_join_the_window() -> None:
    config = CodecConfig(window_tokens=8)
    assert summary(100, 39, config, min_coded_tokens=32) == [(100, 139, "CODED8")]
    assert summary(100, 40, config, min_coded_tokens=32) == [(100, 132, "CODED16"), (132, 140, "CODED8")]
