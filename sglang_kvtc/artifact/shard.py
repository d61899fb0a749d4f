"""Which part of a model an artifact is for, when SGLang spreads the model over tensor and pipeline parallel ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from sglang_kvtc.errors import ArtifactError, ConfigError
from sglang_kvtc.types import ModelGeometry

SHARD_KEY = "shard"
"""Provenance of a rank's artifact; an artifact of the whole model has none."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the model. layers, kv_heads: [start, stop) in the whole model."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    layers: tuple[int, int]
    kv_heads: tuple[int, int]

    @property
    def name(self) -> str:
        """Name of the folder that holds this rank's artifact."""
        return f"tp{self.tp_rank}-pp{self.pp_rank}"

    @property
    def part(self) -> tuple[slice, slice]:
        """Layers and KV heads as slices; ranks that replicate a KV head have equal parts."""
        return slice(*self.layers), slice(*self.kv_heads)

    def geometry(self, whole: ModelGeometry) -> ModelGeometry:
        """Geometry of this rank's cache."""
        layers, kv_heads = self.layers, self.kv_heads
        return dataclasses.replace(whole, num_layers=layers[1] - layers[0], num_kv_heads=kv_heads[1] - kv_heads[0])

    def record(self) -> str:
        """The shard as JSON, for the provenance of its artifact."""
        return msgspec.json.encode(self, order="sorted").decode()


def shards_of(geometry: ModelGeometry, tp_size: int, pp_size: int) -> tuple[Shard, ...]:
    """The shard of every rank, tensor parallel ranks first, as SGLang 0.5.23 lays out weights and KV pools.

    KV heads are split evenly, and each is replicated on neighbouring ranks where there are more ranks than heads
    (`QKVParallelLinear`). Layers that do not divide evenly go to the last stages (`get_pp_indices`). Raises
    ConfigError, naming the flag, for a division that SGLang refuses as well.
    """
    heads, layers = geometry.num_kv_heads, geometry.num_layers
    if tp_size < 1 or (heads % tp_size and tp_size % heads):
        raise ConfigError(f"--tp {tp_size}: expected a divisor or a multiple of the model's {heads} KV heads")
    if not 1 <= pp_size <= layers:
        raise ConfigError(f"--pp {pp_size}: expected 1 to {layers}, the number of layers")
    heads_per_rank, replicas = max(heads // tp_size, 1), max(tp_size // heads, 1)
    shards = []
    for pp_rank in range(pp_size):
        for tp_rank in range(tp_size):
            head = tp_rank // replicas * heads_per_rank
            shards.append(
                Shard(
                    tp_rank,
                    tp_size,
                    pp_rank,
                    pp_size,
                    (_first_layer(layers, pp_rank, pp_size), _first_layer(layers, pp_rank + 1, pp_size)),
                    (head, head + heads_per_rank),
                )
            )
    return tuple(shards)


def _first_layer(num_layers: int, pp_rank: int, pp_size: int) -> int:
    """First layer of a stage; the last `num_layers % pp_size` stages have one layer more than the others."""
    per_stage, rest = divmod(num_layers, pp_size)
    return pp_rank * per_stage + max(0, pp_rank - (pp_size - rest))


def shard_of(provenance: Mapping[str, str]) -> Shard | None:
    """The shard that a provenance names; None for the whole model. Raises ArtifactError for a malformed record."""
    record = provenance.get(SHARD_KEY)
    if record is None:
        return None
    try:
        return msgspec.json.decode(record, type=Shard)
    except msgspec.MsgspecError as error:
        raise ArtifactError(f"provenance.{SHARD_KEY}: {error}") from error


def check_shard(provenance: Mapping[str, str], geometry: ModelGeometry) -> None:
    """Raise ArtifactError unless the shard record, if there is one, agrees with the artifact's geometry."""
    shard = shard_of(provenance)
    if shard is None:
        return
    for kind, rank, size in (("tp", shard.tp_rank, shard.tp_size), ("pp", shard.pp_rank, shard.pp_size)):
        if not 0 <= rank < size:
            raise ArtifactError(f"provenance.{SHARD_KEY}: {kind} rank {rank} of {size} ranks")
    for key, (start, stop), expected in (
        ("layers", shard.layers, geometry.num_layers),
        ("kv_heads", shard.kv_heads, geometry.num_kv_heads),
    ):
        if start < 0 or stop - start != expected:
            raise ArtifactError(f"provenance.{SHARD_KEY}.{key} is [{start}, {stop}): the geometry has {expected}")
