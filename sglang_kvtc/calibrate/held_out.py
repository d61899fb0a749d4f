"""What a new artifact loses on text it was not fitted to, measured with the real codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvtc.artifact.schema import Artifact
from sglang_kvtc.calibrate.causal_lm import DTYPES, prefill
from sglang_kvtc.calibrate.collect import SINK_TOKENS, as_rows
from sglang_kvtc.calibrate.corpus import TokenSequence
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.codec.rope import rotate
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.types import Side, TokenRange

_NO_DIGEST = bytes(16)
"""Stands for the digest that an artifact only gets when it is written."""


@dataclass(frozen=True, slots=True)
class HeldOutError:
    """Squared error of one plan's K and V over their variance, whole and by layer. Lower is better, 1 loses all.

    k, v: over all layers. k_layers, v_layers: one number per layer. ratio: 16-bit bytes of the coded tokens over all
    bytes of their frames.
    """

    target_ratio: float
    ratio: float
    k: float
    v: float
    k_layers: tuple[float, ...]
    v_layers: tuple[float, ...]

    def total(self, side: Side) -> float:
        return self.k if side is Side.K else self.v


def measure_held_out(
    model: Any, sequences: Sequence[TokenSequence], artifact: Artifact, progress: Progress
) -> list[HeldOutError]:
    """Code and decode the KV of every sequence, sinks left out, with every plan of the artifact."""
    artifact = dataclasses.replace(artifact, digest=_NO_DIGEST)
    measurements = [_Measurement(artifact, plan.target_ratio) for plan in artifact.plans]
    num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    with progress.stage("held-out error", num_tokens, "tokens") as advance:
        for sequence in sequences:
            cache_dtype = DTYPES[artifact.geometry.dtype]
            keys, values = (
                heads[:, SINK_TOKENS:].to("cpu", cache_dtype) for heads in prefill(model, sequence.token_ids)
            )
            variances = _variances(keys, values, artifact)
            for measurement in measurements:
                measurement.add(keys, values, variances)
            advance(len(sequence.token_ids))
    return [measurement.result() for measurement in measurements]


class _Measurement:
    """Error and size of one plan, summed over sequences."""

    def __init__(self, artifact: Artifact, target_ratio: float) -> None:
        self._codec = KVCodec(artifact, CodecConfig(target_ratio=target_ratio, sink_tokens=0, window_tokens=0))
        shape = (len(Side), artifact.geometry.num_layers)
        self._errors = torch.zeros(shape, dtype=torch.float64)
        self._variances = torch.zeros(shape, dtype=torch.float64)
        self._num_elements = 0
        self._stored_bytes = 0

    def add(self, keys: torch.Tensor, values: torch.Tensor, variances: torch.Tensor) -> None:
        """Add the KV of one sequence from position SINK_TOKENS on, with its `_variances`."""
        layers = range(keys.shape[0])
        for tokens, encoded in self._codec.encode_node(keys, values, SINK_TOKENS):
            opened = self._codec.open(encoded.frame, tokens.start, len(tokens))
            window = slice(tokens.start - SINK_TOKENS, tokens.stop - SINK_TOKENS)
            for side, decoded in zip(Side, opened.reconstruct(layers, TokenRange(0, len(tokens))), strict=True):
                original = (keys if side is Side.K else values)[:, window]
                # A rotation changes no norm, so the error of K can be taken after RoPE.
                self._errors[side] += (decoded.float() - original.float()).square().sum(dim=(1, 2, 3))
                self._num_elements += original.numel()
            self._stored_bytes += len(encoded.frame)
        self._variances += variances

    def result(self) -> HeldOutError:
        layers = self._errors / self._variances.clamp(min=torch.finfo(torch.float64).tiny)
        whole = self._errors.sum(dim=1) / self._variances.sum(dim=1)
        return HeldOutError(
            target_ratio=self._codec.target_ratio,
            ratio=2 * self._num_elements / self._stored_bytes,
            k=float(whole[Side.K]),
            v=float(whole[Side.V]),
            k_layers=tuple(layers[Side.K].tolist()),
            v_layers=tuple(layers[Side.V].tolist()),
        )


def _variances(keys: torch.Tensor, values: torch.Tensor, artifact: Artifact) -> torch.Tensor:
    """Squared distance of K before RoPE and of V from the artifact's means, by side and layer: f64[2, num_layers]."""
    positions = torch.arange(SINK_TOKENS, SINK_TOKENS + keys.shape[1])
    variances = []
    for side in Side:
        basis = artifact.basis(side)
        heads = rotate(keys.float(), positions, artifact.rope, inverse=True) if side is Side.K else values.float()
        centred = as_rows(heads) - (torch.from_numpy(basis.mean / basis.scale) if basis is not None else 0.0)
        variances.append(centred.double().square().sum(dim=0).view(len(keys), -1).sum(dim=1))
    return torch.stack(variances)
