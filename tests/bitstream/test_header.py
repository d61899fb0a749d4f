from __future__ import annotations

import dataclasses

import pytest
import xxhash
from bitstream.sample_frames import GEOMETRY, expectation, header

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.bitstream.header import FrameKind, geometry_digest, max_section_bytes, pack_header, plan_code
from sglang_kvtc.errors import BitstreamError, GeometryMismatch

ROPE = RopeSpec(kind="default", rotary_dim=4, inv_freq=(1.0, 0.01))


def test_geometry_digest_is_the_one_the_format_describes() -> None:
    described = (
        bytes.fromhex("02000000 02000000 10000000 08000000")
        + bytes.fromhex("08000000")
        + b"bfloat16"
        + bytes.fromhex("07000000")
        + b"default"
        + bytes.fromhex("04000000 00 000000000000f03f 02000000 000000000000f03f 7b14ae47e17a843f")
    )
    assert geometry_digest(GEOMETRY, ROPE) == xxhash.xxh3_64_digest(described)


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 3},
        {"num_kv_heads": 1},
        {"head_dim": 8, "v_head_dim": 16},
        {"dtype": "float16"},
    ],
)
def test_a_key_01_geometry_digest_changes_with_shape_and_dtype(change: dict[str, object]) -> None:
    changed = dataclasses.replace(GEOMETRY, **change)
    assert geometry_digest(changed, ROPE) != geometry_digest(GEOMETRY, ROPE)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "yarn"},
        {"rotary_dim": 8},
        {"inv_freq": (1.0, 0.02)},
        {"inv_freq": (1.0,)},
        {"attention_factor": 1.1},
        {"interleaved": True},
    ],
)
def test_geometry_digest_changes_with_the_rope(change: dict[str, object]) -> None:
    assert geometry_digest(GEOMETRY, dataclasses.replace(ROPE, **change)) != geometry_digest(GEOMETRY, ROPE)


@pytest.mark.parametrize(("ratio", "code"), [(16, 4096), (17.5, 4480), (1 / 256, 1)])
def test_plan_code_counts_steps_of_a_256th(ratio: float, code: int) -> None:
    assert plan_code(ratio) == code


def test_a_shape_03_section_limit_covers_the_wider_of_k_and_v() -> None:
    wide_values = dataclasses.replace(GEOMETRY, head_dim=8, v_head_dim=64)
    assert max_section_bytes(wide_values, 10) == 4 * 2 * 2 * 64 * 10
    assert max_section_bytes(GEOMETRY, 0) == max_section_bytes(GEOMETRY, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": -1},
        {"start_position": 2**32},
        {"plan": 2**32},
        {"geometry_digest": b"short"},
        {"artifact_digest": bytes(17)},
    ],
)
def test_fields_the_format_cannot_hold_are_refused_by_name(change: dict[str, object]) -> None:
    with pytest.raises(BitstreamError, match=next(iter(change))):
        pack_header(dataclasses.replace(header(FrameKind.CODED), **change), 4)


@pytest.mark.parametrize(("kind", "plan"), [(FrameKind.RAW, 1), (FrameKind.FP8, 1), (FrameKind.CODED, 0)])
def test_exactly_coded_frames_have_a_plan(kind: FrameKind, plan: int) -> None:
    with pytest.raises(GeometryMismatch, match=f"plan {plan} in a {kind.name} frame"):
        pack_header(dataclasses.replace(header(kind), plan=plan), 4)


@pytest.mark.parametrize("kind", FrameKind)
def test_one_expectation_serves_every_kind_of_frame(kind: FrameKind) -> None:
    expectation(header(kind)).check(header(kind))
