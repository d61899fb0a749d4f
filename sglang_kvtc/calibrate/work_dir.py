"""What a calibration has done so far on disk, so that an interrupted one continues and runs over different text merge.

Two safetensors files, one of the collected statistics (the tensors of `SideStatistics` as `<part>.<side>.<name>`) and
one of the sensitivity. In their metadata stand one JSON text with what they are of and XXH3-128 over text and tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from sglang_kvtc.artifact.container import check_metadata, content_digest, replace_file
from sglang_kvtc.artifact.shard import Shard
from sglang_kvtc.calibrate.collect import Collection
from sglang_kvtc.calibrate.corpus import Domain, TokenSequence
from sglang_kvtc.errors import ArtifactError, ConfigError
from sglang_kvtc.types import ModelGeometry, Side

SCHEMA_VERSION = 1
FILE_NAME = "statistics.safetensors"
SENSITIVITY_FILE_NAME = "sensitivity.safetensors"
Record = TypeVar("Record", bound=msgspec.Struct)


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How statistics came about: what has to be equal for runs over different text to be merged.

    model: digest of its fingerprint. code: digest of the source files that decide what is collected. shards: parts of
    the model, with statistics of their own.
    """

    model: str
    code: str
    dtype: str
    pca: str
    max_length: int
    shards: tuple[Shard, ...]


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What statistics were collected on.

    digest: of all token ids in order. pca_rows: see `collect.Collection.empty`.
    """

    corpus: str
    seed: int
    digest: str
    num_sequences: int
    domains: tuple[Domain, ...]
    pca_rows: int | None

    @property
    def num_tokens(self) -> int:
        return sum(domain.tokens for domain in self.domains)


class SensitivityRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sensitivity is measured on, and how; `text` is the digest of its sequences."""

    model: str
    code: str
    dtype: str
    seed: int
    text: str


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run: Run
    text: Text
    done: int


def text_digest(sequences: Sequence[TokenSequence]) -> str:
    """32 hex digits over the tokens of all sequences, their bounds included."""
    digest = xxhash.xxh3_128()
    for sequence in sequences:
        digest.update(f"{len(sequence.token_ids)}\n".encode())
        digest.update(torch.tensor(sequence.token_ids, dtype=torch.int64).numpy().data)
    return digest.hexdigest()


class WorkDir:
    """The folder of one calibration's statistics."""

    def __init__(self, directory: Path, run: Run, text: Text) -> None:
        self._file = directory / FILE_NAME
        self._run, self._text = run, text

    def restore(self, collection: Collection) -> None:
        """Fill an empty collection with what an earlier run left here, or leave it empty when there is nothing.

        Raises ConfigError when the folder holds statistics of another calibration, ArtifactError for a damaged file.
        """
        if not self._file.exists():
            return
        record = _read_record(self._file, _Record)
        _check_same(self._file, "statistics", (self._run, record.run), (self._text, record.text))
        _restore_tensors(self._file, collection)
        collection.num_sequences = record.done

    def save(self, collection: Collection) -> None:
        """Write the collection; whoever reads sees the last one or this one. Raises ArtifactError when it cannot."""
        tensors = {
            f"{prefix}.{name}": tensor.detach().cpu().contiguous()
            for prefix, statistics in _by_prefix(collection)
            for name, tensor in statistics.tensors().items()
        }
        _write(self._file, _Record(self._run, self._text, collection.num_sequences), tensors, "statistics")


class SensitivityFile:
    """The sensitivity of a calibration as far as it is measured: named tensors, whose meaning is the caller's."""

    def __init__(self, directory: Path, run: SensitivityRun) -> None:
        self._file = directory / SENSITIVITY_FILE_NAME
        self._run = run

    def load(self) -> dict[str, torch.Tensor]:
        """What was saved last, nothing if nothing was.

        Raises ConfigError when the folder holds that of another calibration, ArtifactError for a damaged file.
        """
        if not self._file.exists():
            return {}
        _check_same(self._file, "sensitivity", (self._run, _read_record(self._file, SensitivityRun)))
        return load_file(self._file)

    def save(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replace what was saved. Raises ArtifactError when it cannot."""
        _write(self._file, self._run, tensors, "the sensitivity")


def load_merged(
    directories: Sequence[Path], geometry: ModelGeometry, run: Run, *, most_rows: int, device: torch.device
) -> tuple[Collection, tuple[Text, ...]]:
    """Statistics of several finished runs as one, and what each of them was collected on.

    geometry: of the whole model. run: what all of them have to be. most_rows: cap on the sample of a randomized PCA.
    Raises ConfigError for a folder whose run was another one or is not finished, or for the same text twice;
    ArtifactError for a missing or damaged file.
    """
    merged: Collection | None = None
    texts: list[Text] = []
    records = [(directory / FILE_NAME, _read_record(directory / FILE_NAME, _Record)) for directory in directories]
    pca_rows = sum(record.text.pca_rows or 0 for _, record in records)
    for file, record in records:
        differing = [name for name in run.__struct_fields__ if getattr(run, name) != getattr(record.run, name)]
        if differing:
            raise ConfigError(f"--merge {file.parent}: made with another {', '.join(differing)} than this calibration")
        if record.done < record.text.num_sequences:
            raise ConfigError(
                f"--merge {file.parent}: only {record.done} of {record.text.num_sequences} sequences are done, finish "
                "that run first"
            )
        if record.text.digest in (text.digest for text in texts):
            raise ConfigError(f"--merge {file.parent}: its text was already merged, it would count twice")
        collection = Collection.empty(
            geometry, run.shards, pca_rows=record.text.pca_rows, seed=record.text.seed, device=device
        )
        _restore_tensors(file, collection)
        if merged is None:
            rows = None if record.text.pca_rows is None else min(pca_rows, most_rows)
            merged = Collection.empty(geometry, run.shards, pca_rows=rows, seed=record.text.seed, device=device)
        merged.merge(collection)
        texts.append(record.text)
    if merged is None:
        raise ConfigError("--merge: expected the work folders of at least one run")
    return merged, tuple(texts)


def _by_prefix(collection: Collection) -> Iterator[tuple[str, Any]]:
    for part, statistics in enumerate(collection.statistics):
        for side in Side:
            yield f"{part}.{side.name.lower()}", statistics[side]


def _check_same(file: Path, what: str, *pairs: tuple[msgspec.Struct, msgspec.Struct]) -> None:
    """pairs: what this calibration is, and what the file is of."""
    differing = [
        name
        for ours, theirs in pairs
        for name in ours.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if differing:
        raise ConfigError(
            f"--work-dir {file.parent} holds the {what} of another calibration (other {', '.join(differing)}): name "
            f"another folder or remove {file.name} from it"
        )


def _write(file: Path, record: msgspec.Struct, tensors: dict[str, torch.Tensor], what: str) -> None:
    description = msgspec.json.encode(record, order="sorted").decode()
    digest = _digest(description, sorted(tensors), tensors.__getitem__)
    metadata = {"schema_version": str(SCHEMA_VERSION), "description": description, "digest": digest.hex()}
    replace_file(file, lambda unfinished: save_file(tensors, unfinished, metadata), what)


def _digest(description: str, names: Sequence[str], tensor: Callable[[str], torch.Tensor]) -> bytes:
    def parts() -> Iterator[tuple[str, str, Sequence[int], memoryview]]:
        for name in names:
            value = tensor(name)
            # As bytes: numpy has no bfloat16.
            yield name, str(value.dtype), value.shape, value.flatten().view(torch.uint8).numpy().data

    return content_digest(SCHEMA_VERSION, description, parts())


def _read_record(file: Path, kind: type[Record]) -> Record:
    if not file.is_file():
        raise ArtifactError(
            f"there are no statistics at {file}: run `sglang-kvtc calibrate --work-dir` to collect some"
        )
    try:
        with safe_open(file, framework="pt") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
            check_metadata(metadata, "description", SCHEMA_VERSION, "calibration statistics", "collect them again")
            digest = _digest(metadata["description"], sorted(opened.keys()), opened.get_tensor)
        if digest.hex() != metadata["digest"]:
            raise ArtifactError("it changed after it was written (its digest does not match): remove it")
        return msgspec.json.decode(metadata["description"], type=kind)
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"{file} is not a readable file of statistics: {error}") from error
    except ArtifactError as error:
        raise ArtifactError(f"{file}: {error}") from error


def _restore_tensors(file: Path, collection: Collection) -> None:
    """Put the tensors of a file whose record was checked into a collection of the same parts."""
    with safe_open(file, framework="pt") as opened:
        names = sorted(opened.keys())
        for prefix, statistics in _by_prefix(collection):
            start = f"{prefix}."
            statistics.restore(
                {name.removeprefix(start): opened.get_tensor(name) for name in names if name.startswith(start)}
            )
