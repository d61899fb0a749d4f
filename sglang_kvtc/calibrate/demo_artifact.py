"""The artifact of the demo model: one calibration serves the demo, the benchmarks and the engine tests."""

from __future__ import annotations

from pathlib import Path

from sglang_kvtc.calibrate.calibration import cached_calibration
from sglang_kvtc.calibrate.demo_model import default_cache_dir, demo_model_dir
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.calibrate.settings import Calibration

DEMO_RATIOS = (16.0, 8.0, 32.0, 40.0, 64.0)
"""The first one is the default; ratio 1 (lossless) comes with every artifact."""
DEMO_TOKENS = 48_000
"""Calibration tokens: 16,000 overfit measurably, 160,000 (the paper) take ten minutes on two cores."""


def demo_calibration(
    model_dir: Path, num_tokens: int = DEMO_TOKENS, ratios: tuple[float, ...] = DEMO_RATIOS
) -> Calibration:
    """Settings of the demo's calibration. The ratio 64 plan loses more than a user would be allowed to."""
    return Calibration(model_dir, num_tokens=num_tokens, ratios=ratios, max_error=1.0)


def demo_artifact(progress: Progress, cache_dir: Path | None = None) -> Path:
    """Folder of the demo model's artifact, made on first use (about two minutes on two idle cores)."""
    cache_dir = cache_dir or default_cache_dir()
    return cached_calibration(demo_calibration(demo_model_dir(cache_dir)), cache_dir, progress)
