"""Adds our numbers to SGLang's server state (`GET /server_info`): the tier's as `kvtc`, gating's as `kvtc_eviction`."""

from __future__ import annotations

from typing import Any

from sglang_kvtc.integration.gating import gating_of

TARGET = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state"


def add_tier_stats(result: Any, internal_state: Any, _request: Any) -> Any:
    """AFTER hook: the scheduler's tree cache and allocator are ours where tier and gating are on, else stock."""
    stats = getattr(internal_state.scheduler.tree_cache, "tier_stats", None)
    if stats is not None:
        result.internal_state["kvtc"] = stats()
    gating = gating_of(internal_state.scheduler.token_to_kv_pool_allocator)
    if gating is not None:
        result.internal_state["kvtc_eviction"] = gating.stats()
    return result
