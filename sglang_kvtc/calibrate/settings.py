"""What a calibration can be asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import harmonic_mean
from typing import Literal

import torch

from sglang_kvtc.calibrate.causal_lm import DTYPES
from sglang_kvtc.calibrate.corpus import BUILTIN
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import ModelGeometry, Side

Pca = Literal["auto", "exact", "randomized"]
Split = Literal["auto", "fixed", "optimal"]
Preset = Literal["sensitivity", "paper"]
LOSSLESS, LARGEST_RATIO = 1.0, 1000.0
"""The least target ratio, which needs neither basis nor plan, and the largest one."""
WINDOW_RATIO = 8.0
"""At 8 the demo model's output is as far from the uncompressed cache's as with windows in fp8 (`bench quality`)."""
MAX_RANK = 10_000
"""Rank cap of a randomized PCA (KVTC appendix B.1)."""
_EXACT_MAX_FEATURES = 8192
"""Up to here an exact PCA takes about half a minute per side on two CPU cores and under 2 GB."""
_PCA_SAMPLE_BYTES = 8 << 30
"""Memory for the rows of a randomized PCA, both sides together."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What `sglang-kvtc calibrate` was asked to do.

    preset: "paper" minimises the squared error of K and V as KVTC does; "sensitivity" the error that this makes in the
    model's output, and its plans are uniform instead of grouped (SidePlan).
    data: `builtin`, files and directories. max_length: tokens of a long sequence. dtype: of the forward passes. pca:
    `auto` is exact up to 8192 features. rank: cap on the components that are fitted, 0 for the default.
    layers_per_group: layers that share a PCA, 0 for all of them.

    Plans: one for each of `ratios`, target ratios of K and V together, of which 1 alone is lossless; `split` gives both
    sides that ratio ("fixed"), or shares the same bits between them in the best way ("optimal", and "auto" in preset
    "sensitivity"). Or one for each pair of `k_ratios` and `v_ratios`. Or one for each of `target_errors`, the largest
    ratio that keeps this error. In each case one more plan, of `window_ratio`, for the last tokens of a node
    (codec.segments), unless another is as fine; 0 for none. max_error: largest relative squared error on held-out text,
    of weighted K or V, that a plan may have; force writes what exceeds it all the same.

    tp_size, pp_size: ranks that the model is spread over, each of which gets an artifact of its own. work_dir: where
    the statistics are kept every `save_every` sequences, to continue from. merge: work folders of finished runs whose
    statistics are used instead of collecting them over `data`, on which the sensitivity and the held-out error are
    measured all the same.

    Raises ConfigError, naming the flag, for values that cannot work.
    """

    model_dir: Path
    preset: Preset = "sensitivity"
    data: tuple[str, ...] = (BUILTIN,)
    num_tokens: int = 160_000
    ratios: tuple[float, ...] = (16.0,)
    k_ratios: tuple[float, ...] = ()
    v_ratios: tuple[float, ...] = ()
    split: Split = "auto"
    target_errors: tuple[float, ...] = ()
    window_ratio: float = WINDOW_RATIO
    seed: int = 0
    max_length: int = 1024
    dtype: str = "bfloat16"
    pca: Pca = "auto"
    rank: int = 0
    layers_per_group: int = 0
    device: str = "cpu"
    max_error: float = 0.5
    force: bool = False
    tp_size: int = 1
    pp_size: int = 1
    work_dir: Path | None = None
    save_every: int = 64
    merge: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        self._check_targets()
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype}: expected one of {', '.join(DTYPES)}")
        for flag, value, smallest in (
            ("--tokens", self.num_tokens, 1),
            ("--max-length", self.max_length, 32),
            ("--rank", self.rank, 0),
            ("--layers-per-group", self.layers_per_group, 0),
            ("--save-every", self.save_every, 1),
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
        if self.merge and self.work_dir is not None:
            raise ConfigError("--merge reads finished statistics and collects none that --work-dir could keep")

    def _check_targets(self) -> None:
        for flag, ratios in (("--ratio", self.ratios), ("--k-ratio", self.k_ratios), ("--v-ratio", self.v_ratios)):
            if any(not LOSSLESS <= ratio <= LARGEST_RATIO for ratio in ratios):
                raise ConfigError(f"{flag} {_listed(ratios)}: expected numbers from 1 to {LARGEST_RATIO:g}")
        if self.window_ratio and not LOSSLESS < self.window_ratio <= LARGEST_RATIO:
            raise ConfigError(
                f"--window-ratio {self.window_ratio:g}: expected a number above 1 and up to {LARGEST_RATIO:g}, or 0"
            )
        if not self.ratios or len(set(self.ratios)) != len(self.ratios):
            raise ConfigError(f"--ratio {_listed(self.ratios)}: expected different numbers")
        if LOSSLESS in self.ratios and len(self.ratios) > 1:
            raise ConfigError("--ratio 1 is lossless and needs no calibration: every artifact offers it already")
        if len(self.k_ratios) != len(self.v_ratios):
            raise ConfigError(
                f"--k-ratio {_listed(self.k_ratios)} and --v-ratio {_listed(self.v_ratios)}: expected as many of one "
                "as of the other"
            )
        if any(not 0 < error < 1 for error in self.target_errors):
            raise ConfigError(f"--target-error {_listed(self.target_errors)}: expected numbers between 0 and 1")
        if self.target_errors and self.k_ratios:
            raise ConfigError("--target-error finds the ratios of K and V itself: leave --k-ratio and --v-ratio out")
        if self.split == "optimal" and (self.target_errors or self.k_ratios):
            raise ConfigError("--split optimal shares the bits of a --ratio: it goes with no other target")

    @property
    def ratio_pairs(self) -> tuple[tuple[float, float], ...]:
        """Target ratios of K and of V, by plan, that of windows last."""
        pairs = tuple(zip(self.k_ratios or self.ratios, self.v_ratios or self.ratios, strict=True))
        return pairs + tuple((ratio, ratio) for ratio in self.window_ratios(map(harmonic_mean, pairs)))

    def window_ratios(self, others: Iterable[float]) -> tuple[float, ...]:
        """The ratio of the plan of windows, or nothing where a plan among `others` is as fine."""
        if not self.window_ratio or min(others) <= self.window_ratio:
            return ()
        return (self.window_ratio,)

    @property
    def shares_bits(self) -> bool:
        """Whether the bits of a ratio are shared between K and V in the best way."""
        if self.target_errors or self.k_ratios:
            return False
        return self.split == "optimal" or (self.split == "auto" and self.preset == "sensitivity")

    @property
    def is_lossless(self) -> bool:
        return self.ratios == (LOSSLESS,) and not self.k_ratios and not self.target_errors


def most_pca_rows(geometry: ModelGeometry) -> int:
    """Rows of the whole model that a randomized PCA may sample."""
    bytes_per_row = sum(geometry.features(side) for side in Side) * torch.bfloat16.itemsize
    return _PCA_SAMPLE_BYTES // bytes_per_row


def planned_pca_rows(settings: Calibration, whole: ModelGeometry, parts: Sequence[ModelGeometry]) -> int | None:
    """Rows to sample for a randomized PCA; None for an exact one.

    whole: geometry of the model. parts: of the ranks, each of which has a PCA of its own.
    """
    num_features = max(part.features(side) for part in parts for side in Side)
    if settings.pca == "exact" or (settings.pca == "auto" and num_features <= _EXACT_MAX_FEATURES):
        return None
    return min(settings.num_tokens, most_pca_rows(whole))


def _listed(ratios: Sequence[float]) -> str:
    return ",".join(f"{ratio:g}" for ratio in ratios)
