"""The reader written from FORMAT.md alone against the whole codec: down to numbers, for frames of real encoders."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from bitstream import plain_reader
from bitstream.sample_frames import CODERS
from codec.toy_model import (
    GEOMETRY,
    GROUPS,
    STEP,
    UNIFORM_GROUPS,
    make_artifact,
    make_chunk,
    make_uniform_artifact,
    restore,
    rope_of,
)
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.bitstream.frame import open_frame
from sglang_kvtc.bitstream.header import FrameKind, geometry_digest
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.codec.decode import side_coefficients
from sglang_kvtc.codec.transform import SideCoding
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.types import ModelGeometry, Side

WIDTHS = np.array([group.width for group in GROUPS for _ in range(group.size)], np.uint8)
GROUP_OF_COMPONENT = [index for index, group in enumerate(GROUPS) for _ in range(group.size)]
TOKENS, POSITION = 21, 1003
by_coder = pytest.mark.parametrize("coder", CODERS)


def encoded(kind: FrameKind, coder: str, dtype: str = "bfloat16") -> tuple[KVCodec, bytes]:
    artifact = make_artifact(dataclasses.replace(GEOMETRY, dtype=dtype))
    codec = KVCodec(artifact, CodecConfig(coder=coder, compute_dtype="float32"))
    encoded = codec.encode(make_chunk(artifact, TOKENS, POSITION), kind)
    assert encoded.kind is kind
    return codec, encoded.frame


def shape(side: Side) -> tuple[int, int, int, int]:
    head_dim = GEOMETRY.head_dim if side is Side.K else GEOMETRY.v_head_dim
    return GEOMETRY.num_layers, TOKENS, GEOMETRY.num_kv_heads, head_dim


@by_coder
def test_coefficients_are_shift_plus_scale_times_symbol(coder: str) -> None:
    artifact = make_artifact()
    _, frame = encoded(FrameKind.CODED, coder)
    for side in Side:
        coding = SideCoding.from_plan(
            artifact.basis(side), artifact.plans[0].side(side), GEOMETRY.num_layers, torch.float32
        )
        found = side_coefficients(open_frame(frame), side, coding)
        exact = plain_reader.coefficients(plain_reader.read(frame), side.name, WIDTHS, GROUP_OF_COMPONENT)
        # Scale times symbol is exact in fp32 (11 + 8 bits), so that the sum is rounded once.
        np.testing.assert_array_equal(found.numpy().T[: len(exact)], exact.astype(np.float32))


@by_coder
def test_coefficients_of_uniform_plans_are_levels_times_the_step_of_the_token(coder: str) -> None:
    artifact = make_uniform_artifact()
    codec = KVCodec(artifact, CodecConfig(coder=coder, compute_dtype="float32"))
    encoded = codec.encode(make_chunk(artifact, TOKENS, POSITION), FrameKind.CODED)
    assert encoded.kind is FrameKind.CODED
    groups = [(group.size, group.width) for group in UNIFORM_GROUPS]
    for side in Side:
        coding = SideCoding.from_plan(
            artifact.basis(side), artifact.plans[0].side(side), GEOMETRY.num_layers, torch.float32
        )
        found = side_coefficients(open_frame(encoded.frame), side, coding)
        exact = plain_reader.uniform_coefficients(plain_reader.read(encoded.frame), side.name, groups, STEP)
        assert len(set(plain_reader.read(encoded.frame).sections[f"{side.name}_PARAMS"])) > 1
        np.testing.assert_array_equal(found.numpy().T[: len(exact)], exact)


@by_coder
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_raw_frames_hold_the_numbers_of_the_cache(coder: str, dtype: str) -> None:
    codec, frame = encoded(FrameKind.RAW, coder, dtype)
    for side, found in zip(Side, restore(codec, frame, POSITION, TOKENS), strict=True):
        plain = plain_reader.raw_values(plain_reader.read(frame), side.name, dtype, shape(side))
        np.testing.assert_array_equal(found.double().numpy(), plain)


@by_coder
def test_fp8_frames_hold_numbers_times_scales(coder: str) -> None:
    codec, frame = encoded(FrameKind.FP8, coder)
    for side, found in zip(Side, restore(codec, frame, POSITION, TOKENS), strict=True):
        exact = plain_reader.fp8_values(plain_reader.read(frame), side.name, shape(side))
        assert torch.equal(found, torch.from_numpy(exact).float().bfloat16())


def test_every_fp8_number_is_read_as_the_standard_says() -> None:
    numbers = torch.arange(256).to(torch.uint8)
    plain = [plain_reader.e4m3(byte) for byte in numbers.tolist()]
    np.testing.assert_array_equal(numbers.view(torch.float8_e4m3fn).double().numpy(), plain)


sizes = st.integers(1, 2**32 - 1)


@given(
    st.builds(ModelGeometry, sizes, sizes, sizes, sizes, st.sampled_from(["bfloat16", "float16", "float32"])),
    st.builds(
        RopeSpec,
        kind=st.text(max_size=12),
        rotary_dim=st.integers(0, 2**32 - 1),
        inv_freq=st.lists(st.floats(allow_nan=False), max_size=5).map(tuple),
        attention_factor=st.floats(allow_nan=False),
        interleaved=st.booleans(),
    ),
)
def test_geometry_digests_are_those_of_the_text(geometry: ModelGeometry, rope: RopeSpec) -> None:
    fields = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.v_head_dim)
    assert geometry_digest(geometry, rope) == plain_reader.geometry_digest(
        fields,
        geometry.dtype,
        rope.kind,
        rope.rotary_dim,
        rope.interleaved,
        rope.attention_factor,
        rope.inv_freq,
    )


def test_a_frame_carries_the_digests_of_geometry_and_artifact() -> None:
    artifact = make_artifact()
    _, frame = encoded(FrameKind.CODED, "deflate")
    plain, rope = plain_reader.read(frame), rope_of(GEOMETRY)
    fields = (GEOMETRY.num_layers, GEOMETRY.num_kv_heads, GEOMETRY.head_dim, GEOMETRY.v_head_dim)
    digest = plain_reader.geometry_digest(fields, GEOMETRY.dtype, rope.kind, rope.rotary_dim, False, 1.0, rope.inv_freq)
    assert (plain.geometry_digest, plain.artifact_digest) == (digest, artifact.digest)


def test_the_plain_reader_uses_no_code_of_the_package() -> None:
    tree = ast.parse(Path(plain_reader.__file__).read_text(encoding="utf-8"))
    imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for name in ("sglang_kvtc", "isal", "zstandard"):
        assert not any(name in statement for statement in imports)
