"""Which of our source files decide what a calibration yields: other edits need no new one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash

COLLECTING_FILES = (
    *(f"calibrate/{name}.py" for name in ("causal_lm", "collect", "corpus", "statistics")),
    "codec/rope.py",
)
"""What collected statistics depend on, besides the settings."""
SENSITIVITY_FILES = (*(f"calibrate/{name}.py" for name in ("causal_lm", "sensitivity")), "codec/rope.py")
"""What a measured sensitivity depends on, besides the settings and the text."""
DECIDING_FILES = (
    "artifact/schema.py",
    "artifact/shard.py",
    *(
        f"calibrate/{name}.py"
        for name in ("calibration", "fit", "pca", "plans", "sensitivity", "settings", "uniform_plans")
    ),
    *(f"codec/{name}.py" for name in ("allocate", "quantize", "transform", "uniform")),
    *COLLECTING_FILES,
)
"""What an artifact depends on, besides the settings."""


def code_digest(names: Iterable[str] = DECIDING_FILES) -> str:
    """32 hex digits over source files of the package."""
    package = Path(__file__).parents[1]
    digest = xxhash.xxh3_128()
    for name in names:
        digest.update(f"{name}\n".encode())
        digest.update((package / name).read_bytes())
    return digest.hexdigest()
