"""Without a GPU, Triton's interpreter runs the kernels.

Triton reads TRITON_INTERPRET as it is imported, and other tests import it too, through SGLang. So the kernels get a
Triton of their own here, and everything else the usual one, in whatever order tests run.
"""

from __future__ import annotations

import importlib
import os
import sys

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
