from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from codec.plain_codec import PlainCodec
from codec.toy_model import (
    GEOMETRY,
    STEP,
    Pair,
    make_artifact,
    make_chunk,
    make_uniform_artifact,
    restore,
    rms,
    rope_of,
    round_trip,
)

from sglang_kvtc.artifact.schema import Artifact
from sglang_kvtc.bitstream.frame import open_frame
from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.types import KVChunk, ModelGeometry, Side

MakeArtifact = Callable[[ModelGeometry], Artifact]
PLANS = pytest.mark.parametrize("make", [make_artifact, make_uniform_artifact], ids=["grouped", "uniform"])
KINDS = pytest.mark.parametrize("kind", list(FrameKind), ids=lambda kind: kind.name)


def assert_as_good_as_plain(artifact: Artifact, chunk: KVChunk, found: Pair) -> None:
    """Our error against the input is at most twice that of the plain codec in fp32."""
    plain = PlainCodec(artifact, torch.float32)
    for side, ours, original in zip(Side, found, (chunk.keys, chunk.values), strict=True):
        assert ours.shape == original.shape
        assert ours.dtype == original.dtype
        reference = plain.round_trip(side, original, chunk.start_position)
        assert rms(ours - original.float()) <= 2 * rms(reference - original.float())
        # And the reference itself is a useful one: it keeps most of what varies.
        assert rms(reference - original.float()) < 0.5 * rms(original - original.float().mean(dim=1, keepdim=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("computed_in", ["bfloat16", "float32"])
@pytest.mark.parametrize("plan", ["grouped", "grouped, weighted", "uniform"])
def test_decoding_is_as_exact_as_the_plain_path_allows(dtype: str, computed_in: str, plan: str) -> None:
    geometry = dataclasses.replace(GEOMETRY, dtype=dtype)
    uniform = make_uniform_artifact(geometry)
    artifact = uniform if plan == "uniform" else make_artifact(geometry, weighted="weighted" in plan)
    chunk = make_chunk(artifact, 40, 3000)
    codec = KVCodec(artifact, CodecConfig(compute_dtype=computed_in))
    frame = codec.encode(chunk, FrameKind.CODED).frame
    for side, found in zip(Side, restore(codec, frame, 3000, 40), strict=True):
        coefficients = PlainCodec(artifact).frame_coefficients(side, frame)
        exact = PlainCodec(artifact).values(side, coefficients, 3000)
        plain = PlainCodec(artifact, getattr(torch, computed_in)).values(side, coefficients, 3000).to(found.dtype)
        assert rms(found - exact) <= 2 * rms(plain - exact)
        assert (found - exact).abs().max() <= 2 * (plain - exact).abs().max()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 112, 128, 160, 192, 256, 576])
@PLANS
def test_a_shape_01_head_sizes_and_counts_round_trip(head_dim: int, num_kv_heads: int, make: MakeArtifact) -> None:
    artifact = make(ModelGeometry(1, num_kv_heads, head_dim, head_dim, "bfloat16"))
    chunk = make_chunk(artifact, 19)
    assert_as_good_as_plain(artifact, chunk, round_trip(artifact, chunk, FrameKind.CODED))


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(192, 128), (64, 96)])
@KINDS
@PLANS
def test_a_shape_03_k_and_v_may_differ_in_head_size(
    head_dim: int, v_head_dim: int, kind: FrameKind, make: MakeArtifact
) -> None:
    geometry = ModelGeometry(2, 2, head_dim, v_head_dim, "bfloat16")
    artifact = make(geometry)
    codec = KVCodec(artifact, CodecConfig())
    assert geometry.bytes_per_token == 2 * 2 * 2 * (head_dim + v_head_dim)
    chunk = make_chunk(artifact, 21)
    keys, values = round_trip(artifact, chunk, kind)
    assert keys.shape == (2, 21, 2, head_dim)
    assert values.shape == (2, 21, 2, v_head_dim)
    if kind is FrameKind.CODED:
        assert_as_good_as_plain(artifact, chunk, (keys, values))
    elif kind is FrameKind.RAW:
        assert len(codec.encode(chunk, kind).frame) <= 21 * geometry.bytes_per_token + 100


@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_a_side_07_the_rotary_slice_of_partial_rope_is_restored_like_the_rest(
    rotary_dim: int, interleaved: bool
) -> None:
    rope = rope_of(GEOMETRY, rotary_dim=rotary_dim, interleaved=interleaved)
    artifact = make_artifact(rope=rope)
    chunk = make_chunk(artifact, 50, 9000)
    found = round_trip(artifact, chunk, FrameKind.CODED)
    assert_as_good_as_plain(artifact, chunk, found)
    error = found[0] - chunk.keys.float()
    # The toy's directions favour no channel, and a rotation changes no length.
    assert rms(error[..., :rotary_dim]) == pytest.approx(rms(error[..., rotary_dim:]), rel=0.5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_raw_frames_are_exact_bit_for_bit(dtype: str) -> None:
    artifact = make_artifact(dataclasses.replace(GEOMETRY, dtype=dtype))
    chunk = make_chunk(artifact, 20)
    chunk.keys[0, 0, 0, :4] = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-30]).to(chunk.keys.dtype)
    for found, original in zip(round_trip(artifact, chunk, FrameKind.RAW), (chunk.keys, chunk.values), strict=True):
        bits = {2: torch.int16, 4: torch.int32}[original.element_size()]
        assert torch.equal(found.view(bits), original.view(bits))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_fp8_frames_are_within_the_format(dtype: str) -> None:
    artifact = make_artifact(dataclasses.replace(GEOMETRY, dtype=dtype))
    chunk = make_chunk(artifact, 20)
    chunk.values[1, :, 0] = 0
    for found, original in zip(round_trip(artifact, chunk, FrameKind.FP8), (chunk.keys, chunk.values), strict=True):
        largest = original.abs().amax(dim=(1, 3), keepdim=True).double()
        # E4M3 has 4 significant bits down to 2^-6 of its unit and equal steps below; then the cache dtype rounds once.
        step = torch.maximum(original.abs().double() / 16, largest / 448 * 2**-10)
        rounding = original.abs().double() * torch.finfo(original.dtype).eps
        assert ((found - original).abs().double() <= step + rounding).all()


@pytest.mark.parametrize("spread", [1e-8, 1e-4, 1.0, 1e4])
@pytest.mark.parametrize("kind", [FrameKind.CODED, FrameKind.FP8])
@PLANS
def test_a_num_02_small_and_large_ranges_are_coded(spread: float, kind: FrameKind, make: MakeArtifact) -> None:
    artifact = make(GEOMETRY)
    generator = torch.Generator().manual_seed(0)
    keys = (torch.rand(3, 9, 2, 16, generator=generator) - 0.5) * spread
    values = (torch.rand(3, 9, 2, 12, generator=generator) - 0.5) * spread
    found = round_trip(artifact, KVChunk(keys.bfloat16(), values.bfloat16(), 5), kind)
    assert all(torch.isfinite(tensor).all() for tensor in found)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        *((kind, bad) for kind in (FrameKind.CODED, FrameKind.FP8) for bad in (math.nan, math.inf, -math.inf)),
        (FrameKind.CODED, 3e38),
    ],
)
@pytest.mark.parametrize("side", list(Side), ids=lambda side: side.name)
@PLANS
def test_a_num_02_what_cannot_be_coded_is_stored_raw(
    kind: FrameKind, bad: float, side: Side, make: MakeArtifact
) -> None:
    artifact = make(GEOMETRY)
    codec = KVCodec(artifact, CodecConfig())
    chunk = make_chunk(artifact, 30)
    tensor = chunk.keys if side is Side.K else chunk.values
    tensor[2, 17, 1, 3] = bad
    encoded = codec.encode(chunk, kind)
    assert encoded.kind is FrameKind.RAW
    assert open_frame(encoded.frame).header.kind is FrameKind.RAW
    keys, values = restore(codec, encoded.frame, chunk.start_position, 30)
    assert torch.equal(keys.view(torch.int16), chunk.keys.view(torch.int16))
    assert torch.equal(values.view(torch.int16), chunk.values.view(torch.int16))


@pytest.mark.parametrize("step", [0.0, STEP], ids=["grouped", "uniform"])
def test_a_num_02_bad_input_is_seen_even_where_nothing_is_kept(step: float) -> None:
    artifact = make_artifact(groups=(), step=step)
    chunk = make_chunk(artifact, 5)
    assert KVCodec(artifact, CodecConfig()).encode(chunk, FrameKind.CODED).kind is FrameKind.CODED
    chunk.values[0, 0, 0, 0] = torch.nan
    assert KVCodec(artifact, CodecConfig()).encode(chunk, FrameKind.CODED).kind is FrameKind.RAW


def test_a_plan_without_groups_restores_the_mean() -> None:
    artifact = make_artifact(groups=())
    chunk = make_chunk(artifact, 5)
    _, values = round_trip(artifact, chunk, FrameKind.CODED)
    exact = PlainCodec(artifact).values(Side.V, torch.empty(5, 0), chunk.start_position)
    torch.testing.assert_close(values, exact.bfloat16(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("constant", [-100.0, -0.5, 0.0, 0.5, 100.0])
def test_a_num_03_constant_kv_is_recovered(constant: float) -> None:
    artifact = make_artifact(weighted=False)
    chunk = KVChunk(torch.zeros(3, 6, 2, 16).bfloat16(), torch.full((3, 6, 2, 12), constant).bfloat16(), 0)
    codec = KVCodec(artifact, CodecConfig())
    for kind in (FrameKind.RAW, FrameKind.FP8):
        _, values = restore(codec, codec.encode(chunk, kind).frame, 0, 6)
        assert (values == constant).all()
    assert_equal_tokens(restore(codec, codec.encode(chunk, FrameKind.CODED).frame, 0, 6)[1])


def assert_equal_tokens(values: torch.Tensor) -> None:
    torch.testing.assert_close(values, values[:, :1].expand_as(values), rtol=2**-7, atol=0)
