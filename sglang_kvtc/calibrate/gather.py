"""The statistics that a calibration is fitted to, and the text it is checked on: collected, continued or merged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_kvtc.artifact.schema import Artifact
from sglang_kvtc.artifact.shard import Shard
from sglang_kvtc.calibrate.causal_lm import load_tokenizer
from sglang_kvtc.calibrate.collect import Collection, collect, distinct_parts
from sglang_kvtc.calibrate.corpus import (
    BUILTIN,
    TokenSequence,
    domains_of,
    read_documents,
    split_documents,
    token_sequences,
)
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.calibrate.settings import Calibration, most_pca_rows, planned_pca_rows
from sglang_kvtc.calibrate.source_code import COLLECTING_FILES, code_digest
from sglang_kvtc.calibrate.work_dir import Run, Text, WorkDir, load_merged, text_digest
from sglang_kvtc.errors import ConfigError

logger = logging.getLogger(__name__)

HELD_OUT_TOKENS = 4096
_CHARACTERS_READ_PER_TOKEN = 64


@dataclass(frozen=True, slots=True)
class Gathered:
    """texts: what the collection is of, one per merged run. held_out: sequences of documents that none of it is of.

    sequences: of `data`, for what is measured beside the statistics.
    """

    collection: Collection
    sequences: list[TokenSequence]
    texts: tuple[Text, ...]
    held_out: list[TokenSequence]
    held_out_corpus: str


def gather(
    settings: Calibration, model: Any, artifact: Artifact, shards: Sequence[Shard], progress: Progress
) -> Gathered:
    """Run the model over the text, as far as that is not done yet, or merge the statistics of finished runs.

    artifact: of the whole model, without bases. Raises ConfigError for data or work folders that cannot be used,
    ArtifactError for statistics that cannot be read or written.
    """
    tokenizer = load_tokenizer(settings.model_dir)
    max_characters = settings.num_tokens * _CHARACTERS_READ_PER_TOKEN
    documents, held_out = split_documents(read_documents(settings.data, tokenizer, max_characters))
    held_out_corpus = " ".join(settings.data)
    if not held_out:
        held_out_corpus = BUILTIN
        _, held_out = split_documents(read_documents([BUILTIN], tokenizer))
    checking = token_sequences(
        held_out, tokenizer, num_tokens=HELD_OUT_TOKENS, max_length=settings.max_length, seed=settings.seed
    )

    whole = artifact.geometry
    pca_rows = planned_pca_rows(settings, whole, [shard.geometry(whole) for shard in shards])
    run = Run(
        model=artifact.fingerprint.digest,
        code=code_digest(COLLECTING_FILES),
        dtype=settings.dtype,
        pca="exact" if pca_rows is None else "randomized",
        max_length=settings.max_length,
        shards=distinct_parts(shards),
    )
    sequences = token_sequences(
        documents, tokenizer, num_tokens=settings.num_tokens, max_length=settings.max_length, seed=settings.seed
    )
    if settings.merge:
        collection, texts = load_merged(settings.merge, whole, run, most_rows=most_pca_rows(whole), device=model.device)
        return Gathered(collection, sequences, texts, checking, held_out_corpus)

    found = sum(len(sequence.token_ids) for sequence in sequences)
    if found < settings.num_tokens:
        raise ConfigError(
            f"--data {' '.join(settings.data)} yields {found:,} tokens beside its held-out part, --tokens asks for "
            f"{settings.num_tokens:,}: add text or ask for fewer"
        )
    text = Text(
        corpus=" ".join(settings.data),
        seed=settings.seed,
        digest=text_digest(sequences),
        num_sequences=len(sequences),
        domains=domains_of(sequences, settings.max_length),
        pca_rows=pca_rows,
    )
    collection = Collection.empty(whole, shards, pca_rows=pca_rows, seed=settings.seed, device=model.device)
    work_dir = None if settings.work_dir is None else WorkDir(settings.work_dir, run, text)
    if work_dir is not None:
        work_dir.restore(collection)
        if collection.num_sequences:
            logger.info("%s has %d of %d sequences", settings.work_dir, collection.num_sequences, len(sequences))

    def keep() -> None:
        is_due = collection.num_sequences % settings.save_every == 0 or collection.num_sequences == len(sequences)
        if work_dir is not None and is_due:
            work_dir.save(collection)

    collect(model, sequences, artifact.rope, collection, seed=settings.seed, progress=progress, on_sequence=keep)
    return Gathered(collection, sequences, (text,), checking, held_out_corpus)
