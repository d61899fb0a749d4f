"""How a node is cut into chunks, and which tokens are not coded (KVTC section 2)."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.types import TokenRange

Segments = Iterator[tuple[TokenRange, FrameKind]]


def segments(
    start_position: int, num_tokens: int, config: CodecConfig, *, lossless: bool, min_coded_tokens: int = 1
) -> Segments:
    """Ranges of absolute positions of a node, in order, each with the kind of its frame.

    Sink positions are raw, the last `window_tokens` are in the window format, and what lies between is coded, unless
    that would be fewer than `min_coded_tokens`: then it joins the window. Lossless: everything raw. No range exceeds
    `chunk_tokens`; those of one kind differ by at most one token in length, so that no chunk is tiny.
    """
    stop = start_position + num_tokens
    if lossless:
        yield from _balanced(TokenRange(start_position, stop), config.chunk_tokens, FrameKind.RAW)
        return
    sinks_stop = min(max(start_position, config.sink_tokens), stop)
    window_start = max(sinks_stop, stop - config.window_tokens)
    if window_start - sinks_stop < min_coded_tokens:
        window_start = sinks_stop
    window_kind = FrameKind.FP8 if config.window_format == "fp8" else FrameKind.RAW
    yield from _balanced(TokenRange(start_position, sinks_stop), config.chunk_tokens, FrameKind.RAW)
    yield from _balanced(TokenRange(sinks_stop, window_start), config.chunk_tokens, FrameKind.CODED)
    yield from _balanced(TokenRange(window_start, stop), config.chunk_tokens, window_kind)


def _balanced(tokens: TokenRange, chunk_tokens: int, kind: FrameKind) -> Segments:
    count = -(-len(tokens) // chunk_tokens)
    for index in range(count):
        yield (
            TokenRange(tokens.start + len(tokens) * index // count, tokens.start + len(tokens) * (index + 1) // count),
            kind,
        )
