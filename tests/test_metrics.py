from __future__ import annotations

import sglang_kvtc.metrics as metrics
from sglang_kvtc.metrics import METRICS, MetricKind, Metrics, NullMetrics


def test_every_name_is_in_the_table() -> None:
    names = {value for value in vars(metrics).values() if isinstance(value, str) and value.startswith("sglang:")}
    assert names == METRICS.keys()


def test_names_follow_the_conventions_of_prometheus_and_sglang() -> None:
    for name, metric in METRICS.items():
        assert name.startswith("sglang:kvtc_")
        assert name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        if metric.unit in ("bytes", "seconds", "tokens"):
            assert f"_{metric.unit}" in name
        assert metric.help.endswith(".")


def test_null_metrics_take_every_report() -> None:
    sink: Metrics = NullMetrics()
    for metric in METRICS.values():
        labels = dict.fromkeys(metric.labels, "x")
        sink.inc(metric.name, 2, **labels)
        sink.set(metric.name, 2, **labels)
        sink.observe(metric.name, 2, **labels)
