from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from codec.toy_model import GEOMETRY, RATIO, make_artifact, make_chunk, restore, with_a_finer_plan
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvtc.artifact.schema import Group, Plan, SidePlan
from sglang_kvtc.bitstream.frame import SectionId, open_frame, read_header, write_frame
from sglang_kvtc.bitstream.header import FrameKind, plan_code
from sglang_kvtc.codec.codec import KVCodec, compute_dtype
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.errors import BitstreamError, ChecksumMismatch, ConfigError, GeometryMismatch
from sglang_kvtc.types import KVChunk, TokenRange

KINDS = pytest.mark.parametrize("kind", list(FrameKind), ids=lambda kind: kind.name)
LAYERS = range(GEOMETRY.num_layers)


@pytest.mark.parametrize(
    ("capabilities", "cache_dtype", "expected"),
    [
        ({"amx_bf16": True}, torch.bfloat16, torch.bfloat16),
        ({"avx512_bf16": True}, torch.float16, torch.bfloat16),
        ({"amx_bf16": True}, torch.float32, torch.float32),
        ({"avx512_bf16": False, "avx2": True}, torch.bfloat16, torch.float32),
        ({}, torch.bfloat16, torch.float32),
    ],
)
def test_products_are_in_bfloat16_only_where_the_cpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch,
    capabilities: dict[str, bool],
    cache_dtype: torch.dtype,
    expected: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert compute_dtype(CodecConfig(), cache_dtype) is expected
    assert compute_dtype(CodecConfig(compute_dtype="bfloat16"), cache_dtype) is torch.bfloat16
    assert compute_dtype(CodecConfig(compute_dtype="float32"), cache_dtype) is torch.float32


def test_a_shape_04_a_coded_frame_without_tokens_can_be_read() -> None:
    artifact = make_artifact()
    codec = KVCodec(artifact, CodecConfig())
    written = open_frame(codec.encode(make_chunk(artifact, 3, 7), FrameKind.CODED).frame)
    nothing = {section: np.empty(0, np.uint8) for section in written.entries}
    frame = write_frame(dataclasses.replace(written.header, num_tokens=0), nothing, "deflate", 6)
    keys, values = codec.open(frame, 7, 0).reconstruct(LAYERS, TokenRange(0, 0))
    assert keys.shape == (3, 0, 2, 16)
    assert values.shape == (3, 0, 2, 12)


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


def test_encoding_twice_gives_the_same_bytes() -> None:
    artifact = make_artifact()
    chunk = make_chunk(artifact, 100)
    codec = KVCodec(artifact, CodecConfig())
    before = chunk.keys.clone()
    for kind in FrameKind:
        assert codec.encode(chunk, kind).frame == codec.encode(chunk, kind).frame
    assert torch.equal(chunk.keys, before)


@given(st.integers(0, 300), st.integers(0, 6), st.sampled_from(["coded", "fp8", "raw"]))
def test_a_node_is_the_sequence_of_its_segments(num_tokens: int, start: int, window_format: str) -> None:
    artifact = with_a_finer_plan()
    codec = KVCodec(artifact, CodecConfig(window_tokens=20, chunk_tokens=64, window_format=window_format))
    chunk = make_chunk(artifact, num_tokens, start)
    encoded = list(codec.encode_node(chunk.keys, chunk.values, start))
    found = [(tokens, part.kind, read_header(part.frame).plan) for tokens, part in encoded]
    assert found == codec.segments(start, num_tokens)
    for tokens, part in encoded:
        codec.verify(part.frame, tokens.start, len(tokens))
        window = slice(tokens.start - start, tokens.stop - start)
        alone = codec.encode(
            KVChunk(chunk.keys[:, window], chunk.values[:, window], tokens.start),
            part.kind,
            read_header(part.frame).plan,
        )
        assert alone.frame == part.frame


def test_a_coded_window_takes_the_finest_plan_and_is_nearer_to_the_cache() -> None:
    artifact = with_a_finer_plan()
    codec = KVCodec(artifact, CodecConfig(sink_tokens=0, window_tokens=32))
    assert codec.target_ratio == RATIO
    chunk = make_chunk(artifact, 96, 10)
    (_, body), (window, finer) = codec.encode_node(chunk.keys, chunk.values, 10)
    assert [read_header(part.frame).plan for part in (body, finer)] == [plan_code(RATIO), plan_code(RATIO / 2)]
    by_body = codec.encode(KVChunk(chunk.keys[:, 64:], chunk.values[:, 64:], 74), FrameKind.CODED)
    errors = [
        float((restore(codec, frame, window.start, len(window))[1].float() - chunk.values[:, 64:].float()).norm())
        for frame in (finer.frame, by_body.frame)
    ]
    assert errors[0] < errors[1]
    with pytest.raises(ConfigError, match=f"no plan 1: it has {plan_code(RATIO)}, {plan_code(RATIO / 2)}"):
        codec.encode(chunk, FrameKind.CODED, 1)


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


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_helper_thread_changes_nothing(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    artifact = make_artifact()
    chunk = make_chunk(artifact, 50)
    expected = KVCodec(artifact, CodecConfig()).encode(chunk, FrameKind.CODED).frame
    restored = restore(KVCodec(artifact, CodecConfig()), expected, 100, 50)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    codec = KVCodec(artifact, CodecConfig())
    before = set(threading.enumerate())
    # The tier's worker runs in inference mode, which a helper thread does not inherit.
    with torch.inference_mode():
        staged = dataclasses.replace(chunk, keys=chunk.keys.clone(), values=chunk.values.clone())
        assert codec.encode(staged, FrameKind.CODED).frame == expected
        for found, wanted in zip(restore(codec, expected, 100, 50), restored, strict=True):
            assert torch.equal(found, wanted)
    helpers = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("kvtc-codec")]
    assert len(helpers) == num_threads - 1


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
