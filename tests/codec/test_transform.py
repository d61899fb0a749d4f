from __future__ import annotations

import pytest
import torch
from codec.plain_codec import PlainCodec
from codec.toy_model import GEOMETRY, make_artifact, make_chunk, rms

from sglang_kvtc.artifact.schema import Artifact
from sglang_kvtc.codec.encode import centred_features
from sglang_kvtc.codec.rope import Rotation
from sglang_kvtc.codec.transform import SideCoding
from sglang_kvtc.types import Side

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
SIDES = pytest.mark.parametrize("side", list(Side), ids=lambda side: side.name)
WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
START = 1000


def coding_of(artifact: Artifact, side: Side, dtype: torch.dtype) -> SideCoding:
    basis = artifact.basis(side)
    assert basis is not None
    return SideCoding.from_plan(basis, artifact.plans[0].side(side), GEOMETRY.num_layers, dtype)


def undo(artifact: Artifact, num_tokens: int) -> Rotation:
    positions = torch.arange(START, START + num_tokens)
    return Rotation(positions, artifact.rope, GEOMETRY.num_kv_heads, inverse=True)


@DTYPES
@SIDES
@WEIGHTED
def test_coefficients_are_as_exact_as_the_plain_path_allows(dtype: torch.dtype, side: Side, weighted: bool) -> None:
    artifact = make_artifact(weighted=weighted)
    chunk = make_chunk(artifact, 33, START)
    values = chunk.keys if side is Side.K else chunk.values
    coding = coding_of(artifact, side, dtype)
    features = centred_features(values, coding, undo(artifact, 33) if side is Side.K else None)
    found = coding.transform.project(features).T

    exact = PlainCodec(artifact).coefficients(side, values, START)
    plain = PlainCodec(artifact, dtype).coefficients(side, values, START)
    assert rms(found - exact) <= 2 * rms(plain - exact)
    assert (found - exact).abs().max() <= 2 * (plain - exact).abs().max()


@DTYPES
@WEIGHTED
def test_zero_coefficients_reconstruct_the_mean(dtype: torch.dtype, weighted: bool) -> None:
    artifact = make_artifact(weighted=weighted)
    basis = artifact.v
    assert basis is not None
    transform = coding_of(artifact, Side.V, dtype).transform
    coefficients = transform.empty_coefficients(2)
    coefficients[: transform.num_components] = 0
    features = transform.reconstruct(coefficients.T.contiguous(), range(GEOMETRY.num_layers)).flatten(1)
    mean = torch.from_numpy(basis.mean)
    # One rounding to the dtype: the mean itself is held exactly enough not to add another.
    assert ((features - mean).abs() <= mean.abs() * torch.finfo(dtype).eps * 0.51).all()


@DTYPES
@SIDES
def test_a_block_of_layers_is_that_part_of_the_whole(dtype: torch.dtype, side: Side) -> None:
    artifact = make_artifact()
    transform = coding_of(artifact, side, dtype).transform
    coefficients = transform.empty_coefficients(40)
    generator = torch.Generator().manual_seed(0)
    coefficients[: transform.num_components] = torch.randn(transform.num_components, 40, generator=generator).to(dtype)
    rows = coefficients.T.contiguous()
    whole = transform.reconstruct(rows, range(GEOMETRY.num_layers))
    for layer in range(GEOMETRY.num_layers):
        part = transform.reconstruct(rows, range(layer, layer + 1))
        # The order of a sum may depend on its size; one unit in the last place of the dtype is all that can differ.
        torch.testing.assert_close(part, whole[:, layer : layer + 1], rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_weights_are_held_once_where_there_are_no_weights(weighted: bool) -> None:
    transform = coding_of(make_artifact(weighted=weighted), Side.K, torch.bfloat16).transform
    addresses = {weight.data_ptr() for weight in (transform._project_weight, transform._reconstruct_weight)}
    assert len(addresses) == (2 if weighted else 1)


def test_tiles_cover_the_layers_in_order() -> None:
    transform = coding_of(make_artifact(), Side.K, torch.float32).transform
    for num_tokens in (0, 1, 512, 1_000_000):
        assert [layer for tile in transform.layer_tiles(num_tokens) for layer in tile] == [0, 1, 2]
