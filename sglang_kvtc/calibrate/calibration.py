"""The whole calibration: text and a model in, an artifact per rank out."""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import filelock
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from sglang_kvtc import __version__
from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.artifact.io import load_artifact, save_artifact
from sglang_kvtc.artifact.schema import Artifact, Plan
from sglang_kvtc.artifact.shard import SHARD_KEY, Shard, shards_of
from sglang_kvtc.bitstream.header import plan_code
from sglang_kvtc.calibrate import plans as grouped_plans
from sglang_kvtc.calibrate import uniform_plans
from sglang_kvtc.calibrate.causal_lm import load_config, load_model, model_geometry
from sglang_kvtc.calibrate.corpus import BUILTIN, merged_domains
from sglang_kvtc.calibrate.fit import SideFit, fit_side
from sglang_kvtc.calibrate.gather import Gathered, gather
from sglang_kvtc.calibrate.held_out import HeldOutError, measure_held_out
from sglang_kvtc.calibrate.plans import Fits, overall_ratio
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.calibrate.sensitivity import Sensitivity, measure_sensitivity, sensitivity_sequences
from sglang_kvtc.calibrate.settings import MAX_RANK, Calibration
from sglang_kvtc.calibrate.source_code import SENSITIVITY_FILES, code_digest
from sglang_kvtc.calibrate.statistics import SideStatistics
from sglang_kvtc.calibrate.work_dir import SensitivityFile, SensitivityRun, text_digest
from sglang_kvtc.codec.rope import rope_spec_from_config
from sglang_kvtc.errors import ArtifactError, ConfigError
from sglang_kvtc.types import ModelGeometry, Side

logger = logging.getLogger(__name__)


class _Plans(Protocol):
    """What the modules of grouped and of uniform plans have in common."""

    def plans_at_ratios(
        self, fits: Fits, geometry: ModelGeometry, ratios: Sequence[tuple[float, float]], progress: Progress
    ) -> tuple[Plan, ...]: ...

    def plans_with_best_split(self, fits: Fits, ratios: Sequence[float], progress: Progress) -> tuple[Plan, ...]: ...

    def plans_within_errors(self, fits: Fits, errors: Sequence[float], progress: Progress) -> tuple[Plan, ...]: ...


def calibrate(settings: Calibration, progress: Progress) -> Artifact:
    """The artifact of a model that runs on one rank: see `calibrate_shards`. Raises ConfigError for several ranks."""
    if settings.tp_size != 1 or settings.pp_size != 1:
        raise ConfigError(f"--tp {settings.tp_size} --pp {settings.pp_size}: one artifact is for one rank")
    (artifact,) = calibrate_shards(settings, progress)
    return artifact


def calibrate_shards(settings: Calibration, progress: Progress) -> tuple[Artifact, ...]:
    """Run the model over the text once, fit both sides of every rank's part and check the results on held-out text.

    Returns one artifact per rank, in the order of `artifact.shard.shards_of`. The same settings, model, text and
    machine give the same artifacts, whether or not the run was interrupted and continued. Raises ConfigError for
    unusable settings or data, UnsupportedError for a model whose cache cannot be coded, ArtifactError for a checkpoint
    or statistics that cannot be read and, unless `force` is set, for a plan whose held-out error is above `max_error`.
    """
    config = load_config(settings.model_dir)
    whole = model_geometry(config)
    shards = shards_of(whole, settings.tp_size, settings.pp_size)
    _check_names(settings, whole)
    bare = Artifact(
        geometry=whole,
        rope=rope_spec_from_config(config.to_dict()),
        fingerprint=fingerprint_model(settings.model_dir),
        k=None,
        v=None,
        plans=(),
        provenance={"preset": "lossless", "version": __version__},
    )
    if settings.is_lossless:
        return tuple(_for_rank(bare, shard, whole) for shard in shards)

    model = load_model(settings.model_dir, settings.dtype, settings.device)
    gathered = gather(settings, model, bare, shards, progress)
    sensitivity = _sensitivity(settings, model, bare, gathered, progress)
    weights = None if sensitivity is None else sensitivity.weights()
    parts = gathered.collection.shards
    fitted = [
        _fit_part(
            settings,
            _for_rank(bare, shard, whole),
            statistics,
            None if weights is None else (weights[0][shard.part], weights[1][shard.part]),
            model.device,
            progress,
        )
        for shard, statistics in zip(parts, gathered.collection.statistics, strict=True)
    ]
    errors = measure_held_out(model, gathered.held_out, fitted, parts, progress)
    excess = [_above_bound(of_part, settings.max_error) for of_part in errors]
    for line in (line for lines in excess for line in lines):
        if not settings.force:
            raise ArtifactError(f"{line}: lower --ratio, raise --tokens, or write it all the same with --force")
        logger.warning("%s; written because of --force", line)

    common = _provenance(settings, gathered)
    if sensitivity is not None:
        common["sensitivity"] = sensitivity.describe()
    done = {}
    for shard, artifact, of_part, lines in zip(parts, fitted, errors, excess, strict=True):
        records = {"held_out_error": json.dumps([dataclasses.asdict(error) for error in of_part])}
        if lines:
            records["forced"] = "; ".join(lines)
        done[shard.layers, shard.kv_heads] = dataclasses.replace(artifact, provenance=common | records)
    return tuple(_for_rank(done[shard.layers, shard.kv_heads], shard, whole) for shard in shards)


def _for_rank(artifact: Artifact, shard: Shard, whole: ModelGeometry) -> Artifact:
    """The artifact with a rank's geometry and record; that of an only rank has no record."""
    record = {} if shard.tp_size == shard.pp_size == 1 else {SHARD_KEY: shard.record()}
    return dataclasses.replace(artifact, geometry=shard.geometry(whole), provenance=artifact.provenance | record)


def _sensitivity(
    settings: Calibration, model: Any, bare: Artifact, gathered: Gathered, progress: Progress
) -> Sensitivity | None:
    """What preset `sensitivity` weighs errors by; None in preset `paper`."""
    if settings.preset == "paper":
        return None
    sequences = sensitivity_sequences(gathered.sequences)
    file = None
    if settings.work_dir is not None:
        run = SensitivityRun(
            model=bare.fingerprint.digest,
            code=code_digest(SENSITIVITY_FILES),
            dtype=settings.dtype,
            seed=settings.seed,
            text=text_digest(sequences),
        )
        file = SensitivityFile(settings.work_dir, run)
    return measure_sensitivity(model, sequences, bare.rope, seed=settings.seed, progress=progress, file=file)


def _fit_part(
    settings: Calibration,
    bare: Artifact,
    statistics: dict[Side, SideStatistics],
    weights: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None,
    device: torch.device,
    progress: Progress,
) -> Artifact:
    """The artifact of one part of the model. bare: with its geometry, without bases. weights: of K and V."""
    geometry = bare.geometry
    fits: dict[Side, SideFit] = {
        side: fit_side(
            side,
            statistics[side],
            rank=settings.rank or MAX_RANK,
            group_features=settings.layers_per_group * geometry.features(side) // geometry.num_layers,
            seed=settings.seed,
            device=device,
            progress=progress,
            weights=None if weights is None else weights[side],
        )
        for side in Side
    }
    plans = _plans(settings, fits, geometry, progress)
    k_basis, v_basis = (fits[side].side_basis([plan.side(side) for plan in plans]) for side in Side)
    return dataclasses.replace(bare, k=k_basis, v=v_basis, plans=plans)


def _plans(
    settings: Calibration, fits: dict[Side, SideFit], geometry: ModelGeometry, progress: Progress
) -> tuple[Plan, ...]:
    kind: _Plans = grouped_plans
    if settings.preset == "sensitivity":
        kind = uniform_plans
    if settings.target_errors:
        plans = kind.plans_within_errors(fits, settings.target_errors, progress)
        window_ratios = settings.window_ratios(plan.target_ratio for plan in plans)
        return plans + kind.plans_at_ratios(fits, geometry, [(ratio, ratio) for ratio in window_ratios], progress)
    if settings.shares_bits:
        return kind.plans_with_best_split(fits, [ratio for ratio, _ in settings.ratio_pairs], progress)
    return kind.plans_at_ratios(fits, geometry, settings.ratio_pairs, progress)


def _check_names(settings: Calibration, geometry: ModelGeometry) -> None:
    """Raise ConfigError when two plans would have the same overall ratio, which is their name."""
    ratios = [overall_ratio(geometry, *pair) for pair in settings.ratio_pairs]
    for index, ratio in enumerate(ratios):
        if plan_code(ratio) in map(plan_code, ratios[:index]):
            k_ratio, v_ratio = settings.ratio_pairs[index]
            raise ConfigError(
                f"--k-ratio {k_ratio:g} with --v-ratio {v_ratio:g} is ratio {ratio:g} in all, as another plan is"
            )


def _above_bound(errors: Sequence[HeldOutError], max_error: float) -> list[str]:
    """One sentence for every plan and side that loses more than allowed."""
    return [
        f"ratio {error.target_ratio:g} loses {error.total(side):.3f} of the variance of {side.name} on held-out text, "
        f"more than --max-error {max_error:g}"
        for error in errors
        for side in Side
        if not error.total(side) <= max_error
    ]


def _provenance(settings: Calibration, gathered: Gathered) -> dict[str, str]:
    """What an artifact was made from and how, apart from its errors."""
    domains = merged_domains([domain for text in gathered.texts for domain in text.domains])
    statistics = gathered.collection.statistics[0][Side.K]
    records = {
        "preset": settings.preset,
        "version": __version__,
        "code": code_digest(),
        "corpus": " ".join(dict.fromkeys(text.corpus for text in gathered.texts)),
        "tokens": str(sum(domain.tokens for domain in domains)),
        "documents": str(sum(domain.documents for domain in domains)),
        "domains": json.dumps([dataclasses.asdict(domain) for domain in domains]),
        "max_length": str(settings.max_length),
        "seed": " ".join(dict.fromkeys(str(text.seed) for text in gathered.texts)),
        "dtype": settings.dtype,
        "pca": statistics.describe_pca(),
        "held_out_corpus": gathered.held_out_corpus,
    }
    if len(gathered.texts) > 1:
        records["merged_runs"] = str(len(gathered.texts))
    if settings.layers_per_group:
        records["layers_per_group"] = str(settings.layers_per_group)
    if settings.target_errors:
        records["target_errors"] = " ".join(f"{error:g}" for error in settings.target_errors)
    elif settings.k_ratios:
        pairs = zip(settings.k_ratios, settings.v_ratios, strict=True)
        records["split"] = " ".join(f"{k_ratio:g}:{v_ratio:g}" for k_ratio, v_ratio in pairs)
    else:
        records["split"] = "optimal" if settings.shares_bits else "fixed"
    return records


def cached_calibration(settings: Calibration, cache_dir: Path, progress: Progress) -> Path:
    """Calibrate on built-in text, or find the artifact that the same settings, checkpoint and code gave before.

    Returns the artifact's folder below `cache_dir`/artifacts, one per key; a damaged one is made anew. Raises
    ConfigError for data other than `builtin` and for merged runs: files are no part of the key and may have changed.
    """
    if settings.data != (BUILTIN,) or settings.merge:
        raise ConfigError(f"only a calibration on {BUILTIN} data is cached, got {' '.join(settings.data)}")
    key = xxhash.xxh3_128()
    # Where the statistics are kept meanwhile changes nothing.
    fields = dataclasses.asdict(settings) | {
        "model_dir": fingerprint_model(settings.model_dir).digest,
        "work_dir": None,
        "save_every": 0,
    }
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
