"""Peak memory of a piece of work, from the kernel's own accounting (Linux with glibc)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"


@dataclass(slots=True)
class Peak:
    """`peak_bytes`: most resident memory during the work beyond what the process had before."""

    peak_bytes: int = 0


@contextlib.contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure what runs inside. Memory freed before is given back first, or it would be reused unseen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    peak = Peak()
    before = _status_bytes("VmRSS")
    (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
    yield peak
    peak.peak_bytes = max(0, _status_bytes("VmHWM") - before)


def _status_bytes(key: str) -> int:
    for line in (_PROCESS / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"the kernel does not tell {key} of this process")
