"""patches/sglang-cpu: SGLang's processes come up on a CPU without kernels, and nothing changes beside an accelerator.

Every test runs in a process of its own, since activation changes how the process imports.
"""

import os
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest


def run_python(code: str, path: Path | None = None, **env: str) -> str:
    """Run `code` without visible GPUs and return what it prints; `path` is searched before site-packages."""
    inherited = {name: value for name, value in os.environ.items() if name != "SGLANG_USE_CPU_ENGINE"}
    visible = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(path or "")}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**inherited, **visible, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def cuda_only_kernels(tmp_path: Path) -> Path:
    """An `sgl_kernel` that cannot load without a CUDA driver, with one submodule in plain Python."""
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("from . import loaded_first\nraise ImportError('libcuda.so.1')\n")
    (package / "loaded_first.py").write_text("")
    (package / "scalar_type.py").write_text("float4 = 'plain Python'\n")
    return tmp_path


def test_the_entry_point_is_no_platform_of_its_own() -> None:
    (entry,) = entry_points(group="sglang.srt.platforms", name="kvtc_cpu")
    assert entry.value == "sglang_kvtc_cpu:activate"
    assert run_python("import sglang_kvtc_cpu; print(sglang_kvtc_cpu.activate())") == "None\n"


def test_sglang_selects_its_cpu_platform_and_its_scheduler_can_be_imported() -> None:
    printed = run_python("""
        import sglang.srt.managers.scheduler
        from sglang.srt.platforms import current_platform
        from sglang.srt.utils import is_cpu
        print(type(current_platform).__name__, is_cpu())
    """)
    assert printed.splitlines()[-1] == "CpuSRTPlatform True"


def test_any_kernel_can_be_imported_and_says_what_is_missing_when_called(cuda_only_kernels: Path) -> None:
    printed = run_python(
        """
        import sglang_kvtc_cpu
        sglang_kvtc_cpu.activate()
        from sgl_kernel import some_op
        try:
            some_op(1, out=2)
        except NotImplementedError as error:
            print(error)
        """,
        cuda_only_kernels,
    )
    assert printed == "sgl_kernel.some_op has no CPU build here; choose an option that does not use it\n"


def test_submodules_come_from_the_installed_wheel_or_not_at_all(cuda_only_kernels: Path) -> None:
    printed = run_python(
        """
        import sglang_kvtc_cpu
        sglang_kvtc_cpu.activate()
        from sgl_kernel.scalar_type import float4
        print(float4)
        try:
            import sgl_kernel.absent
        except ModuleNotFoundError as error:
            print(error)
        """,
        cuda_only_kernels,
    )
    assert printed == "plain Python\nNo module named 'sgl_kernel.absent'\n"


def test_kernels_that_do_load_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel.py").write_text("def some_op():\n    return 'native'\n")
    printed = run_python(
        """
        import sglang_kvtc_cpu
        sglang_kvtc_cpu.activate()
        import sgl_kernel
        print(sgl_kernel.some_op(), hasattr(sgl_kernel, 'another_op'))
        """,
        tmp_path,
    )
    assert printed == "native False\n"


NOTHING_CHANGES = """
    import os, sys, torch, sglang_kvtc_cpu
    before = list(sys.meta_path), dict(os.environ), sorted(sys.modules)
    if 'FAKE_GPU' in os.environ:
        torch.cuda.is_available = lambda: True
    assert sglang_kvtc_cpu.activate() is None
    assert before == (list(sys.meta_path), dict(os.environ), sorted(sys.modules))
"""


def test_nothing_changes_beside_an_accelerator(cuda_only_kernels: Path) -> None:
    run_python(NOTHING_CHANGES, cuda_only_kernels, FAKE_GPU="1")


def test_nothing_changes_when_the_user_turned_the_cpu_engine_off(cuda_only_kernels: Path) -> None:
    run_python(NOTHING_CHANGES, cuda_only_kernels, SGLANG_USE_CPU_ENGINE="0")
