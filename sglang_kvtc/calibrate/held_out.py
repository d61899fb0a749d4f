"""What a new artifact loses on text it was not fitted to, measured with the real codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvtc.artifact.schema import Artifact
from sglang_kvtc.artifact.shard import Shard
from sglang_kvtc.calibrate.causal_lm import DTYPES, prefill
from sglang_kvtc.calibrate.collect import SINK_TOKENS, as_rows
from sglang_kvtc.calibrate.corpus import TokenSequence
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.codec.rope import rotate
from sglang_kvtc.codec.transform import weigh
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import Side, TokenRange

_NO_DIGEST = bytes(16)
"""Stands for the digest that an artifact only gets when it is written."""


@dataclass(frozen=True, slots=True)
class HeldOutError:
    """Squared error of one plan's K and V over their variance, whole and by layer. Lower is better, 1 loses all.

    Both are those of the features as the artifact weighs them, so that what hardly matters hardly counts.
    k, v: over all layers. k_layers, v_layers: one number per layer. ratio: 16-bit bytes of the coded tokens over all
    bytes of their frames. ratio_range: lowest and highest of a sequence.
    """

    target_ratio: float
    ratio: float
    ratio_range: tuple[float, float]
    k: float
    v: float
    k_layers: tuple[float, ...]
    v_layers: tuple[float, ...]

    def total(self, side: Side) -> float:
        return self.k if side is Side.K else self.v


def measure_held_out(
    model: Any,
    sequences: Sequence[TokenSequence],
    artifacts: Sequence[Artifact],
    shards: Sequence[Shard],
    progress: Progress,
) -> list[list[HeldOutError]]:
    """Code and decode the KV of every sequence, sinks left out, with every plan of every artifact.

    shards: the part of the model that each artifact is for. Returns, by artifact, one error per plan.
    """
    measurements = [
        [_Measurement(dataclasses.replace(artifact, digest=_NO_DIGEST), plan.target_ratio) for plan in artifact.plans]
        for artifact in artifacts
    ]
    num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    with progress.stage("held-out error", num_tokens, "tokens") as advance:
        for sequence in sequences:
            whole = [heads[:, SINK_TOKENS:].to("cpu") for heads in prefill(model, sequence.token_ids)]
            for artifact, shard, of_plans in zip(artifacts, shards, measurements, strict=True):
                layers, kv_heads = shard.part
                cache_dtype = DTYPES[artifact.geometry.dtype]
                keys, values = (heads[layers, :, kv_heads].to(cache_dtype).contiguous() for heads in whole)
                variances = _variances(keys, values, artifact)
                for measurement in of_plans:
                    measurement.add(keys, values, variances)
            advance(len(sequence.token_ids))
    return [[measurement.result() for measurement in of_plans] for of_plans in measurements]


class _Measurement:
    """Error and size of one plan, summed over sequences."""

    def __init__(self, artifact: Artifact, target_ratio: float) -> None:
        self._artifact = artifact
        self._codec = KVCodec(artifact, CodecConfig(target_ratio=target_ratio, sink_tokens=0, window_tokens=0))
        shape = (len(Side), artifact.geometry.num_layers)
        self._errors = torch.zeros(shape, dtype=torch.float64)
        self._variances = torch.zeros(shape, dtype=torch.float64)
        self._num_elements: list[int] = []
        self._stored_bytes: list[int] = []

    def add(self, keys: torch.Tensor, values: torch.Tensor, variances: torch.Tensor) -> None:
        """Add the KV of one sequence from position SINK_TOKENS on, with its `_variances`."""
        layers = range(keys.shape[0])
        stored_bytes = 0
        for tokens, encoded in self._codec.encode_node(keys, values, SINK_TOKENS):
            opened = self._codec.open(encoded.frame, tokens.start, len(tokens))
            window = slice(tokens.start - SINK_TOKENS, tokens.stop - SINK_TOKENS)
            for side, decoded in zip(Side, opened.reconstruct(layers, TokenRange(0, len(tokens))), strict=True):
                original = (keys if side is Side.K else values)[:, window]
                rows = _rows(decoded.float() - original.float(), side, tokens.start, self._artifact)
                self._errors[side] += _squares(rows, side, self._artifact)
            stored_bytes += len(encoded.frame)
        self._variances += variances
        self._num_elements.append(keys.numel() + values.numel())
        self._stored_bytes.append(stored_bytes)

    def result(self) -> HeldOutError:
        layers = self._errors / self._variances.clamp(min=torch.finfo(torch.float64).tiny)
        whole = self._errors.sum(dim=1) / self._variances.sum(dim=1)
        # A sequence that ends with its sinks stores nothing.
        ratios = [
            2 * elements / stored
            for elements, stored in zip(self._num_elements, self._stored_bytes, strict=True)
            if stored
        ]
        if not ratios:
            raise ConfigError("the held-out text has no tokens after the sink positions: add text to --data")
        return HeldOutError(
            target_ratio=self._codec.target_ratio,
            ratio=2 * sum(self._num_elements) / sum(self._stored_bytes),
            ratio_range=(min(ratios), max(ratios)),
            k=float(whole[Side.K]),
            v=float(whole[Side.V]),
            k_layers=tuple(layers[Side.K].tolist()),
            v_layers=tuple(layers[Side.V].tolist()),
        )


def _variances(keys: torch.Tensor, values: torch.Tensor, artifact: Artifact) -> torch.Tensor:
    """Squared distance of K before RoPE and of V from the artifact's means, by side and layer: f64[2, num_layers]."""
    variances = []
    for side in Side:
        rows = _rows((keys if side is Side.K else values).float(), side, SINK_TOKENS, artifact)
        basis = artifact.basis(side)
        if basis is not None:
            rows -= torch.from_numpy(basis.mean)
        variances.append(_squares(rows, side, artifact))
    return torch.stack(variances)


def _rows(heads: torch.Tensor, side: Side, start_position: int, artifact: Artifact) -> torch.Tensor:
    """Features f32[num_tokens, p] of K or V: [num_layers, num_tokens, num_kv_heads, head size]."""
    if side is Side.V:
        return as_rows(heads)
    positions = torch.arange(start_position, start_position + heads.shape[1])
    return as_rows(rotate(heads, positions, artifact.rope, inverse=True))


def _squares(rows: torch.Tensor, side: Side, artifact: Artifact) -> torch.Tensor:
    """Squared norms of weighted features, summed over tokens: f64[num_layers]."""
    basis = artifact.basis(side)
    if basis is not None and basis.weights is not None:
        rows = weigh(rows, torch.from_numpy(basis.weights))
    return rows.double().square().sum(dim=0).view(artifact.geometry.num_layers, -1).sum(dim=1)
