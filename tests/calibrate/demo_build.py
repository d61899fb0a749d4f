"""A build of the demo model for a test's child process: real files, but copied instead of dequantised."""

import shutil
from pathlib import Path

from sglang_kvtc.calibrate import demo_model


def build_by_copying(source: Path, cache_dir: Path) -> tuple[Path, int]:
    """Return the directory and how many builds this process did."""
    builds = 0

    def convert(gguf: Path, target: Path) -> None:
        nonlocal builds
        builds += 1
        shutil.copytree(source, target, dirs_exist_ok=True)
        (target / "kvtc-manifest.json").unlink()

    demo_model._convert = convert
    return demo_model.demo_model_dir(cache_dir), builds
