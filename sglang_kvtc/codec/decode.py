"""One frame -> KV, block of layers by block of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.bitstream.frame import Frame, SectionId
from sglang_kvtc.codec.quantize import dequantize
from sglang_kvtc.codec.rope import apply_rotation, cos_sin
from sglang_kvtc.codec.transform import SideTransform
from sglang_kvtc.types import ModelGeometry, Side, TokenRange

KV = tuple[torch.Tensor, torch.Tensor]


class OpenFrame(Protocol):
    """A verified frame whose sections are decoded; what remains is arithmetic."""

    def reconstruct(self, layers: range, tokens: TokenRange) -> KV:
        """K (rotated to its absolute positions) and V of some layers and tokens (relative to the frame).

        Returns two tensors of the cache dtype [len(layers), len(tokens), num_kv_heads, head_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class OpenRaw:
    """Exact values: keys and values dtype[num_layers, num_tokens, num_kv_heads, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    def reconstruct(self, layers: range, tokens: TokenRange) -> KV:
        window = (slice(layers.start, layers.stop), slice(tokens.start, tokens.stop))
        return self.keys[window], self.values[window]


@dataclass(frozen=True, slots=True)
class OpenCoded:
    """Coefficients [num_components, num_tokens] of both sides in the compute dtype."""

    coefficients: Mapping[Side, torch.Tensor]
    transforms: Mapping[Side, SideTransform]
    geometry: ModelGeometry
    rope: RopeSpec
    start_position: int
    dtype: torch.dtype

    def reconstruct(self, layers: range, tokens: TokenRange) -> KV:
        geometry = self.geometry
        keys = self._features(Side.K, layers, tokens, geometry.head_dim)
        positions = torch.arange(self.start_position + tokens.start, self.start_position + tokens.stop)
        cos, sin = cos_sin(positions, self.rope)
        # [num_tokens, layer, head, channel] here: cos and sin need an axis for layers too.
        keys = apply_rotation(keys, cos[:, None], sin[:, None], self.rope)
        values = self._features(Side.V, layers, tokens, geometry.v_head_dim)
        return keys.to(self.dtype).transpose(0, 1), values.to(self.dtype).transpose(0, 1)

    def _features(self, side: Side, layers: range, tokens: TokenRange, head_dim: int) -> torch.Tensor:
        per_layer = self.geometry.num_kv_heads * head_dim
        columns = slice(layers.start * per_layer, layers.stop * per_layer)
        features = self.transforms[side].reconstruct(self.coefficients[side][:, tokens.start : tokens.stop], columns)
        return features.view(len(tokens), len(layers), self.geometry.num_kv_heads, head_dim)


def open_raw(frame: Frame, geometry: ModelGeometry, dtype: torch.dtype) -> OpenRaw:
    """Decode a RAW frame."""
    tokens = frame.header.num_tokens
    return OpenRaw(
        _tensor(frame.section(SectionId.K_RAW), dtype, _shape(geometry, tokens, geometry.head_dim)),
        _tensor(frame.section(SectionId.V_RAW), dtype, _shape(geometry, tokens, geometry.v_head_dim)),
    )


def open_fp8(frame: Frame, geometry: ModelGeometry, dtype: torch.dtype) -> OpenRaw:
    """Decode an FP8 frame to the cache dtype."""
    sides = []
    for data_id, scale_id, head_dim in (
        (SectionId.K_FP8, SectionId.K_SCALES, geometry.head_dim),
        (SectionId.V_FP8, SectionId.V_SCALES, geometry.v_head_dim),
    ):
        shape = _shape(geometry, frame.header.num_tokens, head_dim)
        data = _tensor(frame.section(data_id), torch.float8_e4m3fn, shape)
        scales = _tensor(frame.section(scale_id), torch.float32, (geometry.num_layers, geometry.num_kv_heads))
        sides.append((data.float() * scales[:, None, :, None]).to(dtype))
    return OpenRaw(*sides)


def open_coded(
    frame: Frame,
    geometry: ModelGeometry,
    transforms: Mapping[Side, SideTransform],
    rope: RopeSpec,
    dtype: torch.dtype,
) -> OpenCoded:
    """Decode, unpack and dequantise a CODED frame."""
    tokens = frame.header.num_tokens
    coefficients = {}
    for side, params_id, symbols_id in (
        (Side.K, SectionId.K_PARAMS, SectionId.K_SYMBOLS),
        (Side.V, SectionId.V_PARAMS, SectionId.V_SYMBOLS),
    ):
        transform = transforms[side]
        symbols = bitpack.unpack(frame.section(symbols_id), transform.widths.numpy(), tokens)
        params = _tensor(frame.section(params_id), torch.float16, (2, transform.num_groups, tokens))
        out = torch.empty(transform.num_components, tokens, dtype=transform.inverse.dtype)
        coefficients[side] = dequantize(torch.from_numpy(symbols), params, transform.runs, out)
    return OpenCoded(coefficients, transforms, geometry, rope, frame.header.start_position, dtype)


def _shape(geometry: ModelGeometry, num_tokens: int, head_dim: int) -> tuple[int, ...]:
    return geometry.num_layers, num_tokens, geometry.num_kv_heads, head_dim


def _tensor(section: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # A section may be a read-only view of the frame; torch wants to own memory it could write.
    owned = section if section.flags.writeable else section.copy()
    return torch.from_numpy(owned).view(dtype).view(shape)
