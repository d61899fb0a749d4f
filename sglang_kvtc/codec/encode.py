"""KV of a chunk -> one frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.bitstream.frame import SectionId
from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.codec.quantize import quantize
from sglang_kvtc.codec.rope import rotate
from sglang_kvtc.codec.transform import SideTransform
from sglang_kvtc.types import KVChunk, Side

Sections = Mapping[SectionId, npt.NDArray[np.generic]]

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A frame and the kind it really has, which is RAW where the requested kind could not hold the values."""

    frame: bytes
    kind: FrameKind


def raw_sections(chunk: KVChunk) -> Sections:
    """Exact bits of K and V in the cache dtype."""
    return {SectionId.K_RAW: _bits(chunk.keys), SectionId.V_RAW: _bits(chunk.values)}


def fp8_sections(chunk: KVChunk) -> Sections | None:
    """e4m3 with one scale per layer and head. None if a value is not finite."""
    sections = {}
    for values, data_id, scale_id in (
        (chunk.keys, SectionId.K_FP8, SectionId.K_SCALES),
        (chunk.values, SectionId.V_FP8, SectionId.V_SCALES),
    ):
        floats = values.float()
        largest = floats.abs().amax(dim=(1, 3))
        if not torch.isfinite(largest).all():
            return None
        scales = torch.where(largest > 0, largest / FP8_MAX, 1.0)
        coded = (floats / scales[:, None, :, None]).to(FP8)
        sections[data_id] = coded.view(torch.uint8).numpy()
        sections[scale_id] = scales.numpy()
    return sections


def coded_sections(chunk: KVChunk, transforms: Mapping[Side, SideTransform], rope: RopeSpec) -> Sections | None:
    """Transform, quantise and pack both sides. None if a shift or scale does not fit f16 or a value is not finite."""
    positions = torch.arange(chunk.start_position, chunk.start_position + chunk.num_tokens)
    sections = {}
    for side, params_id, symbols_id in (
        (Side.K, SectionId.K_PARAMS, SectionId.K_SYMBOLS),
        (Side.V, SectionId.V_PARAMS, SectionId.V_SYMBOLS),
    ):
        values = rotate(chunk.keys, positions, rope, inverse=True) if side is Side.K else chunk.values
        transform = transforms[side]
        symbols, params = quantize(transform.project(features_of(values)), transform.runs, transform.range_rule)
        if not torch.isfinite(params).all():
            return None
        sections[params_id] = params.numpy()
        sections[symbols_id] = bitpack.pack(symbols.numpy(), transform.widths.numpy())
    return sections


def features_of(values: torch.Tensor) -> torch.Tensor:
    """[num_layers, num_tokens, num_kv_heads, head_dim] -> [num_tokens, p] in the order (layer, head, channel)."""
    return values.transpose(0, 1).reshape(values.shape[1], -1)


def _bits(values: torch.Tensor) -> npt.NDArray[np.generic]:
    bits: npt.NDArray[np.generic] = values.contiguous().view(_INTEGERS[values.element_size()]).numpy()
    return bits
