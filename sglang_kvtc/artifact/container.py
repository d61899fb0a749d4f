"""What our safetensors files have in common: one JSON text, a schema version and a digest in their metadata."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import xxhash
from safetensors import SafetensorError

from sglang_kvtc.errors import ArtifactError

VERSION_KEY = "schema_version"
DIGEST_KEY = "digest"


def content_digest(
    schema_version: int, text: str, tensors: Iterable[tuple[str, str, Sequence[int], memoryview]]
) -> bytes:
    """XXH3-128 over the JSON text and, in the order given, each tensor's name, dtype, shape and bytes."""
    digest = xxhash.xxh3_128()
    digest.update(f"{schema_version}\n{text}\n".encode())
    for name, dtype, shape, content in tensors:
        digest.update(f"{name} {dtype} {list(shape)}\n".encode())
        digest.update(content)
    return digest.digest()


def replace_file(target: Path, write: Callable[[Path], object], what: str) -> None:
    """Let `write` make a file and put it at `target` in one step: a reader sees the old one or the new one.

    Raises ArtifactError, naming `what`, when it cannot be written.
    """
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished)
        os.replace(unfinished, target)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"cannot write the {what} {target}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def check_metadata(metadata: dict[str, str], text_key: str, schema_version: int, what: str, again: str) -> None:
    """Raise ArtifactError unless the metadata are those of `what` (a noun) in this schema version.

    again: what the user can do about another version.
    """
    missing = {VERSION_KEY, text_key, DIGEST_KEY} - metadata.keys()
    if missing:
        raise ArtifactError(f"it holds no {what}: its metadata lack {', '.join(sorted(missing))}")
    if metadata[VERSION_KEY] != str(schema_version):
        raise ArtifactError(
            f"it has schema version {metadata[VERSION_KEY]}, this version reads {schema_version}: {again} or install "
            "the version that wrote it"
        )
