"""The benchmark routines of `sglang-kvtc bench`, one per question. Filled by declaration, never by import order.

A routine is a module with

- `HELP`: one line, what it measures;
- `add_arguments(parser)`: its shapes and sizes, all of them flags with defaults;
- `run(args) -> list[dict[str, object]]`: rows of plain JSON values, units in the keys. It raises a KVTCError when a
  result does not agree with its oracle.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol, cast

ROUTINES = (
    "ablations",
    "allocate",
    "codec",
    "eviction",
    "gates",
    "gate-ablations",
    "gate-parity",
    "gate-score",
    "paged-attention",
    "protocols",
    "quality",
    "restore",
    "sensitivity",
    "tasks",
)


class Routine(Protocol):
    """What the module of a routine offers."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> list[dict[str, object]]: ...


def load(name: str) -> Routine:
    """Import the routine `name`, one of ROUTINES."""
    return cast(Routine, importlib.import_module(f"sglang_kvtc.benchmarks.routines.{name.replace('-', '_')}"))
