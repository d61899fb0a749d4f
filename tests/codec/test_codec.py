from __future__ import annotations

import dataclasses
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from codec.plain_codec import PlainCodec
from codec.toy_model import GEOMETRY, RATIO, make_artifact, make_chunk, rms, rope_of
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvtc.artifact.schema import Artifact, Group, Plan, SidePlan
from sglang_kvtc.bitstream.frame import SectionId, open_frame
from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.errors import BitstreamError, ChecksumMismatch, ConfigError, GeometryMismatch
from sglang_kvtc.types import KVChunk, ModelGeometry, Side, TokenRange

KINDS = pytest.mark.parametrize("kind", list(FrameKind), ids=lambda kind: kind.name)
LAYERS = range(GEOMETRY.num_layers)
Pair = tuple[torch.Tensor, torch.Tensor]


def restore(
    codec: KVCodec, frame: bytes, start_position: int, num_tokens: int, tokens: TokenRange | None = None
) -> Pair:
    """K and V of the tokens (default: all), layer by layer."""
    opened = codec.open(frame, start_position, num_tokens)
    tokens = tokens or TokenRange(0, num_tokens)
    layers = [opened.reconstruct(range(layer, layer + 1), tokens) for layer in range(codec.geometry.num_layers)]
    return torch.cat([keys for keys, _ in layers]), torch.cat([values for _, values in layers])


def round_trip(artifact: Artifact, chunk: KVChunk, kind: FrameKind, config: CodecConfig | None = None) -> Pair:
    codec = KVCodec(artifact, config or CodecConfig())
    encoded = codec.encode(chunk, kind)
    assert encoded.kind is kind
    return restore(codec, encoded.frame, chunk.start_position, chunk.num_tokens)


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
@pytest.mark.parametrize("compute_dtype", ["auto", "float32"])
@pytest.mark.parametrize("scaled", [False, True], ids=["scale one", "scaled"])
def test_decoding_is_as_exact_as_the_plain_path_allows(dtype: str, compute_dtype: str, scaled: bool) -> None:
    artifact = make_artifact(dataclasses.replace(GEOMETRY, dtype=dtype), scaled=scaled)
    chunk = make_chunk(artifact, 40, 3000)
    codec = KVCodec(artifact, CodecConfig(compute_dtype=compute_dtype))
    frame = codec.encode(chunk, FrameKind.CODED).frame
    computed_in = torch.bfloat16 if dtype != "float32" and compute_dtype == "auto" else torch.float32
    for side, found in zip(Side, restore(codec, frame, 3000, 40), strict=True):
        coefficients = PlainCodec(artifact).frame_coefficients(side, frame)
        exact = PlainCodec(artifact).values(side, coefficients, 3000)
        plain = PlainCodec(artifact, computed_in).values(side, coefficients, 3000).to(found.dtype)
        assert rms(found - exact) <= 2 * rms(plain - exact)
        assert (found - exact).abs().max() <= 2 * (plain - exact).abs().max()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 112, 128, 160, 192, 256, 576])
def test_a_shape_01_head_sizes_and_counts_round_trip(head_dim: int, num_kv_heads: int) -> None:
    artifact = make_artifact(ModelGeometry(1, num_kv_heads, head_dim, head_dim, "bfloat16"))
    chunk = make_chunk(artifact, 19)
    assert_as_good_as_plain(artifact, chunk, round_trip(artifact, chunk, FrameKind.CODED))


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(192, 128), (64, 96)])
@KINDS
def test_a_shape_03_k_and_v_may_differ_in_head_size(head_dim: int, v_head_dim: int, kind: FrameKind) -> None:
    geometry = ModelGeometry(2, 2, head_dim, v_head_dim, "bfloat16")
    artifact = make_artifact(geometry)
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


@KINDS
def test_a_shape_04_a_chunk_without_tokens_is_an_empty_raw_frame(kind: FrameKind) -> None:
    artifact = make_artifact()
    codec = KVCodec(artifact, CodecConfig())
    encoded = codec.encode(make_chunk(artifact, 0, 7), kind)
    assert encoded.kind is FrameKind.RAW
    codec.verify(encoded.frame, 7, 0)
    keys, values = codec.open(encoded.frame, 7, 0).reconstruct(LAYERS, TokenRange(0, 0))
    assert keys.shape == (3, 0, 2, 16)
    assert values.shape == (3, 0, 2, 12)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 7, 12])
def test_a_shape_04_small_nodes_are_restored(num_tokens: int) -> None:
    artifact = make_artifact()
    codec = KVCodec(artifact, CodecConfig(sink_tokens=4, window_tokens=8, window_format="raw"))
    chunk = make_chunk(artifact, num_tokens, 0)
    restored = [
        restore(codec, encoded.frame, tokens.start, len(tokens))
        for tokens, encoded in codec.encode_node(chunk.keys, chunk.values, 0)
    ]
    assert sum(keys.shape[1] for keys, _ in restored) == num_tokens
    if num_tokens:
        assert torch.equal(torch.cat([keys for keys, _ in restored], dim=1), chunk.keys)
        assert torch.equal(torch.cat([values for _, values in restored], dim=1), chunk.values)


@KINDS
@pytest.mark.parametrize("num_tokens", [2, 17, 64, 130])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_split_04_parts_of_a_frame_equal_slices_of_the_whole(
    kind: FrameKind, num_tokens: int, page_size: int
) -> None:
    artifact = make_artifact()
    codec = KVCodec(artifact, CodecConfig())
    chunk = make_chunk(artifact, num_tokens, 33)
    frame = codec.encode(chunk, kind).frame
    whole = restore(codec, frame, 33, num_tokens)
    for cut in range(page_size, num_tokens, page_size):
        for part in (TokenRange(0, cut), TokenRange(cut, num_tokens)):
            for found, expected in zip(restore(codec, frame, 33, num_tokens, part), whole, strict=True):
                window = expected[:, part.start : part.stop]
                if kind is FrameKind.CODED:
                    # Other sizes of a product may sum in another order: at most one rounding of the cache dtype.
                    torch.testing.assert_close(found, window, rtol=2**-7, atol=2**-20)
                else:
                    assert torch.equal(found, window)


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
def test_a_num_02_small_and_large_ranges_are_coded(spread: float, kind: FrameKind) -> None:
    artifact = make_artifact(scaled=False)
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
def test_a_num_02_what_cannot_be_coded_is_stored_raw(kind: FrameKind, bad: float, side: Side) -> None:
    artifact = make_artifact()
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


def test_a_num_02_bad_input_is_seen_even_where_nothing_is_kept() -> None:
    artifact = make_artifact(groups=())
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
    artifact = make_artifact(scaled=False)
    chunk = KVChunk(torch.zeros(3, 6, 2, 16).bfloat16(), torch.full((3, 6, 2, 12), constant).bfloat16(), 0)
    codec = KVCodec(artifact, CodecConfig())
    for kind in (FrameKind.RAW, FrameKind.FP8):
        _, values = restore(codec, codec.encode(chunk, kind).frame, 0, 6)
        assert (values == constant).all()
    assert_equal_tokens(restore(codec, codec.encode(chunk, FrameKind.CODED).frame, 0, 6)[1])


def assert_equal_tokens(values: torch.Tensor) -> None:
    torch.testing.assert_close(values, values[:, :1].expand_as(values), rtol=2**-7, atol=0)


def test_gaussian_ranges_lower_the_error_at_equal_size_and_decode_the_same_way() -> None:
    errors = []
    for rule in ("minmax", "gaussian"):
        artifact = make_artifact(groups=(Group(0, 16, 2), Group(16, 16, 1)), rule=rule)
        chunk = make_chunk(artifact, 200)
        codec = KVCodec(artifact, CodecConfig(coder="identity"))
        frame = codec.encode(chunk, FrameKind.CODED).frame
        keys, _ = restore(
            KVCodec(make_artifact(groups=(Group(0, 16, 2), Group(16, 16, 1))), CodecConfig()), frame, 100, 200
        )
        errors.append((rms(keys - chunk.keys.float()), len(frame)))
    assert errors[1][0] < errors[0][0]
    assert errors[1][1] == errors[0][1]


def test_encoding_twice_gives_the_same_bytes() -> None:
    artifact = make_artifact()
    chunk = make_chunk(artifact, 100)
    codec = KVCodec(artifact, CodecConfig())
    before = chunk.keys.clone()
    for kind in FrameKind:
        assert codec.encode(chunk, kind).frame == codec.encode(chunk, kind).frame
    assert torch.equal(chunk.keys, before)


@given(st.integers(0, 300), st.integers(0, 6), st.sampled_from(["fp8", "raw"]))
def test_a_node_is_the_sequence_of_its_segments(num_tokens: int, start: int, window_format: str) -> None:
    artifact = make_artifact()
    codec = KVCodec(artifact, CodecConfig(window_tokens=20, chunk_tokens=64, window_format=window_format))
    chunk = make_chunk(artifact, num_tokens, start)
    encoded = list(codec.encode_node(chunk.keys, chunk.values, start))
    assert [(tokens, part.kind) for tokens, part in encoded] == codec.segments(start, num_tokens)
    for tokens, part in encoded:
        codec.verify(part.frame, tokens.start, len(tokens))
        window = slice(tokens.start - start, tokens.stop - start)
        alone = codec.encode(KVChunk(chunk.keys[:, window], chunk.values[:, window], tokens.start), part.kind)
        assert alone.frame == part.frame


def test_a_node_is_encoded_chunk_by_chunk_as_it_is_asked_for() -> None:
    artifact = make_artifact()
    codec = KVCodec(artifact, CodecConfig(window_tokens=0, sink_tokens=0, chunk_tokens=16))
    chunk = make_chunk(artifact, 64, 0)
    node = codec.encode_node(chunk.keys, chunk.values, 0)
    next(node)
    chunk.keys[:, 32:] = 0
    later = [part.frame for _, part in node]
    assert later[-1] == codec.encode(KVChunk(chunk.keys[:, 48:], chunk.values[:, 48:], 48), FrameKind.CODED).frame


@pytest.mark.parametrize("plans", [True, False], ids=["artifact with plans", "artifact without bases"])
def test_lossless_mode_keeps_every_bit(plans: bool) -> None:
    artifact = make_artifact()
    chunk = make_chunk(artifact, 200, 0)
    if not plans:
        artifact = dataclasses.replace(artifact, k=None, v=None, plans=())
    codec = KVCodec(artifact, CodecConfig(target_ratio=1.0 if plans else 0.0))
    assert codec.target_ratio == 1
    assert codec.planned_bytes_per_token == GEOMETRY.bytes_per_token
    frames = list(codec.encode_node(chunk.keys, chunk.values, 0))
    assert {part.kind for _, part in frames} == {FrameKind.RAW}
    restored = [restore(codec, part.frame, tokens.start, len(tokens)) for tokens, part in frames]
    assert torch.equal(torch.cat([keys for keys, _ in restored], dim=1), chunk.keys)
    assert torch.equal(torch.cat([values for _, values in restored], dim=1), chunk.values)
    with pytest.raises(ConfigError, match="lossless"):
        codec.encode(chunk, FrameKind.CODED)


def test_the_plan_is_chosen_by_its_ratio() -> None:
    artifact = make_artifact()
    other = Plan(32.0, SidePlan((Group(0, 16, 2),), 0.5), SidePlan((Group(0, 16, 1),), 0.5))
    artifact = dataclasses.replace(artifact, plans=(*artifact.plans, other))
    assert KVCodec(artifact, CodecConfig()).target_ratio == RATIO
    codec = KVCodec(artifact, CodecConfig(target_ratio=32))
    assert codec.target_ratio == 32
    assert codec.planned_bytes_per_token == (16 * 2 + 32 + 16 * 1 + 32) / 8
    with pytest.raises(ConfigError, match="8, 32"):
        KVCodec(artifact, CodecConfig(target_ratio=64))


def test_frames_of_other_tokens_artifacts_and_plans_are_refused() -> None:
    artifact = make_artifact()
    codec = KVCodec(artifact, CodecConfig())
    frame = codec.encode(make_chunk(artifact, 30, 10), FrameKind.CODED).frame
    codec.verify(frame, 10, 30)
    with pytest.raises(GeometryMismatch, match="start_position"):
        codec.verify(frame, 11, 30)
    with pytest.raises(GeometryMismatch, match="num_tokens"):
        codec.open(frame, 10, 29)
    with pytest.raises(ChecksumMismatch):
        codec.verify(frame[:-20] + bytes([frame[-20] ^ 1]) + frame[-19:], 10, 30)
    with pytest.raises(GeometryMismatch, match="artifact_digest"):
        KVCodec(dataclasses.replace(artifact, digest=bytes(16)), CodecConfig()).verify(frame, 10, 30)
    other = dataclasses.replace(artifact, plans=(dataclasses.replace(artifact.plans[0], target_ratio=9.0),))
    with pytest.raises(GeometryMismatch, match="plan"):
        KVCodec(other, CodecConfig()).verify(frame, 10, 30)
    with pytest.raises(GeometryMismatch, match="plan"):
        KVCodec(artifact, CodecConfig(target_ratio=1)).open(frame, 10, 30)


def test_a_frame_whose_sections_do_not_suit_the_plan_is_refused_before_it_is_decoded() -> None:
    frame = KVCodec(make_artifact(), CodecConfig()).encode(make_chunk(make_artifact(), 30, 10), FrameKind.CODED).frame
    fewer = KVCodec(make_artifact(groups=(Group(0, 16, 3),)), CodecConfig())
    with pytest.raises(GeometryMismatch, match="K_PARAMS"):
        fewer.verify(frame, 10, 30)


def test_every_damaged_byte_is_noticed() -> None:
    artifact = make_artifact()
    codec = KVCodec(artifact, CodecConfig())
    frame = codec.encode(make_chunk(artifact, 3, 0), FrameKind.CODED).frame
    for index in range(len(frame)):
        damaged = bytearray(frame)
        damaged[index] ^= 0x10
        with pytest.raises(BitstreamError):
            codec.verify(bytes(damaged), 0, 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda chunk: dataclasses.replace(chunk, keys=chunk.keys[:2]), "keys"),
        (lambda chunk: dataclasses.replace(chunk, values=chunk.values[:, :5]), "values"),
        (lambda chunk: dataclasses.replace(chunk, values=chunk.values.float()), "torch.float32"),
        (lambda chunk: dataclasses.replace(chunk, keys=chunk.values, values=chunk.keys), "keys"),
    ],
)
def test_a_chunk_of_another_geometry_is_refused(change: object, named: str) -> None:
    artifact = make_artifact()
    assert callable(change)
    with pytest.raises(GeometryMismatch, match=named):
        KVCodec(artifact, CodecConfig()).encode(change(make_chunk(artifact, 9)), FrameKind.RAW)


def test_an_open_frame_does_not_need_the_bytes_it_came_from() -> None:
    artifact = make_artifact()
    codec = KVCodec(artifact, CodecConfig(coder="identity"))
    for kind in FrameKind:
        frame = bytearray(codec.encode(make_chunk(artifact, 20, 10), kind).frame)
        opened = codec.open(frame, 10, 20)
        before = [tensor.clone() for tensor in opened.reconstruct(LAYERS, TokenRange(0, 20))]
        frame[:] = bytes(len(frame))
        for found, expected in zip(opened.reconstruct(LAYERS, TokenRange(0, 20)), before, strict=True):
            assert torch.equal(found, expected)


def test_stored_bytes_are_what_the_plan_says_plus_the_header() -> None:
    artifact = make_artifact()
    codec = KVCodec(artifact, CodecConfig(coder="identity"))
    frame = codec.encode(make_chunk(artifact, 64), FrameKind.CODED).frame
    assert len(frame) == 64 * codec.planned_bytes_per_token + 100
    smaller = KVCodec(artifact, CodecConfig()).encode(make_chunk(artifact, 64), FrameKind.CODED).frame
    assert len(smaller) < len(frame)
    assert open_frame(smaller).entries[SectionId.K_PARAMS].raw_bytes == 64 * 4 * 4


def test_threads_may_share_a_codec() -> None:
    artifact = make_artifact()
    codec = KVCodec(artifact, CodecConfig())
    chunks = [make_chunk(artifact, 40 + index, index, seed=index) for index in range(8)]
    expected = [codec.encode(chunk, FrameKind.CODED).frame for chunk in chunks]
    barrier = threading.Barrier(4)

    def work(worker: int) -> None:
        barrier.wait(30)
        for index in [*range(worker, 8), *range(worker)]:
            chunk = chunks[index]
            frame = codec.encode(chunk, FrameKind.CODED).frame
            assert frame == expected[index]
            restored = restore(codec, frame, chunk.start_position, chunk.num_tokens)
            assert torch.equal(restored[0], restore(codec, expected[index], index, 40 + index)[0])

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, worker) for worker in range(4)]:
            future.result(60)
