"""Which checkpoint an artifact was made for: a wrong one would restore plausible garbage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from sglang_kvtc.artifact.schema import ModelFingerprint
from sglang_kvtc.errors import ArtifactError, UnsupportedError

SAMPLE_BYTES = 1 << 20
_KV_CONFIG_FIELDS = (
    "architectures",
    "head_dim",
    "hidden_size",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "v_head_dim",
    "vocab_size",
)
_LENGTH_BYTES = 8


def fingerprint_model(model_dir: str | Path) -> ModelFingerprint:
    """Identify the checkpoint in a local directory.

    The digest (32 hex digits, XXH3-128) covers the fields of config.json that shape the KV cache and, of every
    *.safetensors file in order of names: its name, size, header (names, dtypes and shapes of all tensors) and the first
    and last MiB of its tensors. So it costs a few MiB per file, not the checkpoint's size, and changes with another
    checkpoint of the same shape; it is no protection against a deliberate change in between.

    Raises ArtifactError when files are missing or unreadable and UnsupportedError when config.json names no
    architecture.
    """
    directory = Path(model_dir)
    try:
        config = _read_config(directory / "config.json")
        shards = sorted(directory.glob("*.safetensors"))
        if not shards:
            raise ArtifactError(f"{directory} has no *.safetensors files: only safetensors checkpoints are supported")
        digest = xxhash.xxh3_128()
        fields = {key: config[key] for key in _KV_CONFIG_FIELDS if key in config}
        digest.update(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
        for shard in shards:
            _update_with_shard(digest, shard)
    except OSError as error:
        raise ArtifactError(f"cannot read the checkpoint in {directory}: {error}") from error
    architectures = config.get("architectures")
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        raise UnsupportedError(f"{directory}/config.json names no architecture")
    return ModelFingerprint(architectures[0], _name(config, directory), digest.hexdigest())


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ArtifactError(f"there is no {file}: expected the directory of a Hugging Face checkpoint")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ArtifactError(f"{file} holds a {type(config).__name__}, expected a JSON object")
    return config


def _update_with_shard(digest: xxhash.xxh3_128, shard: Path) -> None:
    size = shard.stat().st_size
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header_end = _LENGTH_BYTES + length
        if not _LENGTH_BYTES <= header_end <= size:
            raise ArtifactError(f"{shard} is damaged: its header would end at byte {header_end} of {size}")
        digest.update(f"\n{shard.name} {size}\n".encode())
        digest.update(file.read(length))
        digest.update(file.read(SAMPLE_BYTES))
        file.seek(max(header_end, size - SAMPLE_BYTES))
        digest.update(file.read(SAMPLE_BYTES))


def _name(config: dict[str, Any], directory: Path) -> str:
    """A name for messages: what the checkpoint calls itself, else its directory."""
    name = config.get("_name_or_path")
    return name if isinstance(name, str) and name else directory.resolve().name
