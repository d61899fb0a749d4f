"""Make `sglang serve --device cpu` work where `sgl_kernel` has no build for the CPU.

SGLang calls every entry point of the group `sglang.srt.platforms` while `sglang.srt.utils.common` is being imported
(`platforms/__init__.py`, `_resolve_platform`). That is before the first `import sgl_kernel` of each of its processes,
spawned ones included, and before its cached `is_cpu()` first reads the environment. General plugins load too late.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NoReturn

import torch

KERNELS = "sgl_kernel"
CPU_ENGINE_ENV = "SGLANG_USE_CPU_ENGINE"


def activate() -> None:
    """Prepare this process for SGLang's own CPU platform, if there is no accelerator.

    Returns None in every case, which tells SGLang that this is not a platform of its own: SGLang then selects its
    `CpuSRTPlatform`. With an accelerator, or with `SGLANG_USE_CPU_ENGINE` set to anything but 1, nothing is changed.
    """
    if torch.cuda.is_available() or torch.accelerator.is_available():
        return
    if os.environ.setdefault(CPU_ENGINE_ENV, "1") != "1":
        return
    try:
        importlib.import_module(KERNELS)
    except ImportError:  # no kernels are installed, or only those for CUDA, which need its driver
        for name in [name for name in sys.modules if name.partition(".")[0] == KERNELS]:
            del sys.modules[name]
        installed = importlib.machinery.PathFinder.find_spec(KERNELS)
        search = installed.submodule_search_locations if installed else None
        sys.meta_path.insert(0, _StandInFinder(list(search or ())))


class _StandIn(ModuleType):
    """Takes the place of `sgl_kernel`: every name can be imported from it and none can be called."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: object, **_kwargs: object) -> NoReturn:
            raise NotImplementedError(f"{KERNELS}.{name} has no CPU build here; choose an option that does not use it")

        missing.__name__ = missing.__qualname__ = name
        return missing


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the top-level package only.

    Submodules still come from the installed wheel, if there is one: some are plain Python (`sgl_kernel.scalar_type`),
    and SGLang relies on ImportError from those that are not there.
    """

    def __init__(self, search_locations: list[str]) -> None:
        self._search_locations = search_locations

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != KERNELS:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        spec.submodule_search_locations = self._search_locations
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names are made on demand."""
