"""From a verified frame back to the KV cache, a block of layers at a time (FORMAT.md section 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.bitstream.frame import Frame, SectionId
from sglang_kvtc.codec.rope import Rotation
from sglang_kvtc.codec.transform import CODED_SECTIONS, SideCoding
from sglang_kvtc.types import ModelGeometry, Side, TokenRange


class OpenFrame(Protocol):
    """A frame whose sections are decoded. Not changed by use, so threads may share it."""

    def reconstruct(self, layers: range, tokens: TokenRange) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of consecutive layers, K rotated at its absolute positions.

        tokens: range inside the frame, 0 being its first token. Returns two tensors of the cache dtype,
        [len(layers), len(tokens), num_kv_heads, head size], possibly views with other strides than a contiguous tensor.
        """
        ...


@dataclass(frozen=True, slots=True)
class RawFrame:
    """Exact keys and values: cache dtype[num_layers, num_tokens, num_kv_heads, head size]."""

    keys: torch.Tensor
    values: torch.Tensor

    def reconstruct(self, layers: range, tokens: TokenRange) -> tuple[torch.Tensor, torch.Tensor]:
        """See OpenFrame."""
        window = (slice(layers.start, layers.stop), slice(tokens.start, tokens.stop))
        return self.keys[window], self.values[window]


@dataclass(frozen=True, slots=True)
class Fp8Frame:
    """E4M3 numbers like the tensors of a RawFrame, and f32[num_layers, num_kv_heads] scales, K before V."""

    numbers: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor]
    dtype: torch.dtype

    def reconstruct(self, layers: range, tokens: TokenRange) -> tuple[torch.Tensor, torch.Tensor]:
        """See OpenFrame."""
        block, window = slice(layers.start, layers.stop), slice(tokens.start, tokens.stop)
        keys, values = (
            numbers[block, window].float().mul_(scales[block, None, :, None]).to(self.dtype)
            for numbers, scales in zip(self.numbers, self.scales, strict=True)
        )
        return keys, values


@dataclass(frozen=True, slots=True)
class CodedFrame:
    """Coefficients of both sides, as SideTransform.reconstruct takes them, and the rotation of the frame's keys."""

    codings: tuple[SideCoding, SideCoding]
    coefficients: tuple[torch.Tensor, torch.Tensor]
    rotation: Rotation
    num_kv_heads: int
    dtype: torch.dtype

    def reconstruct(self, layers: range, tokens: TokenRange) -> tuple[torch.Tensor, torch.Tensor]:
        """See OpenFrame. The product for a block of layers reads only their columns of the basis."""
        window = slice(tokens.start, tokens.stop)
        unrotated, values = (
            coding.transform.reconstruct(coefficients[window], layers)
            .unflatten(2, (self.num_kv_heads, -1))
            .transpose(0, 1)
            for coding, coefficients in zip(self.codings, self.coefficients, strict=True)
        )
        return rotated_keys(unrotated, self.rotation, window, self.dtype), values.to(self.dtype)


def join_frames(
    parts: Sequence[tuple[OpenFrame, TokenRange]], max_tokens: int
) -> Iterator[tuple[OpenFrame, TokenRange, int]]:
    """Merge neighbouring coded frames of one plan of a codec, so that one product rebuilds what several would.

    parts: opened frames and the tokens wanted of each. Yields a frame, the tokens of it, and how many parts it stands
    for, in order. A merged frame has at most `max_tokens` tokens, which bounds the working memory of `reconstruct`.
    """
    run: list[tuple[CodedFrame, TokenRange]] = []
    for frame, tokens in parts:
        fits = sum(len(other) for _, other in run) + len(tokens) <= max_tokens
        if run and not (isinstance(frame, CodedFrame) and fits and frame.codings is run[0][0].codings):
            yield (*_joined(run), len(run))
            run = []
        if isinstance(frame, CodedFrame):
            run.append((frame, tokens))
        else:
            yield frame, tokens, 1
    if run:
        yield (*_joined(run), len(run))


def _joined(run: Sequence[tuple[CodedFrame, TokenRange]]) -> tuple[CodedFrame, TokenRange]:
    first, tokens = run[0]
    if len(run) == 1:
        return first, tokens
    windows = [(frame, slice(tokens.start, tokens.stop)) for frame, tokens in run]
    k, v = (torch.cat([frame.coefficients[side][window] for frame, window in windows]) for side in Side)
    rotation = Rotation.joined([(frame.rotation, window) for frame, window in windows])
    joined = CodedFrame(first.codings, (k, v), rotation, first.num_kv_heads, first.dtype)
    return joined, TokenRange(0, len(k))


def rotated_keys(unrotated: torch.Tensor, rotation: Rotation, tokens: slice, dtype: torch.dtype) -> torch.Tensor:
    """Keys as they lie in the cache, `dtype`, from keys before RoPE: float[layers, num_tokens, num_kv_heads, head_dim].

    tokens: which of the rotation's tokens these are.
    """
    keys = torch.empty(unrotated.shape, dtype=dtype)
    # Layer by layer, so that what the rotation works on stays in the second-level cache.
    for rotated, layer_keys in zip(keys, unrotated, strict=True):
        rotated.copy_(rotation(layer_keys, tokens))
    return keys


def open_raw(frame: Frame, geometry: ModelGeometry, dtype: torch.dtype) -> RawFrame:
    """Decode the sections of a RAW frame. Raises BitstreamError."""
    shape = (geometry.num_layers, frame.header.num_tokens, geometry.num_kv_heads)
    return RawFrame(
        _tensor(frame, SectionId.K_RAW, dtype, (*shape, geometry.head_dim)),
        _tensor(frame, SectionId.V_RAW, dtype, (*shape, geometry.v_head_dim)),
    )


def open_fp8(frame: Frame, geometry: ModelGeometry, dtype: torch.dtype) -> Fp8Frame:
    """Decode the sections of an FP8 frame; `dtype` is that of the cache. Raises BitstreamError."""
    layers_heads = (geometry.num_layers, geometry.num_kv_heads)
    shape = (geometry.num_layers, frame.header.num_tokens, geometry.num_kv_heads)
    return Fp8Frame(
        (
            _tensor(frame, SectionId.K_FP8, torch.float8_e4m3fn, (*shape, geometry.head_dim)),
            _tensor(frame, SectionId.V_FP8, torch.float8_e4m3fn, (*shape, geometry.v_head_dim)),
        ),
        (
            _tensor(frame, SectionId.K_SCALES, torch.float32, layers_heads),
            _tensor(frame, SectionId.V_SCALES, torch.float32, layers_heads),
        ),
        dtype,
    )


def side_coefficients(frame: Frame, side: Side, coding: SideCoding) -> torch.Tensor:
    """Decode, unpack and dequantise one side of a CODED frame, for SideTransform.reconstruct.

    Raises BitstreamError.
    """
    params_id, symbols_id = CODED_SECTIONS[side]
    num_tokens, quantizer = frame.header.num_tokens, coding.quantizer
    params = quantizer.read_params(_owned(frame, params_id), num_tokens)
    symbols = torch.from_numpy(bitpack.unpack(frame.section(symbols_id), quantizer.row_widths, num_tokens))
    return token_coefficients(symbols, params, coding)


def token_coefficients(symbols: torch.Tensor, params: torch.Tensor, coding: SideCoding) -> torch.Tensor:
    """Dequantised coefficients as SideTransform.reconstruct takes them.

    symbols, params: as the quantiser makes them.
    """
    coefficients = coding.transform.empty_coefficients(symbols.shape[1])
    coding.quantizer.dequantize(symbols, params, coefficients[: coding.transform.num_components])
    # The product reads a contiguous [num_tokens, num_components] twice as fast as its transpose.
    return coefficients.T.contiguous()


def section_bytes(
    frame: Frame, geometry: ModelGeometry, codings: tuple[SideCoding, SideCoding] | None
) -> dict[SectionId, int]:
    """Decoded size that each section of the frame must have. `codings` are those of the frame's plan, if it has one."""
    num_tokens, rows = frame.header.num_tokens, geometry.num_layers * geometry.num_kv_heads
    k_elements, v_elements = rows * geometry.head_dim * num_tokens, rows * geometry.v_head_dim * num_tokens
    sizes = {
        SectionId.K_RAW: k_elements * geometry.element_bytes,
        SectionId.V_RAW: v_elements * geometry.element_bytes,
        SectionId.K_FP8: k_elements,
        SectionId.V_FP8: v_elements,
        SectionId.K_SCALES: 4 * rows,
        SectionId.V_SCALES: 4 * rows,
    }
    if codings is not None:
        k, v = codings
        sizes |= {
            SectionId.K_PARAMS: k.quantizer.param_bytes * num_tokens,
            SectionId.K_SYMBOLS: bitpack.packed_bytes(k.quantizer.row_widths, num_tokens),
            SectionId.V_PARAMS: v.quantizer.param_bytes * num_tokens,
            SectionId.V_SYMBOLS: bitpack.packed_bytes(v.quantizer.row_widths, num_tokens),
        }
    return sizes


def _tensor(frame: Frame, section: SectionId, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A section as a tensor of its own memory."""
    # By way of numpy's integers of that size: torch cannot reinterpret an empty tensor as wider elements.
    return torch.from_numpy(_owned(frame, section).view(f"i{dtype.itemsize}")).view(dtype).view(shape)


def _owned(frame: Frame, section: SectionId) -> npt.NDArray[np.uint8]:
    """A section in memory of its own. Byte planes were put together in such, others may be a view of the frame."""
    content: npt.NDArray[np.uint8] = frame.section(section)
    return content.copy() if frame.entries[section].element_bytes == 1 else content
