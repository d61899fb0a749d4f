"""How a node is cut into frames: sinks, coded chunks and the window at the end."""

from __future__ import annotations

import itertools

from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.types import TokenRange


def node_segments(
    start_position: int,
    num_tokens: int,
    config: CodecConfig,
    *,
    lossless: bool = False,
    min_coded_tokens: int = 1,
) -> list[tuple[TokenRange, FrameKind]]:
    """(absolute token range, kind) of every frame of a node, in order of position; none for a node without tokens.

    Positions below `sink_tokens` are RAW, the node's last `window_tokens` FP8 or RAW, and what lies between is CODED,
    unless that is fewer than `min_coded_tokens`: then it joins the window. Nodes of one token are RAW, and so is
    everything in lossless mode. Frames have at most `chunk_tokens` tokens; those of one part differ by at most one.
    """
    stop = start_position + num_tokens
    if lossless or num_tokens == 1:
        return _frames(start_position, stop, FrameKind.RAW, config.chunk_tokens)
    window = FrameKind.FP8 if config.window_format == "fp8" else FrameKind.RAW
    sink_stop = min(max(start_position, config.sink_tokens), stop)
    window_start = max(sink_stop, stop - config.window_tokens)
    if window_start - sink_stop < min_coded_tokens:
        window_start = sink_stop
    return [
        *_frames(start_position, sink_stop, FrameKind.RAW, config.chunk_tokens),
        *_frames(sink_stop, window_start, FrameKind.CODED, config.chunk_tokens),
        *_frames(window_start, stop, window, config.chunk_tokens),
    ]


def _frames(start: int, stop: int, kind: FrameKind, max_tokens: int) -> list[tuple[TokenRange, FrameKind]]:
    """The range in as few frames as `max_tokens` allows, as equal as can be, so that none is tiny."""
    count = -(-(stop - start) // max_tokens)
    bounds = [start + (stop - start) * index // count for index in range(count + 1)] if count else [start]
    return [(TokenRange(first, last), kind) for first, last in itertools.pairwise(bounds)]
