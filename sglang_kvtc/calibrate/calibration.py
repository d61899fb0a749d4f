"""The whole calibration: text and a model in, an artifact out."""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import filelock
import torch
import xxhash

from sglang_kvtc import __version__
from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.artifact.io import load_artifact, save_artifact
from sglang_kvtc.artifact.schema import Artifact, Plan
from sglang_kvtc.calibrate.causal_lm import DTYPES, load_config, load_model, load_tokenizer, model_geometry
from sglang_kvtc.calibrate.collect import collect
from sglang_kvtc.calibrate.corpus import (
    BUILTIN,
    TokenSequence,
    read_documents,
    split_documents,
    token_sequences,
)
from sglang_kvtc.calibrate.fit import fit_side
from sglang_kvtc.calibrate.held_out import measure_held_out
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.codec.rope import rope_spec_from_config
from sglang_kvtc.errors import ArtifactError, ConfigError
from sglang_kvtc.types import ModelGeometry, Side

logger = logging.getLogger(__name__)

Pca = Literal["auto", "exact", "randomized"]
LOSSLESS = 1.0
"""The target ratio that needs neither basis nor plan."""
MAX_RANK = 10_000
"""Rank cap of a randomized PCA (KVTC appendix B.1)."""
_EXACT_MAX_FEATURES = 8192
"""Up to here an exact PCA takes about half a minute per side on two CPU cores and under 2 GB."""
_PCA_SAMPLE_BYTES = 8 << 30
"""Memory for the rows of a randomized PCA, both sides together."""
_HELD_OUT_TOKENS = 4096
_CHARACTERS_READ_PER_TOKEN = 64
_DECIDING_FILES = (
    "artifact/schema.py",
    *(f"calibrate/{name}.py" for name in ("calibration", "causal_lm", "collect", "corpus", "fit", "pca")),
    *(f"codec/{name}.py" for name in ("allocate", "quantize", "rope")),
)
"""What a cached artifact depends on, besides its settings; other edits need no new calibration."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What `sglang-kvtc calibrate` was asked to do.

    data: `builtin`, files and directories. ratios: target ratios, largest first or not; 1 alone is lossless.
    max_length: tokens of a long sequence. dtype: of the forward passes. pca: `auto` is exact up to 8192 features.
    rank: cap on the components that are fitted, 0 for the default. max_error: largest relative squared error on
    held-out text, of K or V, that a plan may have.

    Raises ConfigError, naming the flag, for values that cannot work.
    """

    model_dir: Path
    data: tuple[str, ...] = (BUILTIN,)
    num_tokens: int = 160_000
    ratios: tuple[float, ...] = (16.0,)
    seed: int = 0
    max_length: int = 1024
    dtype: str = "bfloat16"
    pca: Pca = "auto"
    rank: int = 0
    device: str = "cpu"
    max_error: float = 0.5

    def __post_init__(self) -> None:
        if not self.ratios or len(set(self.ratios)) != len(self.ratios):
            raise ConfigError(f"--ratio {_listed(self.ratios)}: expected different numbers")
        if any(not LOSSLESS <= ratio <= 1000 for ratio in self.ratios):
            raise ConfigError(f"--ratio {_listed(self.ratios)}: expected numbers from 1 to 1000")
        if LOSSLESS in self.ratios and len(self.ratios) > 1:
            raise ConfigError("--ratio 1 is lossless and needs no calibration: every artifact offers it already")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype}: expected one of {', '.join(DTYPES)}")
        for flag, value, smallest in (
            ("--tokens", self.num_tokens, 1),
            ("--max-length", self.max_length, 32),
            ("--rank", self.rank, 0),
        ):
            if value < smallest:
                raise ConfigError(f"{flag} {value}: expected at least {smallest}")
        try:
            is_there = torch.device(self.device).type == "cpu" or torch.get_device_module(self.device).is_available()
        except RuntimeError as error:
            raise ConfigError(f"--device {self.device}: {error}") from error
        if not is_there:
            raise ConfigError(f"--device {self.device}: torch finds no such device on this machine")
        if not self.max_error > 0:
            raise ConfigError(f"--max-error {self.max_error}: expected a positive number")


def calibrate(settings: Calibration, progress: Progress) -> Artifact:
    """Run the model over the text, fit both sides and check the result on held-out text.

    The same settings, model, text and machine give the same artifact. Raises ConfigError for unusable settings or
    data, UnsupportedError for a model whose cache cannot be coded, ArtifactError for a checkpoint that cannot be read
    or a plan whose held-out error is above `max_error`.
    """
    config = load_config(settings.model_dir)
    geometry = model_geometry(config)
    artifact = Artifact(
        geometry=geometry,
        rope=rope_spec_from_config(config.to_dict()),
        fingerprint=fingerprint_model(settings.model_dir),
        k=None,
        v=None,
        plans=(),
        provenance={"preset": "lossless", "version": __version__},
    )
    if settings.ratios == (LOSSLESS,):
        return artifact

    training, held_out, held_out_corpus = _sequences(settings)
    model = load_model(settings.model_dir, settings.dtype, settings.device)
    pca_rows = _pca_rows(settings, geometry)
    statistics = collect(
        model, training, geometry, artifact.rope, pca_rows=pca_rows, seed=settings.seed, progress=progress
    )
    fitted = {
        side: fit_side(
            side,
            statistics.pop(side),
            settings.ratios,
            rank=settings.rank or MAX_RANK,
            seed=settings.seed,
            device=model.device,
            progress=progress,
        )
        for side in Side
    }
    (k_basis, k_plans), (v_basis, v_plans) = fitted[Side.K], fitted[Side.V]
    plans = tuple(Plan(*plan) for plan in zip(settings.ratios, k_plans, v_plans, strict=True))
    artifact = dataclasses.replace(artifact, k=k_basis, v=v_basis, plans=plans)
    errors = measure_held_out(model, held_out, artifact, progress)
    for error in errors:
        for side in Side:
            if not error.total(side) <= settings.max_error:
                raise ArtifactError(
                    f"ratio {error.target_ratio:g} loses {error.total(side):.3f} of the variance of {side.name} on "
                    f"held-out text, more than --max-error {settings.max_error:g}: lower --ratio or raise --tokens"
                )
    return dataclasses.replace(
        artifact,
        provenance={
            "preset": "paper",
            "version": __version__,
            "code": code_digest(),
            "corpus": " ".join(settings.data),
            "tokens": str(settings.num_tokens),
            "documents": str(len({sequence.name for sequence in training})),
            "max_length": str(settings.max_length),
            "seed": str(settings.seed),
            "dtype": settings.dtype,
            "pca": "exact" if pca_rows is None else f"randomized, {pca_rows} rows",
            "held_out_corpus": held_out_corpus,
            "held_out_error": json.dumps([dataclasses.asdict(error) for error in errors]),
        },
    )


def cached_calibration(settings: Calibration, cache_dir: Path, progress: Progress) -> Path:
    """Calibrate on built-in text, or find the artifact that the same settings, checkpoint and code gave before.

    Returns the artifact's folder below `cache_dir`/artifacts, one per key; a damaged one is made anew. Raises
    ConfigError for data other than `builtin`: files are no part of the key and may have changed.
    """
    if settings.data != (BUILTIN,):
        raise ConfigError(f"only a calibration on {BUILTIN} data is cached, got {' '.join(settings.data)}")
    key = xxhash.xxh3_128()
    fields = dataclasses.asdict(settings) | {"model_dir": fingerprint_model(settings.model_dir).digest}
    key.update(json.dumps(fields, sort_keys=True).encode())
    key.update(platform.python_version().encode())
    key.update(code_digest().encode())
    path = cache_dir / "artifacts" / key.hexdigest()
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{path}.lock"):
        try:
            if path.exists():
                load_artifact(path)
                return path
        except ArtifactError as error:
            logger.warning("%s; it is made again", error)
        save_artifact(calibrate(settings, progress), path)
    return path


def code_digest() -> str:
    """32 hex digits over the source files that decide what a calibration yields."""
    package = Path(__file__).parents[1]
    digest = xxhash.xxh3_128()
    for name in _DECIDING_FILES:
        digest.update(f"{name}\n".encode())
        digest.update((package / name).read_bytes())
    return digest.hexdigest()


def _sequences(settings: Calibration) -> tuple[list[TokenSequence], list[TokenSequence], str]:
    """Sequences to fit on, sequences to check on, and where the latter come from."""
    tokenizer = load_tokenizer(settings.model_dir)
    max_characters = settings.num_tokens * _CHARACTERS_READ_PER_TOKEN
    documents, held_out = split_documents(read_documents(settings.data, tokenizer, max_characters))
    held_out_corpus = " ".join(settings.data)
    if not held_out:
        held_out_corpus = BUILTIN
        _, held_out = split_documents(read_documents([BUILTIN], tokenizer))
    training = token_sequences(
        documents, tokenizer, num_tokens=settings.num_tokens, max_length=settings.max_length, seed=settings.seed
    )
    found = sum(len(sequence.token_ids) for sequence in training)
    if found < settings.num_tokens:
        raise ConfigError(
            f"--data {' '.join(settings.data)} yields {found:,} tokens beside its held-out part, --tokens asks for "
            f"{settings.num_tokens:,}: add text or ask for fewer"
        )
    checking = token_sequences(
        held_out, tokenizer, num_tokens=_HELD_OUT_TOKENS, max_length=settings.max_length, seed=settings.seed
    )
    return training, checking, held_out_corpus


def _pca_rows(settings: Calibration, geometry: ModelGeometry) -> int | None:
    """Rows to sample for a randomized PCA; None for an exact one."""
    num_features = max(geometry.features(side) for side in Side)
    if settings.pca == "exact" or (settings.pca == "auto" and num_features <= _EXACT_MAX_FEATURES):
        return None
    bytes_per_row = sum(geometry.features(side) for side in Side) * torch.bfloat16.itemsize
    return min(settings.num_tokens, _PCA_SAMPLE_BYTES // bytes_per_row)


def _listed(ratios: Sequence[float]) -> str:
    return ",".join(f"{ratio:g}" for ratio in ratios)
