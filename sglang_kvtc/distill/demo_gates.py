"""The gates of the demo model: one distillation serves benchmarks and engine tests."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import filelock
import xxhash

from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.calibrate.demo_model import default_cache_dir, demo_model_dir
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.distill.distillation import Distillation, distill, remove_activations, save_distilled
from sglang_kvtc.distill.train import TrainSettings

_DECIDING_FOLDERS = ("distill", "gates")


def demo_gates(progress: Progress, cache_dir: Path | None = None) -> Path:
    """File of the demo model's gates, made on first use (about twenty minutes on two idle cores)."""
    cache_dir = cache_dir or default_cache_dir()
    settings = Distillation(demo_model_dir(cache_dir))
    training = TrainSettings()
    key = xxhash.xxh3_128()
    fields = {**asdict(settings), "training": asdict(training)} | {
        "model_dir": fingerprint_model(settings.model_dir).digest
    }
    key.update(json.dumps(fields, sort_keys=True).encode())
    package = Path(__file__).parents[1]
    for folder in _DECIDING_FOLDERS:
        for file in sorted((package / folder).glob("*.py")):
            key.update(file.read_bytes())
    path = cache_dir / "gates" / f"{key.hexdigest()}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{path}.lock"):
        if not path.exists():
            work_dir = path.with_suffix(".work")
            save_distilled(distill(settings, training, work_dir, progress), settings, training, path)
            remove_activations(work_dir)
    return path
