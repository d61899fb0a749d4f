"""Text for calibration: documents, their split into calibration and held-out, and token sequences.

A source is `builtin` (text that ships with CPython, in two parts: the prose of `pydoc_data.topics` and the code of the
standard library) or a file or directory of the user. Everything is deterministic: the split depends on a document's
name alone, the order on the seed.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from transformers import PreTrainedTokenizerBase

from sglang_kvtc.errors import ConfigError

BUILTIN = "builtin"

_HELD_OUT_ONE_IN = 4
_SHORT_DIVISOR = 4
"""A short sequence has a quarter of the tokens of a long one."""
_CHARACTERS_PER_TOKEN = 4
"""Characters cut out of a document per wanted token, about what English text has."""
_SUFFIXES = (".txt", ".jsonl", ".parquet")
_NO_SOURCE_FOLDERS = ("test", "tests", "idle_test", "site-packages")


@dataclass(frozen=True, slots=True)
class Document:
    """One text. `source` groups documents that are drawn in turn, `name` decides the split."""

    source: str
    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        return xxhash.xxh3_64_intdigest(self.name.encode()) % _HELD_OUT_ONE_IN == 0


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Consecutive tokens of one document. `name` and `source` are the document's."""

    name: str
    token_ids: tuple[int, ...]
    source: str = ""


def read_documents(
    sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_characters: int = 1 << 28
) -> list[Document]:
    """Read the documents of `sources`: `builtin`, files (.txt, .jsonl, .parquet) or directories of such files.

    A .txt file is one document. A line of .jsonl or a row of .parquet is one document and has `text` or `messages`;
    messages are rendered with the tokenizer's chat template. Reading a source, or one of the two built-in kinds, ends
    after `max_characters`, so that data of any size can be named. Raises ConfigError for a missing or unreadable file,
    an unknown suffix, a malformed record, or .parquet without pyarrow.
    """
    documents: list[Document] = []
    for source in sources:
        streams = (
            (_builtin_prose(), _builtin_code()) if source == BUILTIN else (_user_documents(Path(source), tokenizer),)
        )
        for stream in streams:
            num_characters = 0
            for document in stream:
                if document.text.strip():
                    documents.append(document)
                    num_characters += len(document.text)
                if num_characters >= max_characters:
                    break
    if not documents:
        raise ConfigError(f"--data {' '.join(sources)}: no text found")
    return documents


def split_documents(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Return (calibration, held-out) by a fixed hash of the names. Data too small to split is all for calibration."""
    held_out = [document for document in documents if document.is_held_out]
    calibration = [document for document in documents if not document.is_held_out]
    return (calibration, held_out) if calibration else (held_out, [])


def token_sequences(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, *, num_tokens: int, max_length: int, seed: int
) -> list[TokenSequence]:
    """Cut `documents` into sequences of at most `max_length` tokens: `num_tokens` in all, or fewer if the text ends.

    Every source gives the same number of tokens while it lasts, half of them in long and half in short sequences (at
    most a quarter as long): the long ones of documents that are long enough and the short ones of the others, while
    there are both (KVTC appendix B.1). Documents are shuffled by `seed` and each gives one sequence before any of its
    kind gives a second; sequences do not overlap.
    """
    readers = [_SourceReader(group, tokenizer, max_length) for group in _shuffled_sources(documents, seed)]
    sequences: list[TokenSequence] = []
    missing = num_tokens
    while missing > 0 and readers:
        reader = min(readers, key=lambda reader: reader.num_tokens)
        sequence = reader.read(missing)
        if sequence is None:
            readers.remove(reader)
        else:
            sequences.append(sequence)
            missing -= len(sequence.token_ids)
    return sequences


@dataclass(frozen=True, slots=True)
class Domain:
    """What calibration sequences hold of one source: documents, tokens, and how many of the tokens are in long ones."""

    name: str
    documents: int
    tokens: int
    long_tokens: int


def domains_of(sequences: Sequence[TokenSequence], max_length: int) -> tuple[Domain, ...]:
    """Count sequences by source; long ones are those that `token_sequences` does not count as short."""
    by_source: dict[str, list[TokenSequence]] = {}
    for sequence in sequences:
        by_source.setdefault(sequence.source, []).append(sequence)
    return tuple(
        Domain(
            name=source,
            documents=len({sequence.name for sequence in group}),
            tokens=sum(len(sequence.token_ids) for sequence in group),
            long_tokens=sum(
                len(sequence.token_ids) for sequence in group if len(sequence.token_ids) > _short_length(max_length)
            ),
        )
        for source, group in by_source.items()
    )


def merged_domains(domains: Sequence[Domain]) -> tuple[Domain, ...]:
    """Domains of several runs added up by name; a document that two of them share counts twice."""
    merged: dict[str, Domain] = {}
    for domain in domains:
        before = merged.get(domain.name, Domain(domain.name, 0, 0, 0))
        merged[domain.name] = Domain(
            domain.name,
            before.documents + domain.documents,
            before.tokens + domain.tokens,
            before.long_tokens + domain.long_tokens,
        )
    return tuple(merged.values())


def _short_length(max_length: int) -> int:
    return max(max_length // _SHORT_DIVISOR, 1)


class _SourceReader:
    """Hands out the sequences of one source's documents, given in drawing order."""

    def __init__(self, documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._long_length = max_length
        # What is left of the documents, by whether it is enough for a long sequence, and where it starts.
        self._stretches: dict[bool, deque[tuple[Document, int]]] = {True: deque(), False: deque()}
        for document in documents:
            self._put_back(document, 0)
        self._short_length = _short_length(max_length)
        self._long_tokens = 0
        self._short_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._long_tokens + self._short_tokens

    def read(self, max_tokens: int) -> TokenSequence | None:
        """The next sequence, of at most `max_tokens` tokens; None when the source is used up."""
        is_long = self._long_tokens <= self._short_tokens
        stretches = self._stretches[is_long] or self._stretches[not is_long]
        if not stretches:
            return None
        document, start = stretches.popleft()
        length = self._long_length if is_long else self._short_length
        window = document.text[start : start + length * _CHARACTERS_PER_TOKEN]
        encoding = _encode(window, self._tokenizer)
        token_ids = encoding["input_ids"]
        # Slow tokenizers have no offsets: there the rest of a window that holds too many tokens is given up.
        cut = len(token_ids) > length and "offset_mapping" in encoding
        stop = start + (max(encoding["offset_mapping"][length][0], 1) if cut else len(window))
        self._put_back(document, stop)
        token_ids = token_ids[: min(length, max_tokens)]
        # What counts is how long it became: where no long documents are left, a short one stands in.
        if len(token_ids) > self._short_length:
            self._long_tokens += len(token_ids)
        else:
            self._short_tokens += len(token_ids)
        return TokenSequence(document.name, tuple(token_ids), document.source)

    def _put_back(self, document: Document, start: int) -> None:
        rest = len(document.text) - start
        if rest > 0:
            self._stretches[rest >= self._long_length * _CHARACTERS_PER_TOKEN].append((document, start))


def tokenize(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text that begins a sequence: the model's first token is added unless a template did so."""
    token_ids: list[int] = _encode(text, tokenizer)["input_ids"]
    return token_ids


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
    bos = tokenizer.bos_token
    has_bos = isinstance(bos, str) and text.startswith(bos)
    encoding: Mapping[str, Any] = tokenizer(
        text, add_special_tokens=not has_bos, return_offsets_mapping=tokenizer.is_fast, verbose=False
    )
    return encoding


def _shuffled_sources(documents: Sequence[Document], seed: int) -> list[list[Document]]:
    by_source: dict[str, list[Document]] = {}
    for document in documents:
        by_source.setdefault(document.source, []).append(document)
    generator = random.Random(seed)
    for group in by_source.values():
        generator.shuffle(group)
    return list(by_source.values())


def in_turn(documents: Sequence[Document], seed: int) -> list[Document]:
    """Shuffle by `seed`, then take one document of every source in turn until all are used up."""
    turns = itertools.zip_longest(*_shuffled_sources(documents, seed))
    return [document for turn in turns for document in turn if document is not None]


def _builtin_prose() -> Iterator[Document]:
    from pydoc_data import topics

    for name, text in topics.topics.items():
        yield Document("builtin prose", f"pydoc_data.topics:{name}", text)


def _builtin_code() -> Iterator[Document]:
    """Code of the standard library that people wrote: no tables, tests, build records or installed packages."""
    root = Path(os.__file__).parent
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # Not entered: an environment may hold a hundred thousand files.
        subfolders[:] = [name for name in subfolders if name not in _NO_SOURCE_FOLDERS]
        files += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    for path in sorted(files):
        package = path.parts[0].removesuffix(".py")
        if package in sys.stdlib_module_names and package not in ("encodings", "pydoc_data"):
            yield Document("builtin code", path.as_posix(), (root / path).read_text(encoding="utf-8", errors="replace"))


def _user_documents(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        if not files:
            raise ConfigError(f"--data {path}: no {', '.join(_SUFFIXES)} file in this directory")
    elif path.is_file():
        files = [path]
    else:
        raise ConfigError(f"--data {path}: no such file or directory ('{BUILTIN}' is the text that ships with Python)")
    for file in files:
        name = file.relative_to(path).as_posix() if file != path else path.name
        for index, text in _texts(file, tokenizer):
            yield Document(str(path), f"{name}{index}", text)


def _texts(file: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, str]]:
    """Yield (index inside the file, text) of every document of one file."""
    readers: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
        ".jsonl": _jsonl_records,
        ".parquet": _parquet_records,
    }
    if file.suffix == ".txt":
        yield "", _read(file)
    elif file.suffix in readers:
        for index, record in readers[file.suffix](file):
            yield index, _record_text(record, f"--data {file}{index}", tokenizer)
    else:
        raise ConfigError(f"--data {file}: unknown suffix {file.suffix!r}, expected one of {', '.join(_SUFFIXES)}")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {file}: cannot be read as UTF-8 text: {error}") from error


def _jsonl_records(file: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f":{number}", json.loads(line)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--data {file}:{number}: not a line of JSON in UTF-8: {error}") from error


def _parquet_records(file: Path) -> Iterator[tuple[str, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"--data {file}: reading .parquet needs pyarrow: pip install pyarrow")
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = [name for name in ("text", "messages") if name in table.schema_arrow.names]
        number = 0
        for batch in table.iter_batches(columns=columns):
            for record in batch.to_pylist():
                number += 1
                yield f":{number}", record
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"--data {file}: cannot be read as Parquet: {error}") from error


def _record_text(record: Any, where: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Text of one record: `text` as it is, or `messages` through the chat template."""
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return str(record["text"])
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: expected an object with 'text' (a string) or 'messages' (a list)")
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages):
        raise ConfigError(f"{where}: every message needs 'role' and 'content'")
    if tokenizer.chat_template is None:
        raise ConfigError(f"{where}: has 'messages', but the model's tokenizer has no chat template")
    return str(tokenizer.apply_chat_template(messages, tokenize=False))
