"""Admission that counts what gated requests will hold, not how many tokens they have.

SGLang admits a request if all of its tokens fit beside what runs. A gated one holds its budget, and one chunk of its
prompt on top while that is computed: that peak has to fit. Where running requests outgrow the estimate, SGLang's own
retraction acts as ever; a chunk that does not fit waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_kvtc.integration.gating import STATE, gating_of

CHECK_TARGET = "sglang.srt.managers.schedule_policy.PrefillAdder._check_prefill_budget"
GROWTH_TARGET = "sglang.srt.managers.schedule_policy.PrefillAdder._get_running_request_total_token_offset"


class CellPrefillBudget(PrefillBudget):
    """SGLang's budget of a token pool, but a chunk never takes memory that is not there."""

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """Tokens of the next chunk of a prompt that has begun; None makes it wait for requests that run."""
        available = min(chunk_limit, int(self.remaining_total))
        if available > 0:
            return available
        # What running requests may still take is an estimate: a prompt that has begun may use it, or both would wait.
        available = min(chunk_limit, int(self.remaining_current))
        return available if available > 0 else None


def check_prefill(original: Callable[..., Any], adder: Any, req: Any, **demand: Any) -> Any:
    """AROUND hook on `PrefillAdder._check_prefill_budget(req, *, extend_input_len, total_tokens, ...)`."""
    gating = gating_of(adder.token_to_kv_pool_allocator)
    if gating is not None and hasattr(req, STATE):
        num_prompt = demand["extend_input_len"]
        # total_tokens: everything not on the device yet, a prefix to be restored among it, which stays whole.
        num_whole = max(0, len(req.full_untruncated_fill_ids) - req.prefix_len - num_prompt)
        num_new = max(0, demand["total_tokens"] - num_whole - num_prompt)
        demand["total_tokens"] = num_whole + gating.peak_tokens(num_prompt, num_new, gating.chunk_tokens or num_prompt)
    return original(adder, req, **demand)


def running_growth(original: Callable[..., float], adder: Any, req: Any) -> float:
    """AROUND hook on `PrefillAdder._get_running_request_total_token_offset(req)`."""
    num_new = original(adder, req)
    gating = gating_of(adder.token_to_kv_pool_allocator)
    return num_new if gating is None else gating.growth_tokens(req, num_new)
