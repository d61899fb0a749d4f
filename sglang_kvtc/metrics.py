"""The table of metrics and the interface they are reported through.

Names and help texts are those of SGLang's Prometheus endpoint. The tier knows only `Metrics`; who serves the endpoint
hands in an implementation.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

STORED_BYTES = "sglang:kvtc_stored_bytes"
STAGED_BYTES = "sglang:kvtc_staged_bytes"
ARENA_BYTES = "sglang:kvtc_arena_bytes"
CODED_TOKENS = "sglang:kvtc_coded_tokens_total"
RESTORED_TOKENS = "sglang:kvtc_restored_tokens_total"
HITS = "sglang:kvtc_hits_total"
MISSES = "sglang:kvtc_misses_total"
FRAMES_REJECTED = "sglang:kvtc_frames_rejected_total"
RAW_FALLBACK_CHUNKS = "sglang:kvtc_raw_fallback_chunks_total"
ENCODE_SECONDS = "sglang:kvtc_encode_seconds"
RESTORE_SECONDS = "sglang:kvtc_restore_seconds"


class MetricKind(enum.StrEnum):
    """Counters only rise, gauges are set, histograms observe one value per event."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `labels` are the label names every report of the metric must carry."""

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: tuple[str, ...] = ()


_ROWS = (
    Metric(STORED_BYTES, MetricKind.GAUGE, "bytes", "Bytes of all stored frames of this rank."),
    Metric(STAGED_BYTES, MetricKind.GAUGE, "bytes", "Bytes of raw KV copies that wait for the encoder."),
    Metric(ARENA_BYTES, MetricKind.GAUGE, "bytes", "Budget for stored frames of this rank."),
    Metric(CODED_TOKENS, MetricKind.COUNTER, "tokens", "Tokens written to frames, raw and fp8 ones included."),
    Metric(RESTORED_TOKENS, MetricKind.COUNTER, "tokens", "Tokens decoded from frames into the KV cache."),
    Metric(HITS, MetricKind.COUNTER, "requests", "Requests whose prefix was restored from frames."),
    Metric(MISSES, MetricKind.COUNTER, "requests", "Requests that had to recompute a stored prefix.", ("reason",)),
    Metric(
        FRAMES_REJECTED,
        MetricKind.COUNTER,
        "frames",
        "Frames dropped because they failed a check; reason is the error's class.",
        ("reason",),
    ),
    Metric(
        RAW_FALLBACK_CHUNKS,
        MetricKind.COUNTER,
        "chunks",
        "Chunks stored raw because they hold non-finite or out-of-range values.",
    ),
    Metric(ENCODE_SECONDS, MetricKind.HISTOGRAM, "seconds", "Time to encode one chunk."),
    Metric(RESTORE_SECONDS, MetricKind.HISTOGRAM, "seconds", "Time from the first decoded to the last written layer."),
)
METRICS = {metric.name: metric for metric in _ROWS}
"""Every metric of this package by name."""


class Metrics(Protocol):
    """Where metrics go. `name` is a key of METRICS; labels are given by name. Safe to call from any thread."""

    def inc(self, name: str, amount: float = 1, **labels: str) -> None:
        """Raise a counter."""

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""


class NullMetrics:
    """Metrics that go nowhere."""

    def inc(self, name: str, amount: float = 1, **labels: str) -> None:
        """Ignore it."""

    def set(self, name: str, value: float, **labels: str) -> None:
        """Ignore it."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Ignore it."""
