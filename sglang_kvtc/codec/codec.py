"""The codec of one model and one target ratio: chunks in, frames out, and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sglang_kvtc.artifact.schema import Artifact, Plan
from sglang_kvtc.bitstream.frame import read_frame, write_frame
from sglang_kvtc.bitstream.header import (
    FrameExpectation,
    FrameHeader,
    FrameKind,
    geometry_digest,
    max_section_bytes,
    plan_code,
)
from sglang_kvtc.codec.decode import OpenFrame, open_coded, open_fp8, open_raw
from sglang_kvtc.codec.encode import EncodedChunk, coded_sections, fp8_sections, raw_sections
from sglang_kvtc.codec.segments import Segments, segments
from sglang_kvtc.codec.transform import DTYPES, prepare
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import KVChunk, Side, TokenRange

LOSSLESS = 1.0


class KVCodec:
    """Stateless after construction, so that any thread may encode and decode.

    artifact: bases and plans. config: which plan, and how nodes are cut. Raises ConfigError for a target ratio that
    the artifact has no plan for. Ratio 1 is lossless and needs no plan.
    """

    def __init__(self, artifact: Artifact, config: CodecConfig) -> None:
        self.geometry = artifact.geometry
        self.rope = artifact.rope
        self.config = config
        self.target_ratio = _target_ratio(artifact, config)
        self._dtype = DTYPES[artifact.geometry.dtype]
        self._geometry_digest = geometry_digest(artifact.geometry, artifact.rope)
        self._artifact_digest = artifact.digest
        self._plan = plan_code(self.target_ratio)
        self._transforms = {}
        if not self.is_lossless:
            plan = _plan(artifact, self.target_ratio)
            compute = _compute_dtype(config, self._dtype)
            for side in Side:
                basis = artifact.basis(side)
                if basis is None:
                    raise ConfigError(
                        f"the artifact has a plan for ratio {plan.target_ratio:g} but no basis of {side.name}"
                    )
                self._transforms[side] = prepare(basis, plan.side(side), compute)
            bits = plan.k.bits_per_token + plan.v.bits_per_token
            self.planned_bytes_per_token = bits / 8
        else:
            self.planned_bytes_per_token = float(self.geometry.bytes_per_token)

    @property
    def is_lossless(self) -> bool:
        return self.target_ratio == LOSSLESS

    def segments(self, start_position: int, num_tokens: int, min_coded_tokens: int = 1) -> Segments:
        """How a node is cut: (absolute token range, kind) per chunk (codec.segments)."""
        return segments(
            start_position, num_tokens, self.config, lossless=self.is_lossless, min_coded_tokens=min_coded_tokens
        )

    def encode(self, chunk: KVChunk, kind: FrameKind) -> EncodedChunk:
        """Write one frame. A chunk whose values the kind cannot hold (not finite, beyond f16) is stored RAW."""
        sections = None
        if kind is FrameKind.CODED:
            sections = coded_sections(chunk, self._transforms, self.rope)
        elif kind is FrameKind.FP8:
            sections = fp8_sections(chunk)
        if sections is None:
            kind, sections = FrameKind.RAW, raw_sections(chunk)
        header = FrameHeader(
            kind=kind,
            num_tokens=chunk.num_tokens,
            start_position=chunk.start_position,
            geometry_digest=self._geometry_digest,
            artifact_digest=self._artifact_digest,
            plan=self._plan if kind is FrameKind.CODED else 0,
        )
        return EncodedChunk(write_frame(header, sections, self.config.coder, self.config.coder_level), kind)

    def encode_node(
        self, keys: torch.Tensor, values: torch.Tensor, start_position: int
    ) -> Iterator[tuple[TokenRange, EncodedChunk]]:
        """Encode a node chunk by chunk (lazily, so memory is bounded by the chunk).

        keys, values: dtype[num_layers, num_tokens, num_kv_heads, head_dim], K after RoPE.
        """
        for tokens, kind in self.segments(start_position, keys.shape[1]):
            window = slice(tokens.start - start_position, tokens.stop - start_position)
            yield tokens, self.encode(KVChunk(keys[:, window], values[:, window], tokens.start), kind)

    def verify(self, frame: bytes, start_position: int, num_tokens: int) -> None:
        """Check checksum and identity, decode nothing. Raises a BitstreamError."""
        read_frame(frame, self._expectation(start_position, num_tokens))

    def open(self, frame: bytes, start_position: int, num_tokens: int) -> OpenFrame:
        """Verify a frame and decode its sections. Raises a BitstreamError."""
        opened = read_frame(frame, self._expectation(start_position, num_tokens))
        if opened.header.kind is FrameKind.RAW:
            return open_raw(opened, self.geometry, self._dtype)
        if opened.header.kind is FrameKind.FP8:
            return open_fp8(opened, self.geometry, self._dtype)
        return open_coded(opened, self.geometry, self._transforms, self.rope, self._dtype)

    def _expectation(self, start_position: int, num_tokens: int) -> FrameExpectation:
        return FrameExpectation(
            geometry_digest=self._geometry_digest,
            artifact_digest=self._artifact_digest,
            plan=self._plan,
            start_position=start_position,
            num_tokens=num_tokens,
            max_section_bytes=max_section_bytes(self.geometry, num_tokens),
        )


def _target_ratio(artifact: Artifact, config: CodecConfig) -> float:
    if config.target_ratio:
        return config.target_ratio
    return artifact.plans[0].target_ratio if artifact.plans else LOSSLESS


def _plan(artifact: Artifact, target_ratio: float) -> Plan:
    for plan in artifact.plans:
        if plan.target_ratio == target_ratio:
            return plan
    known = ", ".join(f"{ratio:g}" for ratio in (LOSSLESS, *(plan.target_ratio for plan in artifact.plans)))
    raise ConfigError(f"the artifact has no plan for ratio {target_ratio:g}, only for {known}: calibrate with --ratio")


def _compute_dtype(config: CodecConfig, cache_dtype: torch.dtype) -> torch.dtype:
    if config.compute_dtype != "auto":
        return DTYPES[config.compute_dtype]
    return torch.bfloat16 if cache_dtype.itemsize == 2 else torch.float32
