"""Head sizes that kernels like to refuse: the tier and the cell pool serve them, or the start ends with their name."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from codec.toy_model import make_artifact, make_chunk, restore
from integration.gated_engine import HEAD_DIM, H, L, cell_allocator, cell_pool
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sglang_kvtc.artifact.schema import Artifact
from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.errors import ArtifactError, UnsupportedError
from sglang_kvtc.eviction.page_table import PageTables
from sglang_kvtc.integration.compat import check_pool
from sglang_kvtc.integration.pool_port import CellPort, PoolPort
from sglang_kvtc.types import KVChunk, ModelGeometry

MULTI_HEAD = SimpleNamespace(attention_arch=AttentionArch.MHA, is_hybrid_swa=False)
LATENT = SimpleNamespace(attention_arch=AttentionArch.MLA, is_hybrid_swa=False)
HEAD_SIZES = [(80, 80), (96, 96), (72, 72), (112, 112), (576, 576), (24, 24), (34, 34), (192, 128), (64, 96)]
by_head_size = pytest.mark.parametrize(("head_dim", "v_head_dim"), HEAD_SIZES)
SLOTS = 40


def artifact_of(head_dim: int, v_head_dim: int) -> Artifact:
    return make_artifact(ModelGeometry(2, 2, head_dim, v_head_dim, "bfloat16"))


def pool_of(artifact: Artifact) -> MHATokenToKVPool:
    geometry = artifact.geometry
    return MHATokenToKVPool(
        SLOTS,
        1,
        dtype=torch.bfloat16,
        head_num=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        v_head_dim=geometry.v_head_dim,
        layer_num=geometry.num_layers,
        device="cpu",
        enable_memory_saver=False,
    )


@by_head_size
@pytest.mark.parametrize("kind", FrameKind)
def test_a_shape_02_a_head_size_that_passes_the_start_is_served(
    head_dim: int, v_head_dim: int, kind: FrameKind
) -> None:
    """Through SGLang's own pool: gathered, coded, restored into other slots."""
    artifact = artifact_of(head_dim, v_head_dim)
    pool = pool_of(artifact)
    assert check_pool(pool, MULTI_HEAD, False, artifact) == artifact.geometry
    codec, port = KVCodec(artifact, CodecConfig()), PoolPort(pool)
    chunk = make_chunk(artifact, 9)
    slots, others = torch.arange(3, 12), torch.arange(20, 29)
    port.scatter(range(2), slots, chunk.keys, chunk.values)
    frame = codec.encode(KVChunk(*port.gather(slots), chunk.start_position), kind).frame
    restored = restore(codec, frame, chunk.start_position, 9)
    port.scatter(range(2), others, *restored)
    for found, rebuilt, original in zip(port.gather(others), restored, (chunk.keys, chunk.values), strict=True):
        assert torch.equal(found, rebuilt)
        assert torch.isfinite(found).all()
        if kind is FrameKind.RAW:
            assert torch.equal(found, original)


@by_head_size
def test_a_shape_02_an_artifact_of_another_head_size_ends_the_start_with_both(head_dim: int, v_head_dim: int) -> None:
    served = artifact_of(head_dim, v_head_dim)
    pool = pool_of(served)
    for other in (artifact_of(head_dim + 2, v_head_dim), artifact_of(head_dim, v_head_dim + 2)):
        message = f"describes {other.geometry}, the server runs {served.geometry}: calibrate again"
        with pytest.raises(ArtifactError, match=re.escape(message)):
            check_pool(pool, MULTI_HEAD, False, other)


def test_a_shape_02_latent_attention_is_refused_by_name() -> None:
    pool = MLATokenToKVPool(SLOTS, 1, torch.bfloat16, 512, 64, 2, "cpu", enable_memory_saver=False)
    with pytest.raises(UnsupportedError, match="MLATokenToKVPool with MLA attention: only models with plain"):
        check_pool(pool, LATENT, False, artifact_of(576, 512))


def test_a_shape_02_pools_laid_out_otherwise_or_of_other_numbers_are_refused_by_name() -> None:
    artifact = artifact_of(80, 80)
    pool = pool_of(artifact)
    pool.k_buffer = [buffer.transpose(1, 2) for buffer in pool.k_buffer]
    with pytest.raises(UnsupportedError, match=r"laid out as .*, not \[slot, head, channel\]"):
        check_pool(pool, MULTI_HEAD, False, artifact)
    pool = pool_of(artifact)
    pool.v_buffer = [buffer.to(torch.float8_e4m3fn) for buffer in pool.v_buffer]
    with pytest.raises(UnsupportedError, match=r"KV dtypes torch\.bfloat16 and torch\.float8_e4m3fn"):
        check_pool(pool, MULTI_HEAD, False, artifact)
    with pytest.raises(UnsupportedError, match="sliding-window"):
        check_pool(pool_of(artifact), MULTI_HEAD, True, artifact)


@pytest.mark.parametrize("v_head_dim", [3, HEAD_DIM, 9])
def test_a_shape_03_cells_and_page_tables_address_k_and_v_of_other_sizes_alike(v_head_dim: int) -> None:
    pool = cell_pool(12, v_head_dim=v_head_dim)
    allocator, port = cell_allocator(pool), CellPort(pool)
    assert pool.get_kv_size_bytes() == tuple(13 * L * H * size * 4 for size in (HEAD_DIM, v_head_dim))
    noise = torch.Generator().manual_seed(1)
    slots = allocator.alloc(7)[torch.randperm(7, generator=noise)]
    keys, values = (torch.randn(L, 7, H, size, generator=noise) for size in (HEAD_DIM, v_head_dim))
    port.scatter(range(L), slots, keys, values)
    for found, stored in zip(port.gather(slots), (keys, values), strict=True):
        assert torch.equal(found, stored)
    tables = PageTables(pool.cells, max_requests=1)
    tables.set(0, slots)
    # One table per layer serves both buffers: a page is the K and the V of one (token, head).
    for layer, table in enumerate(tables.batch([0], layer) for layer in range(L)):
        for head in range(H):
            pages = table.kv_indices[table.kv_indptr[head] : table.kv_indptr[head + 1]].long()
            assert torch.equal(pool.k_cells[pages], keys[layer, :, head])
            assert torch.equal(pool.v_cells[pages], values[layer, :, head])
