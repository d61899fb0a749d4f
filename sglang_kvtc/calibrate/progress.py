"""How long work reports how far it is. The command line implements the protocol; a library caller may ignore it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Progress(Protocol):
    """Receives the stages of a calibration."""

    def stage(self, name: str, total: int, unit: str) -> AbstractContextManager[Callable[[int], object]]:
        """Open a stage of `total` units; the callable it yields is told how many more units are done."""
        ...


class SilentProgress:
    """Reports nothing."""

    def stage(self, name: str, total: int, unit: str) -> AbstractContextManager[Callable[[int], object]]:
        return contextlib.nullcontext(lambda units: None)
