"""One tiny model and its artifact for all benchmarks of accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from calibrate.tiny_llama import save_tiny_llama

from sglang_kvtc.artifact.io import save_artifact
from sglang_kvtc.artifact.schema import Artifact
from sglang_kvtc.calibrate.calibration import calibrate
from sglang_kvtc.calibrate.causal_lm import load_model
from sglang_kvtc.calibrate.demo_artifact import demo_calibration
from sglang_kvtc.calibrate.progress import SilentProgress


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def artifact(model_dir: Path) -> Artifact:
    """With plans of ratio 4 and 8."""
    made = calibrate(demo_calibration(model_dir, 3000, (4.0, 8.0)), SilentProgress())
    return save_artifact(made, model_dir.parent / "artifact")


@pytest.fixture(scope="session")
def artifact_dir(model_dir: Path, artifact: Artifact) -> Path:
    return model_dir.parent / "artifact"


@pytest.fixture(scope="session")
def model(model_dir: Path) -> Any:
    return load_model(model_dir, "float32")
