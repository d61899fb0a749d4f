"""The fixed part of a frame and what a reader checks it against (FORMAT.md sections 3 and 8)."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from sglang_kvtc.errors import BitstreamError, GeometryMismatch, TruncatedFrame, UnsupportedVersion
from sglang_kvtc.types import ModelGeometry, Side

if TYPE_CHECKING:
    from sglang_kvtc.artifact.schema import RopeSpec

MAGIC = b"KVTC"
VERSION = 1
GEOMETRY_DIGEST_BYTES = 8
ARTIFACT_DIGEST_BYTES = 16
_PLAN_UNITS_PER_RATIO = 256

# magic, version, kind, section count, flags, tokens, start position, plan, geometry digest, artifact digest
_HEADER = struct.Struct("<4sBBBBIII8s16s")
HEADER_BYTES = _HEADER.size
_U32_MAX = 2**32 - 1


class FrameKind(enum.IntEnum):
    """How the tokens of a frame are stored."""

    RAW = 0
    FP8 = 1
    CODED = 2


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a frame holds and which model, artifact and plan it belongs to.

    num_tokens: consecutive tokens of one sequence. start_position: absolute position of the first one.
    geometry_digest: 8 bytes of `geometry_digest`. artifact_digest: the 16 bytes of `Artifact.digest`.
    plan: `plan_code` of the target ratio for CODED frames, 0 for RAW and FP8.
    """

    kind: FrameKind
    num_tokens: int
    start_position: int
    geometry_digest: bytes
    artifact_digest: bytes
    plan: int = 0


@dataclass(frozen=True, slots=True)
class FrameExpectation:
    """What the reader needs a frame to be.

    plans: any of which a CODED frame may have; RAW and FP8 frames have none. max_section_bytes: bound on the declared
    size of a decoded section, checked before anything is allocated (see `max_section_bytes`).
    """

    geometry_digest: bytes
    artifact_digest: bytes
    plans: tuple[int, ...]
    start_position: int
    num_tokens: int
    max_section_bytes: int

    def check(self, header: FrameHeader) -> None:
        """Raise GeometryMismatch, naming the field, unless `header` is what is expected."""
        accepted: tuple[tuple[str, str | int, tuple[str | int, ...]], ...] = (
            ("geometry_digest", header.geometry_digest.hex(), (self.geometry_digest.hex(),)),
            ("artifact_digest", header.artifact_digest.hex(), (self.artifact_digest.hex(),)),
            ("plan", header.plan, self.plans if header.kind is FrameKind.CODED else (0,)),
            ("start_position", header.start_position, (self.start_position,)),
            ("num_tokens", header.num_tokens, (self.num_tokens,)),
        )
        for name, found, expected in accepted:
            if found not in expected:
                wanted = " or ".join(map(str, expected)) or "none"
                raise GeometryMismatch(f"{name} of the frame is {found}, expected {wanted}: the frame is not used")


def plan_code(target_ratio: float) -> int:
    """The header's `plan` for a target ratio: the ratio in steps of 1/256."""
    return round(target_ratio * _PLAN_UNITS_PER_RATIO)


def geometry_digest(geometry: ModelGeometry, rope: RopeSpec) -> bytes:
    """8 bytes that differ when a frame's features or positions would mean something else (FORMAT.md section 7)."""
    digest = xxhash.xxh3_64()
    digest.update(
        struct.pack("<4I", geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.v_head_dim)
    )
    for name in (geometry.dtype, rope.kind):
        encoded = name.encode()
        digest.update(struct.pack("<I", len(encoded)) + encoded)
    digest.update(struct.pack("<IB", rope.rotary_dim, rope.interleaved))
    digest.update(struct.pack(f"<dI{len(rope.inv_freq)}d", rope.attention_factor, len(rope.inv_freq), *rope.inv_freq))
    return digest.digest()


def max_section_bytes(geometry: ModelGeometry, num_tokens: int) -> int:
    """Largest decoded section that a frame of `num_tokens` tokens can rightly have.

    Four bytes per feature and token cover float32 RAW sections and the shift and scale of groups of one component.
    The FP8 scales do not grow with the tokens, hence at least one token.
    """
    return 4 * max(geometry.features(Side.K), geometry.features(Side.V)) * max(num_tokens, 1)


def pack_header(header: FrameHeader, num_sections: int) -> bytes:
    """The header's bytes. Raises BitstreamError for a field that the format cannot hold."""
    for name in ("num_tokens", "start_position", "plan"):
        value = getattr(header, name)
        if not 0 <= value <= _U32_MAX:
            raise BitstreamError(f"{name} {value} does not fit the frame header: expected 0 to {_U32_MAX}")
    for name, size in (("geometry_digest", GEOMETRY_DIGEST_BYTES), ("artifact_digest", ARTIFACT_DIGEST_BYTES)):
        value = getattr(header, name)
        if len(value) != size:
            raise BitstreamError(f"{name} has {len(value)} bytes, expected {size}")
    _check_plan(header)
    return _HEADER.pack(
        MAGIC,
        VERSION,
        header.kind,
        num_sections,
        0,
        header.num_tokens,
        header.start_position,
        header.plan,
        header.geometry_digest,
        header.artifact_digest,
    )


def check_identity(view: memoryview) -> int:
    """Check size, magic and version of the fixed part; return the number of sections.

    Raises TruncatedFrame or UnsupportedVersion. Whatever else the header says is read after the checksum.
    """
    if len(view) < HEADER_BYTES:
        raise TruncatedFrame(f"the frame has {len(view)} bytes, its header alone {HEADER_BYTES}")
    magic, version, _, num_sections, *_ = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise UnsupportedVersion(f"the frame starts with {magic!r}, expected {MAGIC!r}: not a KVTC frame")
    if version != VERSION:
        raise UnsupportedVersion(f"the frame has format version {version}, this reader knows {VERSION}")
    return int(num_sections)


def unpack_header(view: memoryview) -> FrameHeader:
    """Read a header whose identity was checked. Raises UnsupportedVersion or GeometryMismatch."""
    _, _, kind, _, flags, num_tokens, start_position, plan, geometry, artifact = _HEADER.unpack_from(view)
    if flags:
        raise UnsupportedVersion(f"the frame has header flags {flags:#04x}, this reader knows none")
    try:
        kind = FrameKind(kind)
    except ValueError as error:
        raise UnsupportedVersion(f"the frame has kind {kind}, this reader knows {_known(FrameKind)}") from error
    header = FrameHeader(kind, num_tokens, start_position, geometry, artifact, plan)
    _check_plan(header)
    return header


def _check_plan(header: FrameHeader) -> None:
    if (header.kind is FrameKind.CODED) != (header.plan > 0):
        raise GeometryMismatch(f"plan {header.plan} in a {header.kind.name} frame: only CODED frames have a plan")


def _known(kinds: type[enum.IntEnum]) -> str:
    return ", ".join(f"{kind.value} ({kind.name})" for kind in kinds)
