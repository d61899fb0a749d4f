"""Adds the tier's numbers to SGLang's server state (`GET /server_info`), under the key `kvtc`."""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state"


def add_tier_stats(result: Any, internal_state: Any, _request: Any) -> Any:
    """AFTER hook: `internal_state.scheduler.tree_cache` is ours when the tier is on, else stock and untouched."""
    stats = getattr(internal_state.scheduler.tree_cache, "tier_stats", None)
    if stats is not None:
        result.internal_state["kvtc"] = stats()
    return result
