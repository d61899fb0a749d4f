"""Model directories that are built on first use and then found again, intact.

Beside its files such a directory has a manifest: what it was built by, and the digest of every file.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import filelock
import xxhash

logger = logging.getLogger(__name__)

_MANIFEST = "kvtc-manifest.json"


def cached_dir(target: Path, recipe: str, build: Callable[[Path], None]) -> Path:
    """Return `target`, filled by `build` unless it is there and intact.

    recipe: what the files depend on; a directory with another one is built again. build: writes the files into the
    empty directory that it is given.

    Every file is checked against the manifest before a directory is handed out, and a damaged one is built anew. A
    file lock lets several processes ask at once; a build that dies leaves nothing behind under the final name.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{target}.lock"):
        if _is_intact(target, recipe):
            return target
        if target.exists():
            logger.warning("the model in %s is damaged or of another version, it is built again", target)
        building = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".building", dir=target.parent))
        try:
            build(building)
            _write_manifest(building, recipe)
            building.chmod(0o755)
            if target.exists():
                shutil.rmtree(target)
            os.replace(building, target)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    logger.info("built the model in %s", target)
    return target


def _write_manifest(directory: Path, recipe: str) -> None:
    digests = {file.name: _digest(file) for file in sorted(directory.iterdir())}
    (directory / _MANIFEST).write_text(json.dumps({"recipe": recipe, "xxh3_128": digests}, indent=1), encoding="utf-8")


def _is_intact(directory: Path, recipe: str) -> bool:
    try:
        manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        return bool(
            manifest["recipe"] == recipe
            and all(_digest(directory / name) == digest for name, digest in manifest["xxh3_128"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
