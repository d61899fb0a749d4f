"""The linear transform of one side, K or V: features <-> coefficients of the kept components (KVTC section 3.1).

    coefficients = (features - mean) @ W @ basis          features ~ coefficients @ basis^T @ W^-1 + mean

W is block-diagonal: `SideBasis.weights`, or nothing. It is folded into the basis, so that weighting costs no time.
Encoding subtracts the mean in fp32, before the features are rounded to the compute dtype; decoding adds it inside the
product, as further rows of the matrix whose coefficients are one, so that the sum is rounded once. Products accumulate
in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_kvtc.artifact.schema import SideBasis, SidePlan
from sglang_kvtc.bitstream.frame import SectionId
from sglang_kvtc.codec.quantize import GroupedQuantizer
from sglang_kvtc.codec.uniform import UniformQuantizer
from sglang_kvtc.types import Side

CODED_SECTIONS = {
    Side.K: (SectionId.K_PARAMS, SectionId.K_SYMBOLS),
    Side.V: (SectionId.V_PARAMS, SectionId.V_SYMBOLS),
}
"""Where a CODED frame holds the parameters of the quantiser, and where the symbols, of a side."""
_TILE_ELEMENTS = 1 << 18
"""f32 elements of features converted at a time, so that the passes over them find them in the cache."""


class SideTransform:
    """Weights of the kept components in the compute dtype. Nothing changes after construction."""

    def __init__(self, basis: SideBasis, plan: SidePlan, num_layers: int, dtype: torch.dtype) -> None:
        """dtype: torch.bfloat16 or torch.float32. Holds one copy of the kept columns of the basis, or two where it has
        weights.
        """
        columns = torch.from_numpy(np.ascontiguousarray(basis.basis[:, plan.columns].T)).float()
        self.num_components, self._num_features = columns.shape
        self._layer_features = self._num_features // num_layers
        self._dtype = dtype
        self._mean = torch.from_numpy(basis.mean).view(num_layers, 1, self._layer_features)
        self._mean_rows = 2 if dtype is torch.bfloat16 else 1
        # [num_components + mean rows, num_features]: both products read it without reordering.
        if basis.weights is None:
            self._reconstruct_weight = torch.cat([columns.to(dtype), *self._mean_parts()])
            self._project_weight = self._reconstruct_weight[: self.num_components]
        else:
            weights = torch.from_numpy(basis.weights)
            inverse = torch.linalg.inv(weights.double()).float()
            self._reconstruct_weight = torch.cat([weigh(columns, inverse).to(dtype), *self._mean_parts()])
            self._project_weight = weigh(columns, weights).to(dtype)

    def _mean_parts(self) -> list[torch.Tensor]:
        """The mean as rows that add up to it: bfloat16 needs two for the 16 leading bits."""
        parts, rest = [], self._mean.reshape(1, -1)
        for _ in range(self._mean_rows):
            parts.append(rest.to(self._dtype))
            rest = rest - parts[-1].float()
        return parts

    def empty_features(self, num_tokens: int) -> torch.Tensor:
        """Room for the centred features of a chunk: dtype[num_tokens, num_layers, layer features]."""
        return torch.empty(num_tokens, len(self._mean), self._layer_features, dtype=self._dtype)

    def layer_tiles(self, num_tokens: int) -> list[range]:
        """The layers in blocks whose features are best converted together."""
        num_layers = len(self._mean)
        step = max(1, _TILE_ELEMENTS // (max(num_tokens, 1) * self._layer_features))
        return [range(first, min(first + step, num_layers)) for first in range(0, num_layers, step)]

    def centre(self, layers: range, values: torch.Tensor, features: torch.Tensor) -> None:
        """Write the centred features of some layers.

        values: f32[len(layers), num_tokens, num_kv_heads, head size], overwritten. features: from `empty_features`.
        """
        block = slice(layers.start, layers.stop)
        centred = values.flatten(2).sub_(self._mean[block])
        features[:, block].copy_(centred.transpose(0, 1))

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Coefficients f32[num_components, num_tokens] of centred features."""
        flat = features.view(len(features), self._num_features)
        # Transposed before the conversion: torch is slow at doing both at once.
        return torch.mm(flat, self._project_weight.T).T.contiguous().float()

    def empty_coefficients(self, num_tokens: int) -> torch.Tensor:
        """Room for coefficients dtype[num_components + mean rows, num_tokens] with the rows of the mean filled in."""
        coefficients = torch.empty(self.num_components + self._mean_rows, num_tokens, dtype=self._dtype)
        coefficients[self.num_components :] = 1
        return coefficients

    def reconstruct(self, coefficients: torch.Tensor, layers: range) -> torch.Tensor:
        """Features dtype[num_tokens, len(layers), layer features] of a block of layers.

        coefficients: dtype[num_tokens, num_components + mean rows], the transpose of `empty_coefficients`.
        """
        columns = slice(layers.start * self._layer_features, layers.stop * self._layer_features)
        features = torch.mm(coefficients, self._reconstruct_weight[:, columns])
        return features.view(len(coefficients), len(layers), self._layer_features)


class Quantizer(Protocol):
    """From coefficients to rows of symbols and back, for the kept components of one side."""

    @property
    def row_widths(self) -> npt.NDArray[np.uint8]:
        """Bits of a symbol in each row: u8[num_rows]."""
        ...

    @property
    def param_bytes(self) -> int:
        """Bytes of the parameters of one token."""
        ...

    def quantize(self, coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """f32[num_components, num_tokens] to symbols u8[num_rows, num_tokens] and parameters, in the order and element
        size of their section. None for coefficients that cannot be represented, non-finite ones among them.
        """
        ...

    def read_params(self, content: npt.NDArray[np.uint8], num_tokens: int) -> torch.Tensor:
        """The parameters of a frame from the bytes of their section. Raises BitstreamError."""
        ...

    def dequantize(self, symbols: torch.Tensor, params: torch.Tensor, out: torch.Tensor) -> None:
        """Inverse of `quantize`; out: float[num_components, num_tokens], written."""
        ...


@dataclass(frozen=True, slots=True)
class SideCoding:
    """Everything about one side that encoder and decoder share."""

    transform: SideTransform
    quantizer: Quantizer

    @classmethod
    def from_plan(cls, basis: SideBasis, plan: SidePlan, num_layers: int, dtype: torch.dtype) -> SideCoding:
        """dtype: of the projections."""
        quantizer: Quantizer
        quantizer = UniformQuantizer.from_plan(plan, basis.variances) if plan.step else GroupedQuantizer.from_plan(plan)
        return cls(SideTransform(basis, plan, num_layers, dtype), quantizer)


def weigh(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply the features of every layer and KV head by its symmetric matrix.

    rows: float[num_rows, p]. weights: of the same dtype, [num_layers, num_kv_heads, head size, head size].
    """
    blocks = weights.flatten(0, 1)
    by_head = rows.unflatten(1, blocks.shape[:2]).transpose(0, 1)
    weighted: torch.Tensor = (by_head @ blocks).transpose(0, 1).flatten(1)
    return weighted
