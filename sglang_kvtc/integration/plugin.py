"""Entry point of SGLang's general plugin group: a prefix cache, an attention backend, and hooks.

SGLang logs a plugin's failure and starts anyway, so no step here may fail silently: the flags exist only if the first
hook took, `--enable-kvtc` selects the backend by name, and the backend refuses to be built unless the other hooks
left their mark (`integration.flags`, `integration.radix_cache`). Gated eviction checks its own hooks
(`integration.gating_hooks`).
"""

from sglang.srt.mem_cache.registry import register_radix_cache_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_kvtc.integration import flags, gating_hooks, state_page
from sglang_kvtc.integration.radix_cache import build_kvtc_cache


def load() -> None:
    """Called once in every process of the server, before its configuration is read."""
    register_radix_cache_backend(flags.BACKEND, build_kvtc_cache)
    HookRegistry.register(flags.ADD_FLAGS_TARGET, flags.add_flags, HookType.AFTER)
    HookRegistry.register(flags.READ_FLAGS_TARGET, flags.attach_config, HookType.AFTER)
    HookRegistry.register(state_page.TARGET, state_page.add_tier_stats, HookType.AFTER)
    gating_hooks.register()
