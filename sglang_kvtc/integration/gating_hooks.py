"""The hooks that put gated eviction into SGLang's scheduler. Each does nothing unless the KV pool holds cells.

That they were applied is checked when the allocator is built (`check_hooks`): SGLang logs a hook's failure and starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_kvtc.errors import UnsupportedError
from sglang_kvtc.integration import admission, cell_attention, compat, flags
from sglang_kvtc.integration.cell_pool import CellAllocator, CellKVPool, private_tokens
from sglang_kvtc.integration.eviction_options import slots_per_token
from sglang_kvtc.integration.gating import gating_of

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CHECKER = "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker"


def use_cells(configurator: Any, **arguments: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """BEFORE hook on `KVCacheConfigurator._build_mha_kv_pool(*, max_total_num_tokens, mha_pool_class, ...)`."""
    if not flags.gating_is_on(configurator.server_args):
        return None
    eviction = flags.config_of(configurator.server_args).eviction
    pool_class = functools.partial(CellKVPool, slots_per_token=slots_per_token(eviction))
    return (configurator,), {**arguments, "mha_pool_class": pool_class}


def build_allocator(original: Callable[..., Any], configurator: Any, **arguments: Any) -> Any:
    """AROUND hook on `KVCacheConfigurator._build_token_to_kv_pool_allocator`.

    Raises UnsupportedError if gating is on but not all of it is in place.
    """
    pool = arguments["token_to_kv_pool"]
    if not flags.gating_is_on(configurator.server_args):
        return original(configurator, **arguments)
    check_hooks()
    compat.check_engine_version()
    compat.check_settings(configurator.server_args, flags.config_of(configurator.server_args))
    if not isinstance(pool, CellKVPool) or arguments["token_to_kv_pool_allocator"] is not None:
        raise UnsupportedError(
            f"--kvtc-gates needs a KV cache of plain multi-head attention, this model has {type(pool).__name__}"
        )
    return CellAllocator(
        arguments["sizes"].max_total_num_tokens,
        dtype=configurator.kv_cache_dtype,
        device=configurator.device,
        kvcache=pool,
        need_sort=False,
    )


def enter_queue(scheduler: Any, req: Any, *_arguments: Any, **_options: Any) -> None:
    """BEFORE hook on `Scheduler._add_request_to_queue(req)`, after which prefixes are matched."""
    gating = gating_of(scheduler.token_to_kv_pool_allocator)
    if gating is not None:
        chunk = scheduler.chunked_prefill_size
        gating.chunk_tokens = chunk if chunk is not None and chunk > 0 else None
        gating.enter(req, publishes=gating.publisher is not None)


def around_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
    """AROUND hook on `Scheduler.run_batch(batch)`."""
    gating = gating_of(scheduler.token_to_kv_pool_allocator)
    if gating is None or batch.forward_mode.is_idle():
        return original(scheduler, batch, *arguments, **options)
    gating.before_batch(batch.reqs)
    result = original(scheduler, batch, *arguments, **options)
    gating.after_batch(batch.reqs)
    return result


def before_free(request_pool: Any, req: Any) -> None:
    """BEFORE hook on `ReqToTokenPool.free(req)`, through which every request gives back its row."""
    gating = getattr(request_pool, "kvtc_gating", None)
    if gating is not None:
        gating.release(req)


def uncached_sizes(result: tuple[int, int], checker: Any) -> tuple[int, int]:
    """AFTER hook on `SchedulerInvariantChecker._get_total_uncached_sizes`: tokens of memory instead of tokens."""
    allocator = checker.token_to_kv_pool_allocator
    if not isinstance(allocator, CellAllocator):
        return result
    table = checker.req_to_token_pool.req_to_token
    rows = [
        table[req.kv.req_pool_idx, req.kv.cache_protected_len : req.kv.kv_allocated_len]
        for req in checker._requests_owning_rows()
    ]
    # Where slots run out before memory does, what is free but has no slot is nobody's.
    without_slot = allocator.pool.cells.free_tokens - allocator.available_size()
    return private_tokens(allocator, rows) + without_slot, result[1]


HOOKS: dict[str, tuple[Callable[..., Any], HookType]] = {
    f"{_CONFIGURATOR}._build_mha_kv_pool": (use_cells, HookType.BEFORE),
    f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator": (build_allocator, HookType.AROUND),
    f"{_SCHEDULER}._add_request_to_queue": (enter_queue, HookType.BEFORE),
    f"{_SCHEDULER}.run_batch": (around_batch, HookType.AROUND),
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free": (before_free, HookType.BEFORE),
    f"{_CHECKER}._get_total_uncached_sizes": (uncached_sizes, HookType.AFTER),
    admission.CHECK_TARGET: (admission.check_prefill, HookType.AROUND),
    admission.GROWTH_TARGET: (admission.running_growth, HookType.AROUND),
}


def register() -> None:
    """Called while plugins load, in every process."""
    for target, (hook, kind) in HOOKS.items():
        HookRegistry.register(target, hook, kind)
    cell_attention.register()


def check_hooks() -> None:
    """Raises UnsupportedError naming what SGLang did not apply."""
    missing = [target for target in HOOKS if target not in HookRegistry._patched]
    if not cell_attention.is_registered():
        missing.append(f"attention backend {cell_attention.BACKEND_NAME}")
    if missing:
        raise UnsupportedError(
            f"these hooks did not apply: {', '.join(missing)}; gated eviction would be half installed. Look for "
            "'Failed to apply hooks' above and drop --kvtc-gates or other plugins"
        )
