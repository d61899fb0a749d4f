"""How much memory the frames may take."""

from __future__ import annotations

from pathlib import Path

import psutil

from sglang_kvtc.config import TierConfig
from sglang_kvtc.errors import ConfigError

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_CGROUP_USES = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))


def available_bytes() -> int:
    """Memory this process may still take: what the machine has, or what its control group leaves."""
    free = int(psutil.virtual_memory().available)
    for limit_file, use_file in zip(_CGROUP_LIMITS, _CGROUP_USES, strict=True):
        try:
            limit, use = limit_file.read_text().strip(), int(use_file.read_text())
        except OSError:
            continue
        if limit != "max":
            free = min(free, int(limit) - use)
    return free


def arena_bytes(config: TierConfig) -> int:
    """The configured budget, or a tenth of what is available.

    Raises ConfigError if the budget exceeds what is available.
    """
    free = available_bytes()
    if not config.arena_bytes:
        return free // 10
    if config.arena_bytes > free:
        raise ConfigError(f"tier.arena_bytes = {config.arena_bytes} exceeds the {free} bytes available: lower it")
    return config.arena_bytes
