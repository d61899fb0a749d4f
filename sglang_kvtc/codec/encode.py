"""From the KV cache to the sections of a frame (FORMAT.md section 4.1). Nothing here is needed to decode.

Each function returns None where the kind of frame cannot represent the chunk: then it is stored RAW.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.bitstream.frame import CodedSection, SectionId, code_section
from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.codec.rope import Rotation
from sglang_kvtc.codec.transform import CODED_SECTIONS, SideCoding
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.types import KVChunk, Side

Sections = dict[SectionId, npt.NDArray[np.generic] | CodedSection]

FP8_MAX = 448.0
"""Largest finite OCP E4M3 number."""


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk as one independent frame. `kind` is RAW instead of what was asked for when that could not hold it."""

    frame: bytes
    kind: FrameKind


def raw_sections(chunk: KVChunk) -> Sections:
    """The exact bytes of the cache."""
    return {SectionId.K_RAW: _elements(chunk.keys), SectionId.V_RAW: _elements(chunk.values)}


def fp8_sections(chunk: KVChunk) -> Sections | None:
    """E4M3 numbers with one scale per layer and head. None without tokens and for non-finite input."""
    sections: Sections = {}
    for values, numbers_id, scales_id in (
        (chunk.keys, SectionId.K_FP8, SectionId.K_SCALES),
        (chunk.values, SectionId.V_FP8, SectionId.V_SCALES),
    ):
        if chunk.num_tokens == 0:
            return None
        largest = values.abs().amax(dim=(1, 3)).float()
        if not bool(torch.isfinite(largest).all()):
            return None
        # A head of zeros, or of numbers close to the smallest ones, still needs a scale that can be divided by.
        scales = (largest / FP8_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
        numbers = (values.float() / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        sections[numbers_id] = numbers.view(torch.uint8).numpy()
        sections[scales_id] = scales.numpy()
    return sections


def coded_sections(
    side: Side, values: torch.Tensor, coding: SideCoding, rotation: Rotation | None, config: CodecConfig
) -> Sections | None:
    """One side's sections of a CODED frame, entropy-coded. None for input that is not finite or too large to code.

    values: K or V of a chunk with tokens. rotation: undoes the rope of K; None for V. config: says the entropy coder.
    """
    features = centred_features(values, coding, rotation)
    # A number that is not finite spoils every coefficient of its token, where there are any.
    if not coding.transform.num_components and not bool(torch.isfinite(features).all()):
        return None
    quantized = coding.quantizer.quantize(coding.transform.project(features))
    if quantized is None:
        return None
    symbols, params = quantized
    contents = (params.numpy(), bitpack.pack(symbols.numpy(), coding.quantizer.row_widths))
    return {
        section: code_section(section, content, config.coder, config.coder_level)
        for section, content in zip(CODED_SECTIONS[side], contents, strict=True)
    }


def centred_features(values: torch.Tensor, coding: SideCoding, rotation: Rotation | None) -> torch.Tensor:
    """What is projected: features minus their mean, dtype[num_tokens, num_layers, layer features].

    values: K or V of a chunk. rotation: undoes the rope of K; None for V.
    """
    num_tokens = values.shape[1]
    features = coding.transform.empty_features(num_tokens)
    for layers in coding.transform.layer_tiles(num_tokens):
        tile = values[layers.start : layers.stop]
        unrotated = rotation(tile) if rotation else tile.to(torch.float32, copy=True)
        coding.transform.centre(layers, unrotated, features)
    return features


def _elements(values: torch.Tensor) -> npt.NDArray[np.generic]:
    """The elements as integers of their size: numpy has no bfloat16."""
    unsigned = {2: torch.int16, 4: torch.int32}[values.element_size()]
    return values.contiguous().view(unsigned).numpy()
