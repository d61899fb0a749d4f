from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from eviction.plain_attention import (
    Cells,
    Request,
    assert_within_twice_torch,
    in_cells,
    random_request,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.eviction import attention, cell_lists
from sglang_kvtc.eviction.attention import decode_attention, extend_attention

SCALING = 0.3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def decode(cells: Cells, **options: Any) -> torch.Tensor:
    return decode_attention(*cells.for_decode, SCALING, **options)


def extend(cells: Cells, **options: Any) -> torch.Tensor:
    return extend_attention(*cells.for_decode, cells.new_lens, SCALING, **options)


def solo(requests: Sequence[Request]) -> torch.Tensor:
    return torch.cat([extend(in_cells([request], seed=9)) for request in requests])


@st.composite
def batches(draw: st.DrawFn, *, is_decode: bool) -> tuple[list[Request], Cells]:
    """Requests of one shape with holes anywhere, in cells in order or anywhere."""
    rng = generator(draw(st.integers(0, 2**31)))
    heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    head_dim, v_head_dim = draw(st.sampled_from([(8, 8), (16, 16), (12, 12), (16, 8), (8, 20)]))
    dtype = draw(st.sampled_from(DTYPES))
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        num_tokens = draw(st.one_of(st.integers(1, 3), st.integers(1, 40), st.integers(100, 140)))
        num_new = 1 if is_decode else draw(st.one_of(st.sampled_from([0, 1, num_tokens]), st.integers(0, num_tokens)))
        shares = draw(st.one_of(st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=heads, max_size=heads)))
        requests.append(
            random_request(
                rng,
                num_tokens=num_tokens,
                num_new=min(num_new, 12),
                kept_shares=draw(st.sampled_from([shares, [1.0] * heads])),
                group=group,
                head_dim=head_dim,
                v_head_dim=v_head_dim,
                dtype=dtype,
                evict_new=is_decode and draw(st.booleans()),
            )
        )
    chunk_tokens = draw(st.sampled_from([None, 5, 30]))
    return requests, in_cells(requests, seed=draw(st.sampled_from([None, 1, 2])), chunk_tokens=chunk_tokens)


@settings(max_examples=200)
@given(batches(is_decode=True), st.sampled_from([1, 20, 100, cell_lists.IN_PLACE_CELLS]))
def test_decode_is_masked_dense_attention_with_original_positions(
    batch: tuple[list[Request], Cells], in_place_cells: int
) -> None:
    requests, cells = batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cell_lists, "IN_PLACE_CELLS", in_place_cells)
        assert_within_twice_torch(decode(cells), requests, SCALING)


@settings(max_examples=150)
@given(batches(is_decode=False))
def test_extend_is_masked_dense_attention_with_original_positions(batch: tuple[list[Request], Cells]) -> None:
    requests, cells = batch
    assert_within_twice_torch(extend(cells), requests, SCALING)


@given(batches(is_decode=False), st.randoms(use_true_random=False))
def test_the_order_of_a_batch_does_not_matter(batch: tuple[list[Request], Cells], random: Any) -> None:
    requests, cells = batch
    order = list(range(len(requests)))
    random.shuffle(order)
    shuffled = extend(in_cells([requests[place] for place in order], seed=3)).split(
        [len(requests[place].queries) for place in order]
    )
    parts = extend(cells).split(cells.new_lens)
    for place, part in zip(order, shuffled, strict=True):
        assert_within_twice_torch(part, [requests[place]], SCALING)
        assert_within_twice_torch(parts[place], [requests[place]], SCALING)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_lists_of_very_different_lengths(dtype: torch.dtype) -> None:
    rng = generator(4)
    shape: dict[str, Any] = {"group": 3, "head_dim": 64, "dtype": dtype}
    kept_shares = [0.001, 0.3, 0.99, 1.0]
    decoded = [
        random_request(rng, num_tokens=num_tokens, num_new=1, kept_shares=kept_shares, **shape)
        for num_tokens in (1800, 5, 640)
    ]
    assert_within_twice_torch(decode(in_cells(decoded, seed=5)), decoded, SCALING)
    # A chunk of several blocks of queries, heads that evicted nothing beside heads that evicted (nearly) all.
    extended = [random_request(rng, num_tokens=1500, num_new=6, kept_shares=kept_shares, **shape)]
    extended[0].kept[:1494, 0] = False
    assert_within_twice_torch(extend(in_cells(extended, seed=6)), extended, SCALING)


@pytest.mark.parametrize("kept_shares", [[1.0, 1.0], [0.4, 0.5], [0.05, 0.9]])
@pytest.mark.parametrize("seed", [None, 8])
def test_long_chunks_are_attended_in_blocks(
    kept_shares: list[float], seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = random_request(generator(5), num_tokens=90, num_new=41, kept_shares=kept_shares)
    whole = extend(in_cells([request], seed=seed))
    monkeypatch.setattr(attention, "BLOCK_QUERIES", 16)
    blocks = extend(in_cells([request], seed=seed))
    assert_within_twice_torch(whole, [request], SCALING)
    assert_within_twice_torch(blocks, [request], SCALING)


@pytest.mark.parametrize("sinks", [0, 4])
def test_b_ev_01_chunks_written_after_an_eviction_see_what_was_kept(sinks: int) -> None:
    rng, suffix = generator(6), 32
    for num_new in (suffix, suffix // 4, 1):
        request = random_request(rng, num_tokens=100 + num_new, num_new=num_new, kept_shares=[1.0, 1.0])
        request.kept[sinks : 100 - suffix] = False
        result = extend(in_cells([request], seed=1))
        dense = random_request(rng, num_tokens=1, num_new=1, kept_shares=[1.0, 1.0])
        rest = request.kept[:, 0]
        dense = Request(request.queries, request.keys[rest], request.values[rest], request.kept[rest])
        assert (result - dense.attention(SCALING)).abs().max() <= 1e-5
        assert_within_twice_torch(result, [request], SCALING)


def test_b_ev_03_decoding_goes_on_after_half_was_evicted() -> None:
    request = random_request(generator(7), num_tokens=96, num_new=32, kept_shares=[0.5, 0.5, 0.5])
    for step in range(32):
        stop = 64 + step + 1
        now = Request(request.queries[step : step + 1], *(part[:stop] for part in (request.keys, request.values)),
                      request.kept[:stop])  # fmt: skip
        assert_within_twice_torch(decode(in_cells([now], seed=step)), [now], SCALING)


def test_b_ev_04_fresh_and_continued_requests_in_one_batch_are_what_they_are_alone() -> None:
    rng = generator(8)
    fresh = random_request(rng, num_tokens=1000, num_new=1000, kept_shares=[1.0, 1.0])
    continued = random_request(rng, num_tokens=1100, num_new=100, kept_shares=[0.5, 0.4])
    single = random_request(rng, num_tokens=700, num_new=1, kept_shares=[0.2, 0.8])
    for batch in ([fresh, continued], [continued, fresh], [single, continued, fresh]):
        assert torch.equal(extend(in_cells(batch, seed=2)), solo(batch))
    # The oracle is slow: the last tokens of the fresh request stand for it.
    last = Request(fresh.queries[-5:], fresh.keys, fresh.values, fresh.kept)
    result = extend(in_cells([fresh, single], seed=2))
    assert_within_twice_torch(result[995:1000], [last], SCALING)
    assert_within_twice_torch(result[1000:], [single], SCALING)


def test_b_ev_06_heads_may_keep_disjoint_tokens() -> None:
    request = random_request(generator(9), num_tokens=41, num_new=1, kept_shares=[0.0] * 4)
    for head in range(4):
        request.kept[head:40:4, head] = True
    cells = in_cells([request], seed=3)
    assert cells.kv_indptr.tolist() == [0, 11, 22, 33, 44]
    assert_within_twice_torch(decode(cells), [request], SCALING)
    assert_within_twice_torch(extend(cells), [request], SCALING)


@pytest.mark.parametrize("seed", [None, 4])
def test_b_ev_17_cells_outside_the_lists_have_no_influence(seed: int | None) -> None:
    rng = generator(10)
    requests = [
        random_request(rng, num_tokens=num_tokens, num_new=1, kept_shares=shares, evict_new=True)
        for num_tokens, shares in ((50, [1.0, 1.0]), (70, [0.5, 0.7]), (9, [0.0, 0.0]), (1100, [1.0, 1.0]))
    ]
    clean, dirty = (in_cells(requests, seed=seed, unused=unused) for unused in (0.0, float("nan")))
    unlisted = torch.ones(len(dirty.k_cells), dtype=torch.bool)
    unlisted[dirty.kv_indices.long()] = False
    assert dirty.k_cells[unlisted].isnan().all() and dirty.v_cells[unlisted].isnan().all()
    # A buffer of page-table entries is longer than its lists, and what lies behind them points at a bad cell.
    dirty.kv_indices = torch.cat([dirty.kv_indices, unlisted.nonzero().flatten()[:5].int()])
    assert torch.equal(decode(dirty), decode(clean))


def test_a_head_without_tokens_is_zero() -> None:
    request = random_request(generator(11), num_tokens=5, num_new=1, kept_shares=[0.0, 1.0], evict_new=True)
    result = decode(in_cells([request], seed=0), out=torch.full((1, 4, 16), float("nan")))
    assert (result[:, :2] == 0).all()
    assert (result[:, 2:] != 0).all()


@pytest.mark.parametrize("function", [decode, extend])
@pytest.mark.parametrize("seed", [None, 2])
def test_queries_and_output_may_have_any_strides(function: Any, seed: int | None) -> None:
    rng = generator(15)
    requests = [
        random_request(rng, num_tokens=num_tokens, num_new=num_new, kept_shares=shares)
        for num_tokens, num_new, shares in ((1100, 1, [1.0, 1.0]), (40, 1 if function is decode else 9, [0.5, 1.0]))
    ]
    cells = in_cells(requests, seed=seed)
    expected = function(cells)
    cells.queries = torch.cat([cells.queries, cells.queries], dim=1)[:, :4]
    assert not cells.queries.is_contiguous()
    fused = torch.full((len(expected), 16, 9), float("nan"))
    out = fused.transpose(1, 2)[:, 2:6]
    assert function(cells, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)
    assert fused.transpose(1, 2)[:, :2].isnan().all() and fused.transpose(1, 2)[:, 6:].isnan().all()


def test_cells_of_another_dtype_are_converted() -> None:
    request = random_request(generator(16), num_tokens=60, num_new=5, kept_shares=[0.5, 1.0])
    whole = random_request(generator(17), num_tokens=60, num_new=5, kept_shares=[1.0, 1.0])
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for stored in (request, whole):
            stored.keys, stored.values = (part.to(dtype).float() for part in (stored.keys, stored.values))
        cells = in_cells([request, whole], seed=None)
        cells.k_cells, cells.v_cells = cells.k_cells.to(dtype), cells.v_cells.to(dtype)
        assert_within_twice_torch(extend(cells), [request, whole], SCALING)


def test_nothing_to_do() -> None:
    cells = torch.zeros(4, 8)
    nothing = torch.zeros(1, dtype=torch.int32)
    queries = torch.zeros(0, 4, 8)
    assert decode_attention(queries, cells, cells, nothing, nothing[:0], 1.0).shape == (0, 4, 8)
    assert extend_attention(queries, cells, cells, nothing, nothing[:0], [], 1.0).shape == (0, 4, 8)
    indptr = torch.tensor([0, 1, 2], dtype=torch.int32)
    assert extend_attention(queries, cells, cells, indptr, indptr[:2], [0], 1.0).shape == (0, 4, 8)


def test_new_lens_may_be_a_tensor_and_indices_of_64_bits() -> None:
    request = random_request(generator(18), num_tokens=30, num_new=4, kept_shares=[0.5, 0.5])
    cells = in_cells([request], seed=0)
    expected = extend(cells)
    cells.kv_indptr, cells.kv_indices = cells.kv_indptr.long(), cells.kv_indices.long()
    assert torch.equal(extend_attention(*cells.for_decode, torch.tensor([4]), SCALING), expected)


def arguments(**changes: Any) -> dict[str, Any]:
    usual = {
        "queries": torch.zeros(2, 4, 8),
        "k_cells": torch.zeros(9, 8),
        "v_cells": torch.zeros(9, 8),
        "kv_indptr": torch.tensor([0, 1, 3, 4, 5], dtype=torch.int32),
        "kv_indices": torch.arange(5, dtype=torch.int32),
        "scaling": 1.0,
    }
    return {**usual, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": torch.zeros(2, 32)}, r"queries has shape \[2, 32\]: expected 3 dimensions"),
        (
            {"queries": torch.zeros(2, 4, 8).to(torch.float8_e5m2)},
            "queries is torch.float8_e5m2: expected torch.bfloat16",
        ),
        ({"queries": torch.zeros(2, 4, 6)}, r"queries of shape \[2, 4, 6\] do not fit k_cells of shape \[9, 8\]"),
        ({"queries": torch.zeros(3, 4, 8)}, "kv_indptr is of 4 lists, for 3 requests of 4 heads"),
        ({"queries": torch.zeros(2, 3, 8)}, "kv_indptr is of 4 lists, for 2 requests of 3 heads"),
        ({"k_cells": torch.zeros(9, 8, dtype=torch.int32)}, "k_cells is torch.int32: expected floats"),
        ({"v_cells": torch.zeros(9, 1, 8)}, r"v_cells has shape \[9, 1, 8\]: expected 2 dimensions"),
        ({"v_cells": torch.zeros(9, 8, device="meta")}, "v_cells lies on meta: this backend is for the CPU"),
        ({"kv_indptr": torch.zeros(0, dtype=torch.int32)}, "kv_indptr is empty: expected a leading 0"),
        ({"kv_indptr": torch.zeros(1, dtype=torch.int32)}, "kv_indptr is of 0 lists, for 2 requests"),
        ({"kv_indptr": torch.zeros(5)}, "kv_indptr is torch.float32: expected torch.int32, torch.int64"),
        ({"kv_indptr": torch.tensor([1, 1, 3, 4, 5])}, "kv_indptr runs from 1 to 5 over 5 kv_indices"),
        ({"kv_indptr": torch.tensor([0, 3, 2, 4, 5])}, "kv_indptr runs from 0 to 5 .* never to fall"),
        ({"kv_indptr": torch.tensor([0, 1, 3, 4, 6])}, "kv_indptr runs from 0 to 6 over 5 kv_indices"),
        ({"out": torch.zeros(2, 4, 7)}, r"out is torch.float32\[2, 4, 7\]: expected torch.float32\[2, 4, 8\]"),
        ({"out": torch.zeros(2, 4, 8).half()}, r"out is torch.float16\[2, 4, 8\]: expected torch.float32"),
        ({"new_lens": [1, 2]}, r"new_lens is \[1, 2\]: expected counts that add up to the 2 queries"),
        ({"new_lens": [3, -1]}, r"new_lens is \[3, -1\]"),
        ({"new_lens": [2, 0]}, "request 0 has 2 new tokens and a list of 1 cells"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    fields = arguments(**changes)
    if "new_lens" not in fields:
        with pytest.raises(ConfigError, match=message):
            decode_attention(**fields)
    with pytest.raises(ConfigError, match=message):
        extend_attention(**{"new_lens": [1] * len(fields["queries"]), **fields})


@pytest.mark.parametrize("cell", [-1, 3000])
@pytest.mark.parametrize("kept_share", [0.5, 1.0])
def test_a_cell_outside_the_buffers_is_an_error(cell: int, kept_share: float) -> None:
    request = random_request(generator(19), num_tokens=1100, num_new=1, kept_shares=[kept_share, kept_share])
    cells = in_cells([request], seed=None)
    cells.kv_indices += cell - cells.kv_indices[0 if cell < 0 else -1]
    cells.k_cells, cells.v_cells = cells.k_cells[:3000], cells.v_cells[:3000]
    with pytest.raises(IndexError):
        decode(cells)
