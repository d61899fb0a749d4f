"""KVCodec: chunks of the KV cache to frames and back, for one artifact and one of its plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from sglang_kvtc.artifact.schema import Artifact, Plan
from sglang_kvtc.bitstream.frame import Frame, read_frame, write_frame
from sglang_kvtc.bitstream.header import (
    FrameExpectation,
    FrameHeader,
    FrameKind,
    geometry_digest,
    max_section_bytes,
    plan_code,
)
from sglang_kvtc.codec.decode import CodedFrame, OpenFrame, open_fp8, open_raw, section_bytes, side_coefficients
from sglang_kvtc.codec.encode import EncodedChunk, coded_sections, fp8_sections, raw_sections
from sglang_kvtc.codec.rope import Rotation
from sglang_kvtc.codec.segments import NodePlans, NodeSegment, node_segments
from sglang_kvtc.codec.transform import SideCoding
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.errors import ConfigError, GeometryMismatch
from sglang_kvtc.types import KVChunk, Side, TokenRange

LOSSLESS_RATIO = 1.0
Codings = tuple[SideCoding, SideCoding]
"""How K and V are coded by one plan."""
Result = TypeVar("Result")


class KVCodec:
    """Encoder and decoder on the CPU. Nothing changes after construction, so threads may share one.

    geometry: of the artifact's model shard. target_ratio: of the plan in use; 1 is lossless, where every frame is RAW.
    Torch's thread count (of the calling thread) limits the work: with more than one, K is done by a helper thread while
    the caller does V.
    """

    def __init__(self, artifact: Artifact, config: CodecConfig) -> None:
        """Copy the columns of the bases that the plans use to the compute dtype.

        A coded window takes the artifact's finest plan. Raises ConfigError when the artifact has no plan of
        `config.target_ratio`, naming those it has.
        """
        plan = _find_plan(artifact, config.target_ratio)
        self.geometry = artifact.geometry
        self.target_ratio = LOSSLESS_RATIO if plan is None else plan.target_ratio
        self._config = config
        self._rope = artifact.rope
        self._dtype: torch.dtype = getattr(torch, artifact.geometry.dtype)
        self._artifact_digest = artifact.digest
        self._geometry_digest = geometry_digest(artifact.geometry, artifact.rope)
        self._planned_bits = 0 if plan is None else plan.k.planned_bits + plan.v.planned_bits
        # Packing, entropy coding and short torch operations use one core, however many torch may.
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="kvtc-codec")
        self._plans: NodePlans | None = None
        self._codings: dict[int, Codings] = {}
        if plan is not None:
            window = min(artifact.plans, key=lambda each: each.target_ratio) if _codes_window(config) else plan
            self._plans = NodePlans(plan_code(plan.target_ratio), plan_code(window.target_ratio))
            plans = {self._plans.body: plan, self._plans.window: window}
            dtype = compute_dtype(config, self._dtype)
            self._codings = {code: _codings(artifact, each, dtype) for code, each in plans.items()}

    @property
    def planned_bytes_per_token(self) -> float:
        """Bytes of one coded token by the plan: parameters and symbols, without headers (SidePlan.planned_bits)."""
        return self._planned_bits / 8 if self._plans else float(self.geometry.bytes_per_token)

    def segments(self, start_position: int, num_tokens: int, *, min_coded_tokens: int = 1) -> list[NodeSegment]:
        """The frames of a node (codec.segments)."""
        return node_segments(start_position, num_tokens, self._config, self._plans, min_coded_tokens=min_coded_tokens)

    def encode(self, chunk: KVChunk, kind: FrameKind, plan: int = 0) -> EncodedChunk:
        """Encode one chunk as one frame.

        chunk: on the CPU, of the artifact's geometry and dtype; not changed. plan: which of the codec's two plans a
        CODED frame is to have, by its `plan_code`; 0 for that of the target ratio. The frame is RAW instead of `kind`
        where that cannot represent the chunk: non-finite numbers, ranges beyond f16, no tokens. Raises
        GeometryMismatch for a chunk of another shape or dtype, ConfigError for a CODED frame in lossless mode or of
        another plan.
        """
        self._check_chunk(chunk)
        sections = None
        if kind is FrameKind.CODED:
            if self._plans is None:
                raise ConfigError("the codec is lossless (target_ratio 1): it has no plan for CODED frames")
            plan = plan or self._plans.body
            if plan not in self._codings:
                raise ConfigError(f"the codec has no plan {plan}: it has {', '.join(map(str, self._codings))}")
            if chunk.num_tokens:
                undo = self._rotation(chunk.start_position, chunk.num_tokens, inverse=True)
                k, v = self._codings[plan]
                k_sections, v_sections = self._both(
                    lambda: coded_sections(Side.K, chunk.keys, k, undo, self._config),
                    lambda: coded_sections(Side.V, chunk.values, v, None, self._config),
                )
                if k_sections is not None and v_sections is not None:
                    sections = k_sections | v_sections
        elif kind is FrameKind.FP8:
            sections = fp8_sections(chunk)
        if sections is None:
            kind, sections = FrameKind.RAW, raw_sections(chunk)
        header = FrameHeader(
            kind,
            chunk.num_tokens,
            chunk.start_position,
            self._geometry_digest,
            self._artifact_digest,
            plan if kind is FrameKind.CODED else 0,
        )
        return EncodedChunk(write_frame(header, sections, self._config.coder, self._config.coder_level), kind)

    def encode_node(
        self, keys: torch.Tensor, values: torch.Tensor, start_position: int, *, min_coded_tokens: int = 1
    ) -> Iterator[tuple[TokenRange, EncodedChunk]]:
        """Cut a node into chunks and encode one after the other, as the caller asks for them.

        keys, values: the whole node, like those of a KVChunk. Yields absolute token ranges in order of position.
        min_coded_tokens: see codec.segments. Working memory is that of one chunk. Raises what `encode` raises.
        """
        for tokens, kind, plan in self.segments(start_position, keys.shape[1], min_coded_tokens=min_coded_tokens):
            part = slice(tokens.start - start_position, tokens.stop - start_position)
            yield tokens, self.encode(KVChunk(keys[:, part], values[:, part], tokens.start), kind, plan)

    def verify(self, frame: bytes, start_position: int, num_tokens: int) -> None:
        """Check that a frame is undamaged and holds these tokens for this model, artifact and its plans.

        Costs one pass of a checksum; nothing is decoded. Raises BitstreamError.
        """
        self._read(frame, start_position, num_tokens)

    def open(self, frame: bytes, start_position: int, num_tokens: int) -> OpenFrame:
        """Verify a frame and decode its sections, so that layers can be reconstructed from it.

        Raises BitstreamError. The result does not refer to `frame`.
        """
        opened = self._read(frame, start_position, num_tokens)
        if opened.header.kind is FrameKind.RAW:
            return open_raw(opened, self.geometry, self._dtype)
        if opened.header.kind is FrameKind.FP8:
            return open_fp8(opened, self.geometry, self._dtype)
        codings = self._codings[opened.header.plan]
        k, v = codings
        coefficients = self._both(
            lambda: side_coefficients(opened, Side.K, k), lambda: side_coefficients(opened, Side.V, v)
        )
        rotation = self._rotation(start_position, num_tokens, inverse=False)
        return CodedFrame(codings, coefficients, rotation, self.geometry.num_kv_heads, self._dtype)

    def _read(self, frame: bytes, start_position: int, num_tokens: int) -> Frame:
        expected = FrameExpectation(
            self._geometry_digest,
            self._artifact_digest,
            tuple(self._codings),
            start_position,
            num_tokens,
            max_section_bytes(self.geometry, num_tokens),
        )
        opened = read_frame(frame, expected)
        sizes = section_bytes(opened, self.geometry, self._codings.get(opened.header.plan))
        for section, entry in opened.entries.items():
            if entry.raw_bytes != sizes[section]:
                raise GeometryMismatch(f"{section.name} has {entry.raw_bytes} bytes, the plan needs {sizes[section]}")
        return opened

    def _both(self, for_k: Callable[[], Result], for_v: Callable[[], Result]) -> tuple[Result, Result]:
        """Do K's and V's part of a task at the same time, or after each other where torch is held to one thread."""
        if torch.get_num_threads() == 1:
            return for_k(), for_v()
        k = self._helper.submit(for_k)
        v = for_v()
        return k.result(), v

    def _rotation(self, start_position: int, num_tokens: int, inverse: bool) -> Rotation:
        positions = torch.arange(start_position, start_position + num_tokens)
        return Rotation(positions, self._rope, self.geometry.num_kv_heads, inverse=inverse)

    def _check_chunk(self, chunk: KVChunk) -> None:
        geometry = self.geometry
        for name, found, head_dim in (
            ("keys", chunk.keys, geometry.head_dim),
            ("values", chunk.values, geometry.v_head_dim),
        ):
            expected = (geometry.num_layers, chunk.num_tokens, geometry.num_kv_heads, head_dim)
            if found.shape != expected or found.dtype != self._dtype:
                raise GeometryMismatch(
                    f"{name} are {found.dtype}{list(found.shape)}, the model has {self._dtype}{list(expected)}"
                )


def _find_plan(artifact: Artifact, target_ratio: float) -> Plan | None:
    """The plan to use; None is lossless."""
    if target_ratio == LOSSLESS_RATIO or (target_ratio == 0 and not artifact.plans):
        return None
    if target_ratio == 0:
        return artifact.plans[0]
    for plan in artifact.plans:
        if plan_code(plan.target_ratio) == plan_code(target_ratio):
            return plan
    available = ", ".join(f"{plan.target_ratio:g}" for plan in artifact.plans) or "none"
    raise ConfigError(
        f"target_ratio is {target_ratio:g}, the artifact has plans for: {available} (and 1, lossless, is always there)"
    )


def compute_dtype(config: CodecConfig, cache_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the projections, `config.compute_dtype` with "auto" resolved for this machine."""
    if config.compute_dtype == "auto":
        # A CPU without such instructions emulates bfloat16, at a fifth to a hundredth of the speed of fp32.
        capabilities = torch.cpu.get_capabilities()
        in_hardware = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
        return torch.bfloat16 if in_hardware and cache_dtype.itemsize == 2 else torch.float32
    return torch.bfloat16 if config.compute_dtype == "bfloat16" else torch.float32


def _codes_window(config: CodecConfig) -> bool:
    return config.window_format == "coded" and config.window_tokens > 0


def _codings(artifact: Artifact, plan: Plan, dtype: torch.dtype) -> Codings:
    if artifact.k is None or artifact.v is None:
        raise ConfigError(f"the artifact has a plan for ratio {plan.target_ratio:g}, but no bases")
    num_layers = artifact.geometry.num_layers
    return (
        SideCoding.from_plan(artifact.k, plan.k, num_layers, dtype),
        SideCoding.from_plan(artifact.v, plan.v, num_layers, dtype),
    )
