"""Nodes whose K and V have plans of other shapes: all are stored, and what does not fit is an error that is counted."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from codec.toy_model import GEOMETRY, GROUPS, Pair, make_artifact, make_chunk

from sglang_kvtc.artifact.schema import Artifact, Group
from sglang_kvtc.bitstream.frame import SectionId, open_frame
from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import CodecConfig, TierConfig
from sglang_kvtc.errors import GeometryMismatch, RestoreError
from sglang_kvtc.tier.tier import CompressedTier
from sglang_kvtc.types import KVChunk, TokenRange

FEW, NONE = (Group(0, 16, 4),), ()
CODEC = CodecConfig(sink_tokens=0, window_tokens=0)
NODE_TOKENS, NODES = 40, 5


def artifact_of(k_groups: tuple[Group, ...], v_groups: tuple[Group, ...]) -> Artifact:
    artifact = make_artifact()
    (plan,) = artifact.plans
    sides = {"k": dataclasses.replace(plan.k, groups=k_groups), "v": dataclasses.replace(plan.v, groups=v_groups)}
    return dataclasses.replace(artifact, plans=(dataclasses.replace(plan, **sides),))


class Pool:
    """EnginePort over one tensor per side. `damage` changes what is gathered."""

    def __init__(self, artifact: Artifact) -> None:
        chunk = make_chunk(artifact, 2 * NODES * NODE_TOKENS, start_position=0)
        self.keys, self.values = chunk.keys, chunk.values
        self.damage = lambda keys, values: (keys, values)

    def gather(self, slots: torch.Tensor) -> Pair:
        keys, values = self.damage(self.keys[:, slots], self.values[:, slots])
        return keys.clone(), values.clone()

    def scatter(self, layers: range, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[layers.start : layers.stop, slots] = keys
        self.values[layers.start : layers.stop, slots] = values


class Harness:
    def __init__(self, artifact: Artifact) -> None:
        self.codec, self.pool = KVCodec(artifact, CODEC), Pool(artifact)
        config = TierConfig(arena_bytes=1 << 24, min_node_tokens=1)
        self.tier = CompressedTier(self.codec, self.pool, config, config.arena_bytes)

    def compress(self, node: int) -> np.ndarray | None:
        slots = torch.arange(node * NODE_TOKENS, (node + 1) * NODE_TOKENS)
        return self.tier.compress(slots, 0, lambda _tokens: False, wait_s=5)

    def restore(self, ids: np.ndarray, slots: torch.Tensor) -> bool:
        """Whether it was a hit."""
        pieces = self.tier.prepare_restore(ids, lambda _tokens: slots)
        if pieces is None:
            return False
        done, errors = threading.Event(), list[RestoreError | None]()
        self.tier.start_restore(pieces, lambda _layers: None, lambda error: (errors.append(error), done.set()))
        assert done.wait(30)
        assert errors == [None]
        return True

    def frames(self) -> list[bytes]:
        return [chunk.frame for chunk in self.tier.store._chunks if chunk.frame is not None]


@pytest.fixture(
    params=[(GROUPS, FEW), (FEW, GROUPS), (GROUPS, NONE), (NONE, FEW)],
    ids=["more groups in K", "more groups in V", "no groups in V", "no groups in K"],
)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    harness = Harness(artifact_of(*request.param))
    yield harness
    harness.tier.close()


def test_a_shape_07_a_batch_of_nodes_with_unequal_sides_is_stored_and_restored_whole(harness: Harness) -> None:
    nodes = [harness.compress(node) for node in range(NODES)]
    harness.tier.worker.drain()
    stats = harness.tier.worker.stats
    assert (stats.encoded_frames, stats.encoded_tokens, stats.failed_frames) == (NODES, NODES * NODE_TOKENS, 0)
    frames = harness.frames()
    assert [open_frame(frame).header.kind for frame in frames] == [FrameKind.CODED] * NODES
    layers, target = range(GEOMETRY.num_layers), torch.arange(NODES * NODE_TOKENS, (NODES + 1) * NODE_TOKENS)
    for ids, frame in zip(nodes, frames, strict=True):
        assert harness.restore(ids, target)
        expected = harness.codec.open(frame, 0, NODE_TOKENS).reconstruct(layers, TokenRange(0, NODE_TOKENS))
        for found, decoded in zip(harness.pool.gather(target), expected, strict=True):
            assert torch.equal(found, decoded)


@pytest.mark.parametrize(
    "damage",
    [
        lambda keys, values: (keys[:, 1:], values),
        lambda keys, values: (keys, values[:, 1:]),
        lambda keys, values: (keys, values[1:]),
        lambda keys, values: (keys[..., 1:], values),
        lambda keys, values: (values, keys),
        lambda keys, values: (keys, values.float()),
    ],
    ids=["K misses a token", "V misses a token", "V misses a layer", "K misses a channel", "swapped", "dtype"],
)
def test_a_shape_07_a_node_whose_sides_do_not_fit_raises_is_counted_and_spoils_no_other(
    damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(artifact_of(GROUPS, FEW))
    try:
        good = harness.compress(0)
        harness.pool.damage = damage
        bad = harness.compress(1)
        harness.pool.damage = lambda keys, values: (keys, values)
        also_good = harness.compress(2)
        harness.tier.worker.drain()
        stats = harness.tier.worker.stats
        assert (stats.failed_frames, stats.encoded_frames) == (1, 2)
        assert "encoding" in caplog.text and "GeometryMismatch" in caplog.text
        target = torch.arange(NODES * NODE_TOKENS, (NODES + 1) * NODE_TOKENS)
        assert [harness.restore(ids, target) for ids in (good, bad, also_good)] == [True, False, True]
    finally:
        harness.tier.close()


def test_a_shape_07_the_codec_raises_for_sides_that_do_not_fit() -> None:
    artifact = artifact_of(GROUPS, FEW)
    codec, chunk = KVCodec(artifact, CODEC), make_chunk(artifact, 9)
    for keys, values, named in (
        (chunk.keys[:, 1:], chunk.values, "values"),
        (chunk.keys, chunk.values[..., 1:], "values"),
        (chunk.keys[:2], chunk.values, "keys"),
        (chunk.keys.float(), chunk.values, "keys"),
    ):
        for kind in FrameKind:
            with pytest.raises(GeometryMismatch, match=f"^{named} are "):
                codec.encode(KVChunk(keys, values, 0), kind)


@pytest.mark.parametrize("groups", [(FEW, GROUPS), (GROUPS, GROUPS), (NONE, FEW)])
def test_a_shape_07_a_frame_of_other_groups_is_refused_by_section(groups: tuple[tuple[Group, ...], ...]) -> None:
    """Digest and ratio are those expected here, so that only sizes are left to tell."""
    writer, reader = KVCodec(artifact_of(GROUPS, FEW), CODEC), KVCodec(artifact_of(*groups), CODEC)
    frame = writer.encode(make_chunk(make_artifact(), 9), FrameKind.CODED).frame
    with pytest.raises(GeometryMismatch, match=rf"^({'|'.join(SectionId.__members__)}) has \d+ bytes, the plan needs"):
        reader.open(frame, 100, 9)
