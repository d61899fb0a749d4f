"""Progress of long commands: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0


class TerminalProgress:
    """Implements `calibrate.progress.Progress` on standard error."""

    @contextlib.contextmanager
    def stage(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], object]]:
        """Show a stage of `total` units until the block ends."""
        if sys.stderr.isatty():
            with tqdm(total=total, desc=name, unit=f" {unit}", unit_scale=total > 10_000) as bar:
                yield bar.update
        else:
            line = _Lines(name, total, unit)
            yield line.advance
            line.finish()


class _Lines:
    def __init__(self, name: str, total: int, unit: str) -> None:
        self._name, self._total, self._unit = name, total, unit
        self._done = 0
        self._start = self._shown = time.monotonic()
        self._write(f"{total:,} {unit}")

    def advance(self, units: int) -> None:
        self._done += units
        now = time.monotonic()
        if now - self._shown >= _SECONDS_BETWEEN_LINES and self._done < self._total:
            self._shown = now
            rate = self._done / (now - self._start)
            self._write(f"{self._done:,} of {self._total:,} {self._unit}, {rate:,.1f} {self._unit}/s")

    def finish(self) -> None:
        self._write(f"done in {time.monotonic() - self._start:.1f} s")

    def _write(self, text: str) -> None:
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)
