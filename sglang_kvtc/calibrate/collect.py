"""Run the model over calibration text and keep what fitting needs, in memory that does not grow with the text.

Per side (K before RoPE, V) a token is one row of p features. Most sequences feed the statistics of the PCA; a few are
set aside for the bit allocation, whose error estimate would be too good on rows the basis was fitted to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.artifact.shard import Shard
from sglang_kvtc.calibrate.causal_lm import prefill
from sglang_kvtc.calibrate.corpus import TokenSequence
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.calibrate.statistics import SideStatistics
from sglang_kvtc.codec.rope import rotate
from sglang_kvtc.types import ModelGeometry, Side

SINK_TOKENS = 4
"""First positions of every sequence, which are not sampled (KVTC section 3.1)."""
ALLOCATION_ONE_IN = 12
"""One sequence in so many is set aside for the bit allocation."""


@dataclass(slots=True)
class Collection:
    """The statistics of every part of the model that gets an artifact, and how many sequences they are of.

    shards: the parts, no two alike. statistics: by shard and side. num_sequences: of the calibration sequences, in
    their order, that have been run.
    """

    shards: tuple[Shard, ...]
    statistics: tuple[dict[Side, SideStatistics], ...]
    num_sequences: int = 0

    @classmethod
    def empty(
        cls, geometry: ModelGeometry, shards: Sequence[Shard], *, pca_rows: int | None, seed: int, device: torch.device
    ) -> Collection:
        """Nothing collected yet, of the distinct parts of `shards`.

        geometry: of the whole model. pca_rows: rows to sample for a randomized PCA, or None for the covariance of all.
        """
        distinct = distinct_parts(shards)
        statistics = tuple(
            {
                side: SideStatistics.empty(shard.geometry(geometry).features(side), pca_rows, seed, device)
                for side in Side
            }
            for shard in distinct
        )
        return cls(distinct, statistics)

    def merge(self, other: Collection) -> None:
        """Add what another run over other text collected of the same parts."""
        for ours, theirs in zip(self.statistics, other.statistics, strict=True):
            for side in Side:
                ours[side].merge(theirs[side])
        self.num_sequences += other.num_sequences


def distinct_parts(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """One shard for every part of the model: of ranks that replicate KV heads, the first one."""
    parts: dict[tuple[tuple[int, int], tuple[int, int]], Shard] = {}
    for shard in shards:
        parts.setdefault((shard.layers, shard.kv_heads), shard)
    return tuple(parts.values())


def collect(
    model: Any,
    sequences: Sequence[TokenSequence],
    rope: RopeSpec,
    collection: Collection,
    *,
    seed: int,
    progress: Progress,
    on_sequence: Callable[[], object] = lambda: None,
) -> None:
    """Prefill the sequences that `collection` does not have yet and add them to it.

    on_sequence: called after each sequence, when `collection` is complete up to there.
    """
    # Drawn, not every twelfth: sources and lengths take turns, so a fixed step could always meet the same kind.
    aside = set(random.Random(seed).sample(range(len(sequences)), -(-len(sequences) // ALLOCATION_ONE_IN)))
    waiting = range(collection.num_sequences, len(sequences))
    num_tokens = sum(len(sequences[number].token_ids) for number in waiting)
    with progress.stage("forward passes", num_tokens, "tokens") as advance:
        for number in waiting:
            token_ids = sequences[number].token_ids
            heads = _heads_before_rope(model, token_ids, rope)
            for shard, statistics in zip(collection.shards, collection.statistics, strict=True):
                layers, kv_heads = shard.part
                for side in Side:
                    target = statistics[side].allocation if number in aside else statistics[side].moments
                    target.add(as_rows(heads[side][layers, :, kv_heads]))
            collection.num_sequences = number + 1
            on_sequence()
            advance(len(token_ids))


def feature_rows(model: Any, token_ids: Sequence[int], rope: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """K before RoPE and V of one sequence without its sinks: two f32[num_tokens - sinks, p] on the CPU."""
    keys, values = _heads_before_rope(model, token_ids, rope)
    return as_rows(keys), as_rows(values)


def _heads_before_rope(model: Any, token_ids: Sequence[int], rope: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as f32[num_layers, num_tokens - sinks, num_kv_heads, head size] on the CPU."""
    keys, values = (heads[:, SINK_TOKENS:].to("cpu", torch.float32) for heads in prefill(model, token_ids))
    positions = torch.arange(SINK_TOKENS, len(token_ids))
    return rotate(keys, positions, rope, inverse=True), values


def as_rows(heads: torch.Tensor) -> torch.Tensor:
    """[num_layers, num_tokens, num_kv_heads, head_dim] to [num_tokens, p], features by layer, KV head and channel."""
    return heads.transpose(0, 1).flatten(1)
