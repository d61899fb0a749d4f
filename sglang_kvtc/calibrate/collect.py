"""Run the model over calibration text and keep what fitting needs, in memory that does not grow with the text.

Per side (K before RoPE, V) a token is one row of p features. Most sequences feed the statistics of the PCA; a few are
set aside for the bit allocation, whose error estimate would be too good on rows the basis was fitted to.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.calibrate.causal_lm import prefill
from sglang_kvtc.calibrate.corpus import TokenSequence
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.codec.allocate import SAMPLE_TOKENS
from sglang_kvtc.codec.rope import rotate
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import ModelGeometry, Side

SINK_TOKENS = 4
"""First positions of every sequence, which are not sampled (KVTC section 3.1)."""
ALLOCATION_ONE_IN = 12
"""One sequence in so many is set aside for the bit allocation."""
_BLOCK_ROWS = 2048
_PANEL_FEATURES = 1024


class Covariance:
    """Streaming mean and covariance of rows of p features; memory is one p x p matrix in fp64.

    Rows are shifted by the mean of the first block, so that a large common offset costs no precision.
    """

    def __init__(self, num_features: int, device: torch.device) -> None:
        self._block = torch.empty(_BLOCK_ROWS, num_features, device=device)
        self._fill = 0
        self._shift: torch.Tensor | None = None
        self._sum = torch.zeros(num_features, dtype=torch.float64, device=device)
        self._products = torch.zeros(num_features, num_features, dtype=torch.float64, device=device)
        self.num_rows = 0

    def add(self, rows: torch.Tensor) -> None:
        """Add `rows`: float[n, p], on any device."""
        for part in rows.split(_BLOCK_ROWS):
            head = part[: _BLOCK_ROWS - self._fill]
            self._block[self._fill : self._fill + len(head)] = head
            self._fill += len(head)
            if self._fill == _BLOCK_ROWS:
                self._flush()
                rest = part[len(head) :]
                self._block[: len(rest)] = rest
                self._fill = len(rest)

    def _flush(self) -> None:
        block = self._block[: self._fill]
        if self._shift is None:
            self._shift = block.mean(dim=0)
        block -= self._shift
        self._sum += block.sum(dim=0, dtype=torch.float64)
        # Only the panels on and right of the diagonal: the matrix is symmetric, which saves almost half the work.
        for panel in self._panels():
            self._products[panel, panel.start :] += block[:, panel].T @ block[:, panel.start :]
        self.num_rows += self._fill
        self._fill = 0

    def _panels(self) -> Iterator[slice]:
        num_features = len(self._sum)
        for start in range(0, num_features, _PANEL_FEATURES):
            yield slice(start, min(start + _PANEL_FEATURES, num_features))

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean: f64[p] and covariance: f64[p, p] (divided by n). The accumulator is used up."""
        if self._fill:
            self._flush()
        if self._shift is None:
            raise ConfigError("no calibration tokens are left after the sink positions: ask for more --tokens")
        for panel in self._panels():
            self._products[panel.stop :, panel] = self._products[panel, panel.stop :].T
        offset = self._sum / self.num_rows
        covariance = self._products.div_(self.num_rows)
        covariance -= torch.outer(offset, offset)
        return self._shift.double() + offset, covariance


class Reservoir:
    """A uniform sample of at most `capacity` of all rows added, reproducible from `seed` (algorithm R, in blocks)."""

    def __init__(self, capacity: int, num_features: int, dtype: torch.dtype, seed: int) -> None:
        self._rows = torch.empty(capacity, num_features, dtype=dtype)
        self._generator = torch.Generator().manual_seed(seed)
        self._seen = 0

    def add(self, rows: torch.Tensor) -> None:
        """Add `rows`: float[n, p], on any device."""
        room = min(max(len(self._rows) - self._seen, 0), len(rows))
        self._rows[self._seen : self._seen + room] = rows[:room].to(self._rows)
        self._seen += room
        late = rows[room:]
        if len(late) == 0:
            return
        # Row number i (from 0) of all takes a uniform slot of i + 1 and is kept when that slot exists.
        numbers = torch.arange(self._seen, self._seen + len(late), dtype=torch.float64)
        slots = (torch.rand(len(late), generator=self._generator, dtype=torch.float64) * (numbers + 1)).long()
        for index in torch.nonzero(slots < len(self._rows)).flatten().tolist():
            self._rows[slots[index]] = late[index].to(self._rows)
        self._seen += len(late)

    @property
    def rows(self) -> torch.Tensor:
        """dtype[min(capacity, rows added), p], on the CPU."""
        return self._rows[: self._seen]


@dataclass(frozen=True, slots=True)
class SideStatistics:
    """What fitting one side needs.

    moments: the covariance for an exact PCA, or a sample of bf16 rows for a randomized one. allocation: f32 rows of
    other sequences.
    """

    moments: Covariance | Reservoir
    allocation: Reservoir


def collect(
    model: Any,
    sequences: Sequence[TokenSequence],
    geometry: ModelGeometry,
    rope: RopeSpec,
    *,
    pca_rows: int | None,
    seed: int,
    progress: Progress,
) -> dict[Side, SideStatistics]:
    """Prefill every sequence and gather the statistics of both sides.

    pca_rows: rows to sample for a randomized PCA, or None to accumulate the covariance of all rows.
    """
    statistics = {
        side: SideStatistics(
            moments=Covariance(geometry.features(side), model.device)
            if pca_rows is None
            else Reservoir(pca_rows, geometry.features(side), torch.bfloat16, seed),
            allocation=Reservoir(SAMPLE_TOKENS, geometry.features(side), torch.float32, seed),
        )
        for side in Side
    }
    # Drawn, not every twelfth: sources and lengths take turns, so a fixed step could always meet the same kind.
    aside = set(random.Random(seed).sample(range(len(sequences)), -(-len(sequences) // ALLOCATION_ONE_IN)))
    num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    with progress.stage("forward passes", num_tokens, "tokens") as advance:
        for number, sequence in enumerate(sequences):
            for side, rows in zip(Side, feature_rows(model, sequence.token_ids, rope), strict=True):
                target = statistics[side]
                (target.allocation if number in aside else target.moments).add(rows)
            advance(len(sequence.token_ids))
    return statistics


def feature_rows(model: Any, token_ids: Sequence[int], rope: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """K before RoPE and V of one sequence without its sinks: two f32[num_tokens - sinks, p] on the CPU."""
    keys, values = (heads[:, SINK_TOKENS:].to("cpu", torch.float32) for heads in prefill(model, token_ids))
    positions = torch.arange(SINK_TOKENS, len(token_ids))
    return as_rows(rotate(keys, positions, rope, inverse=True)), as_rows(values)


def as_rows(heads: torch.Tensor) -> torch.Tensor:
    """[num_layers, num_tokens, num_kv_heads, head_dim] to [num_tokens, p], features by layer, KV head and channel."""
    return heads.transpose(0, 1).flatten(1)
