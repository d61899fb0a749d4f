"""Frames for tests: small, but with the structure of real ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.bitstream.frame import CHECKSUM_BYTES, SectionId, read_header, write_frame
from sglang_kvtc.bitstream.header import FrameExpectation, FrameHeader, FrameKind, max_section_bytes, plan_code
from sglang_kvtc.types import ModelGeometry

GEOMETRY = ModelGeometry(num_layers=2, num_kv_heads=2, head_dim=16, v_head_dim=8, dtype="bfloat16")
GEOMETRY_DIGEST = b"geometry"
ARTIFACT_DIGEST = b"artifact digest!"
PLAN = plan_code(16)
K_WIDTHS = np.repeat(np.array([8, 5, 4, 4, 3, 2, 0, 1], np.uint8), 4)
V_WIDTHS = np.repeat(np.array([3, 2, 1], np.uint8), 4)

CODERS = ("identity", "deflate", "zstd")

Sections = dict[SectionId, bytes | npt.NDArray[Any]]


def header(kind: FrameKind, num_tokens: int = 24, start_position: int = 512) -> FrameHeader:
    plan = PLAN if kind is FrameKind.CODED else 0
    return FrameHeader(kind, num_tokens, start_position, GEOMETRY_DIGEST, ARTIFACT_DIGEST, plan)


def bfloat16(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.uint16]:
    """Bits of bfloat16 numbers."""
    return (rng.standard_normal(shape).astype("<f4").view("<u4") >> 16).astype("<u2")


def symbols(rng: np.random.Generator, widths: npt.NDArray[np.uint8], num_tokens: int) -> npt.NDArray[np.uint8]:
    """Symbols of peaked distribution that fill their widths."""
    levels = (1 << widths.astype(int)) - 1
    centred = rng.normal(levels[:, None] / 2, levels[:, None] / 6 + 0.01, (len(widths), num_tokens))
    return np.clip(np.rint(centred), 0, levels[:, None]).astype(np.uint8)


def sections(kind: FrameKind, num_tokens: int = 24, seed: int = 0) -> Sections:
    """Content of a frame of GEOMETRY, `num_tokens` tokens, with plan widths K_WIDTHS and V_WIDTHS (groups of 4)."""
    rng = np.random.default_rng(seed)
    layers, heads = GEOMETRY.num_layers, GEOMETRY.num_kv_heads
    k_shape = (layers, num_tokens, heads, GEOMETRY.head_dim)
    v_shape = (layers, num_tokens, heads, GEOMETRY.v_head_dim)
    if kind is FrameKind.RAW:
        return {SectionId.K_RAW: bfloat16(rng, k_shape), SectionId.V_RAW: bfloat16(rng, v_shape)}
    if kind is FrameKind.FP8:
        return {
            SectionId.K_FP8: rng.integers(0, 64, k_shape).astype(np.uint8),
            SectionId.V_FP8: rng.integers(0, 64, v_shape).astype(np.uint8),
            SectionId.K_SCALES: rng.random((layers, heads)).astype("<f4"),
            SectionId.V_SCALES: rng.random((layers, heads)).astype("<f4"),
        }
    content: Sections = {}
    for side, widths in (("K", K_WIDTHS), ("V", V_WIDTHS)):
        shift = rng.normal(-2, 0.1, (len(widths) // 4, num_tokens))
        scale = rng.normal(0.25, 0.01, shift.shape)
        content[SectionId[f"{side}_PARAMS"]] = np.stack([shift, scale]).astype("<f2")
        content[SectionId[f"{side}_SYMBOLS"]] = bitpack.pack(symbols(rng, widths, num_tokens), widths)
    return content


def frame(
    kind: FrameKind, num_tokens: int = 24, start_position: int = 512, seed: int = 0, coder: str = "deflate"
) -> bytes:
    return write_frame(header(kind, num_tokens, start_position), sections(kind, num_tokens, seed), coder, 6)


def expectation(of: FrameHeader | bytes) -> FrameExpectation:
    """What a reader expects who wants exactly this frame."""
    wanted = read_header(of) if isinstance(of, bytes) else of
    return FrameExpectation(
        geometry_digest=wanted.geometry_digest,
        artifact_digest=wanted.artifact_digest,
        plans=(PLAN,),
        start_position=wanted.start_position,
        num_tokens=wanted.num_tokens,
        max_section_bytes=max_section_bytes(GEOMETRY, wanted.num_tokens),
    )


def resealed(damaged: bytes | bytearray) -> bytes:
    """The same bytes under a checksum that fits: what only a wrong writer produces."""
    content = bytes(damaged[:-CHECKSUM_BYTES])
    return content + xxhash.xxh3_64_digest(content)
