"""Without a GPU, Triton's interpreter runs the kernels.

Triton reads TRITON_INTERPRET as it is imported, and other tests import it too, through SGLang. So the kernels get a
Triton of their own here, and everything else the usual one, in whatever order tests run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import triton.language

KERNELS = ("launch", "cell_lists", "paged_attention", "pack", "quantize", "uniform")


def loaded_triton() -> dict[str, object]:
    """Its modules but for the compiled part, which cannot be loaded twice and is the same for both."""
    return {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C")
    }


def import_interpreted() -> None:
    """Import the kernels with an interpreting Triton."""
    usual = loaded_triton()
    for name in [*usual, *(f"sglang_kvtc.kernels.triton_ops.{kernel}" for kernel in KERNELS)]:
        sys.modules.pop(name, None)
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for kernel in KERNELS:
            importlib.import_module(f"sglang_kvtc.kernels.triton_ops.{kernel}")
    finally:
        # Not left to the servers that other tests start.
        del os.environ["TRITON_INTERPRET"]
        for name in loaded_triton():
            del sys.modules[name]
        sys.modules.update(usual)  # type: ignore[arg-type]


if not torch.cuda.is_available():
    import_interpreted()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton looks at the variable while kernels run, too."""
    assert triton.language is sys.modules["triton.language"]
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


class Launch(NamedTuple):
    """A launch of a kernel: its name, its grid and what was given by keyword."""

    kernel: str
    grid: tuple[int, ...]
    options: dict[str, Any]


@pytest.fixture
def record_launches(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Launch]]:
    """Call it with a module and names of its kernels: they go on running, and every launch is added to the result."""

    def record(module: ModuleType, *names: str) -> list[Launch]:
        launched: list[Launch] = []

        class Recorder:
            def __init__(self, name: str) -> None:
                self.name, self.kernel = name, getattr(module, name)

            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
                def run(*arguments: Any, **options: Any) -> Any:
                    launched.append(Launch(self.name, grid, options))
                    return self.kernel[grid](*arguments, **options)

                return run

        for name in names:
            monkeypatch.setattr(module, name, Recorder(name))
        return launched

    return record


@pytest.fixture
def without_oracle(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with a module or class and names of its functions: from then on they fail."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the oracle ran")

    def forbid(oracle: object, *names: str) -> None:
        for name in names:
            monkeypatch.setattr(oracle, name, refuse)

    return forbid
