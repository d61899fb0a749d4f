"""How a node is cut into frames: sinks, coded chunks and the window at the end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.types import TokenRange

_WINDOW_KINDS = {"coded": FrameKind.CODED, "fp8": FrameKind.FP8, "raw": FrameKind.RAW}


class NodeSegment(NamedTuple):
    """What one frame of a node is to hold: absolute token range, kind, and `plan_code` of a CODED frame's plan."""

    tokens: TokenRange
    kind: FrameKind
    plan: int = 0


@dataclass(frozen=True, slots=True)
class NodePlans:
    """`plan_code` of the plans that a node is coded with: its window by the finer one."""

    body: int
    window: int


def node_segments(
    start_position: int,
    num_tokens: int,
    config: CodecConfig,
    plans: NodePlans | None,
    *,
    min_coded_tokens: int = 1,
) -> list[NodeSegment]:
    """The frames of a node in order of position; none for a node without tokens.

    Positions below `sink_tokens` are RAW, the node's last `window_tokens` are in `window_format`, and what lies between
    is CODED by the plan of the body, unless that is fewer than `min_coded_tokens`: then it joins the window. Nodes of
    one token are RAW, and so is everything in lossless mode, without `plans`. Frames have at most `chunk_tokens`
    tokens; those of one part differ by at most one.
    """
    stop = start_position + num_tokens
    if plans is None or num_tokens == 1:
        return _frames(start_position, stop, FrameKind.RAW, 0, config.chunk_tokens)
    window = _WINDOW_KINDS[config.window_format]
    window_plan = plans.window if window is FrameKind.CODED else 0
    sink_stop = min(max(start_position, config.sink_tokens), stop)
    # A window coded like the body is part of it.
    window_start = stop if window_plan == plans.body else max(sink_stop, stop - config.window_tokens)
    if window_start - sink_stop < min_coded_tokens:
        window_start = sink_stop
    return [
        *_frames(start_position, sink_stop, FrameKind.RAW, 0, config.chunk_tokens),
        *_frames(sink_stop, window_start, FrameKind.CODED, plans.body, config.chunk_tokens),
        *_frames(window_start, stop, window, window_plan, config.chunk_tokens),
    ]


def _frames(start: int, stop: int, kind: FrameKind, plan: int, max_tokens: int) -> list[NodeSegment]:
    """The range in as few frames as `max_tokens` allows, as equal as can be, so that none is tiny."""
    count = -(-(stop - start) // max_tokens)
    bounds = [start + (stop - start) * index // count for index in range(count + 1)] if count else [start]
    return [NodeSegment(TokenRange(first, last), kind, plan) for first, last in itertools.pairwise(bounds)]
