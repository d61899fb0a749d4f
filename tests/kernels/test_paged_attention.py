"""The Triton kernels against masked dense attention in fp64, on the GPU if there is one, else by the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from eviction.plain_attention import Cells, Request, assert_within_twice_torch, in_cells, random_request
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.eviction import attention as oracle
from sglang_kvtc.kernels.triton_ops import launch, paged_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALING = 0.3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def in_arena(cells: Cells, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The lists anywhere in an arena whose other entries name no cell at all: arena, starts, lengths."""
    lengths = cells.kv_indptr.diff()
    gaps = torch.randint(0, 4, (len(lengths),), generator=generator(seed))
    order = torch.randperm(len(lengths), generator=generator(seed))
    arena = torch.full((int(lengths.sum() + gaps.sum()) + 5,), 1 << 30, dtype=torch.int32)
    starts = torch.zeros(len(lengths), dtype=torch.int64)
    end = 2
    for number in order.tolist():
        starts[number] = end
        indices = cells.kv_indices[cells.kv_indptr[number] : cells.kv_indptr[number + 1]]
        arena[end : end + len(indices)] = indices
        end += len(indices) + int(gaps[number])
    return arena.to(DEVICE), starts.to(DEVICE), lengths.int().to(DEVICE)


def on_device(cells: Cells) -> tuple[torch.Tensor, ...]:
    return tuple(part.to(DEVICE) for part in (cells.queries, cells.k_cells, cells.v_cells))


def decode(cells: Cells, **options: Any) -> torch.Tensor:
    return paged_attention.decode_attention(*on_device(cells), *in_arena(cells), SCALING, **options).cpu()


def extend(cells: Cells, *, more: int = 0, **options: Any) -> torch.Tensor:
    q_indptr = torch.tensor([0, *cells.new_lens]).cumsum(0).int().to(DEVICE)
    max_new = max(cells.new_lens, default=0) + more
    arguments = (*on_device(cells), *in_arena(cells), q_indptr, max_new, SCALING)
    return paged_attention.extend_attention(*arguments, **options).cpu()


def with_lengths(rng: torch.Generator, lengths: Sequence[int], **shape: Any) -> Request:
    """A request that decodes, with these numbers of cells in its KV heads, anywhere among its tokens."""
    num_tokens = max(1, *lengths)
    request = random_request(rng, num_tokens=num_tokens, num_new=1, kept_shares=[0.0] * len(lengths), **shape)
    request.kept[:] = False
    for head, length in enumerate(lengths):
        request.kept[torch.randperm(num_tokens, generator=rng)[:length], head] = True
    return request


@st.composite
def batches(draw: st.DrawFn, *, is_decode: bool) -> tuple[list[Request], Cells]:
    """Requests of one shape, fresh and continued, with holes anywhere, in cells anywhere."""
    rng = generator(draw(st.integers(0, 2**31)))
    heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 9))
    head_dim, v_head_dim = draw(st.sampled_from([(16, 16), (8, 20), (80, 80), (24, 64), (128, 128)]))
    dtype = draw(st.sampled_from(DTYPES))
    requests = []
    for _ in range(draw(st.integers(1, 3))):
        num_tokens = draw(st.one_of(st.sampled_from([1, 63, 64, 65]), st.integers(1, 90)))
        num_new = 1 if is_decode else draw(st.sampled_from([0, 1, 5, 12, num_tokens]))
        requests.append(
            random_request(
                rng,
                num_tokens=num_tokens,
                num_new=min(num_new, num_tokens, 12),
                kept_shares=draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=heads, max_size=heads)),
                group=group,
                head_dim=head_dim,
                v_head_dim=v_head_dim,
                dtype=dtype,
                evict_new=is_decode and draw(st.booleans()),
            )
        )
    return requests, in_cells(requests, seed=draw(st.sampled_from([None, 1])))


@settings(max_examples=30)
@given(batches(is_decode=True), st.sampled_from([1, 2, 7]))
def test_decode_is_masked_dense_attention_with_original_positions(
    batch: tuple[list[Request], Cells], num_splits: int
) -> None:
    requests, cells = batch
    assert_within_twice_torch(decode(cells, num_splits=num_splits), requests, SCALING)


@settings(max_examples=30)
@given(batches(is_decode=False))
def test_extend_is_masked_dense_attention_with_original_positions(batch: tuple[list[Request], Cells]) -> None:
    requests, cells = batch
    assert_within_twice_torch(extend(cells), requests, SCALING)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 3, 64])
def test_lists_of_all_lengths_are_decoded_together(dtype: torch.dtype, num_splits: int) -> None:
    rng = generator(1)
    shape: dict[str, Any] = {"group": 3, "head_dim": 80, "dtype": dtype}
    requests = [with_lengths(rng, lengths, **shape) for lengths in ((0, 200), (64, 1), (65, 63), (0, 0))]
    assert_within_twice_torch(decode(in_cells(requests, seed=1), num_splits=num_splits), requests, SCALING)


@pytest.mark.parametrize("group", range(1, 10))
def test_any_number_of_heads_shares_a_kv_head(group: int) -> None:
    rng = generator(group)
    decoded = [with_lengths(rng, lengths, group=group) for lengths in ((70, 9), (1, 40))]
    assert_within_twice_torch(decode(in_cells(decoded, seed=2), num_splits=2), decoded, SCALING)
    extended = [
        random_request(rng, num_tokens=num_tokens, num_new=num_new, kept_shares=[0.5, 0.9], group=group)
        for num_tokens, num_new in ((75, 70), (20, 3))
    ]
    assert_within_twice_torch(extend(in_cells(extended, seed=3)), extended, SCALING)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fresh_and_continued_requests_are_extended_together(dtype: torch.dtype) -> None:
    rng = generator(2)
    requests = [
        random_request(rng, num_tokens=num_tokens, num_new=num_new, kept_shares=shares, dtype=dtype, group=2)
        for num_tokens, num_new, shares in (
            (66, 66, [1.0, 1.0]),
            (200, 33, [0.5, 0.1]),
            (90, 0, [1.0, 0.5]),
            (64, 1, [0.0, 1.0]),
            (130, 65, [0.0, 0.4]),
        )
    ]
    cells = in_cells(requests, seed=4)
    result = extend(cells)
    assert_within_twice_torch(result, requests, SCALING)
    # Blocks of queries beyond those there are write nothing.
    assert torch.equal(extend(cells, more=100), result)
    for request, part in zip(requests, result.split(cells.new_lens), strict=True):
        assert torch.equal(extend(in_cells([request], seed=5)), part)


def test_cells_outside_the_lists_have_no_influence() -> None:
    rng = generator(3)
    decoded = [with_lengths(rng, lengths) for lengths in ((0, 200), (64, 1), (65, 63))]
    extended = [random_request(rng, num_tokens=80, num_new=20, kept_shares=[0.5, 0.2])]
    for function, requests in ((decode, decoded), (extend, extended)):
        clean, dirty = (in_cells(requests, seed=6, unused=unused) for unused in (0.0, float("nan")))
        unlisted = torch.ones(len(dirty.k_cells), dtype=torch.bool)
        unlisted[dirty.kv_indices.long()] = False
        assert dirty.k_cells[unlisted].isnan().all() and dirty.v_cells[unlisted].isnan().all()
        assert torch.equal(function(dirty), function(clean))


def test_splits_without_cells_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    request = with_lengths(generator(4), (65, 0))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(float("nan")))
    result = decode(in_cells([request], seed=7), num_splits=40, out=torch.full((1, 4, 16), float("nan")).to(DEVICE))
    assert_within_twice_torch(result, [request], SCALING)
    assert (result[:, 2:] == 0).all()


@pytest.mark.parametrize("function", [decode, extend])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_cells_and_output_may_have_any_strides(function: Any, dtype: torch.dtype) -> None:
    rng = generator(5)
    requests = [
        random_request(rng, num_tokens=num_tokens, num_new=num_new, kept_shares=shares, dtype=dtype)
        for num_tokens, num_new, shares in ((70, 1, [1.0, 1.0]), (40, 1 if function is decode else 9, [0.5, 1.0]))
    ]
    cells = in_cells(requests, seed=8)
    expected = function(cells)
    cells.queries = torch.cat([cells.queries, cells.queries], dim=1)[:, :4]
    cells.k_cells = torch.stack([cells.k_cells, cells.k_cells], dim=1)[:, 1]
    cells.v_cells = cells.v_cells.T.contiguous().T
    assert not any(part.is_contiguous() for part in (cells.queries, cells.k_cells, cells.v_cells))
    fused = torch.full((len(expected), 16, 9), float("nan"), dtype=dtype, device=DEVICE)
    out = fused.transpose(1, 2)[:, 2:6]
    assert torch.equal(function(cells, out=out), expected)
    assert torch.equal(out.cpu(), expected)
    assert fused.transpose(1, 2)[:, :2].isnan().all() and fused.transpose(1, 2)[:, 6:].isnan().all()


def test_cells_of_another_dtype_are_converted() -> None:
    request = random_request(generator(6), num_tokens=60, num_new=5, kept_shares=[0.5, 1.0])
    for dtype in (torch.bfloat16, torch.float16):
        request.keys, request.values = (part.to(dtype).float() for part in (request.keys, request.values))
        cells = in_cells([request], seed=None)
        cells.k_cells, cells.v_cells = cells.k_cells.to(dtype), cells.v_cells.to(dtype)
        assert_within_twice_torch(extend(cells), [request], SCALING)


def test_arrays_of_flashinfer_are_lists_too() -> None:
    requests = [with_lengths(generator(7), lengths) for lengths in ((40, 9), (0, 70))]
    cells = in_cells(requests, seed=9)
    kv_indptr, kv_indices = cells.kv_indptr.to(DEVICE), cells.kv_indices.to(DEVICE)
    result = paged_attention.decode_attention(
        *on_device(cells), kv_indices, kv_indptr[:-1].long(), kv_indptr.diff(), SCALING
    )
    assert_within_twice_torch(result.cpu(), requests, SCALING)


def test_the_kernels_ran_and_not_their_oracle(
    record_launches: Callable[..., list[Any]], without_oracle: Callable[..., None]
) -> None:
    without_oracle(oracle, "scaled_dot_product_attention")
    launched = record_launches(paged_attention, "_decode", "_combine", "_extend")
    request = with_lengths(generator(8), (70, 9))
    cells = in_cells([request], seed=1)
    decode(cells, num_splits=1)
    decode(cells, num_splits=5)
    extend(cells)
    found = [(each.kernel, each.grid) for each in launched]
    assert found == [("_decode", (2, 1)), ("_decode", (2, 5)), ("_combine", (2, 2)), ("_extend", (2,))]
    assert launch.IS_INTERPRETED is (DEVICE == "cpu")


def test_nothing_to_do() -> None:
    cells, nothing = torch.zeros(4, 8, device=DEVICE), torch.zeros(0, dtype=torch.int32, device=DEVICE)
    queries, indptr = torch.zeros(0, 4, 8, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    empty = (queries, cells, cells, nothing, nothing.long(), nothing)
    assert paged_attention.decode_attention(*empty, 1.0).shape == (0, 4, 8)
    assert paged_attention.extend_attention(*empty, indptr, 0, 1.0).shape == (0, 4, 8)
    one = torch.ones(2, dtype=torch.int32, device=DEVICE)
    arguments = (queries, cells, cells, one, one.long(), one, torch.zeros_like(one), 0, 1.0)
    assert paged_attention.extend_attention(*arguments).shape == (0, 4, 8)


def arguments(**changes: Any) -> dict[str, Any]:
    usual = {
        "queries": torch.zeros(2, 4, 8),
        "k_cells": torch.zeros(9, 8),
        "v_cells": torch.zeros(9, 8),
        "arena": torch.arange(9, dtype=torch.int32),
        "starts": torch.arange(4),
        "lengths": torch.ones(4, dtype=torch.int32),
        "scaling": 1.0,
    }
    return {**usual, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": torch.zeros(2, 32)}, r"queries has shape \[2, 32\]: expected 3 dimensions"),
        ({"queries": torch.zeros(2, 4, 8).double()}, "queries is torch.float64: expected torch.bfloat16"),
        ({"queries": torch.zeros(2, 4, 6)}, r"queries of shape \[2, 4, 6\] do not fit k_cells of shape \[9, 8\]"),
        ({"queries": torch.zeros(3, 4, 8)}, "there are 4 starts and 4 lengths, for 3 requests of 4 heads"),
        ({"queries": torch.zeros(2, 3, 8)}, "there are 4 starts and 4 lengths, for 2 requests of 3 heads"),
        ({"k_cells": torch.zeros(9, 8, dtype=torch.int32)}, "k_cells is torch.int32: expected floats"),
        ({"v_cells": torch.zeros(9, 1, 8)}, r"v_cells has shape \[9, 1, 8\]: expected 2 dimensions"),
        ({"v_cells": torch.zeros(9, 8, device="meta")}, "v_cells lies on meta and queries on cpu: expected one device"),
        ({"v_cells": torch.zeros(9, 300)}, "heads of 8 and 300 dimensions: expected at most 256"),
        ({"arena": torch.arange(9)}, "arena is torch.int64: expected torch.int32"),
        ({"arena": torch.arange(18, dtype=torch.int32)[::2]}, "arena has stride 2: expected 1"),
        ({"starts": torch.arange(4, dtype=torch.int32)}, "starts is torch.int32: expected torch.int64"),
        ({"lengths": torch.ones(4)}, "lengths is torch.float32: expected torch.int32"),
        ({"lengths": torch.ones(3, dtype=torch.int32)}, "there are 4 starts and 3 lengths"),
        ({"out": torch.zeros(2, 4, 7)}, r"out is torch.float32\[2, 4, 7\] on cpu: expected torch.float32\[2, 4, 8\]"),
        ({"out": torch.zeros(2, 4, 8).half()}, r"out is torch.float16\[2, 4, 8\]"),
        ({"num_splits": 0}, "num_splits is 0: expected 1 to 64"),
        ({"num_splits": 65}, "num_splits is 65: expected 1 to 64"),
        ({"q_indptr": torch.tensor([0, 1, 2])}, r"q_indptr is torch.int64\[3\] on cpu: expected torch.int32"),
        ({"q_indptr": torch.tensor([0, 2], dtype=torch.int32), "starts": torch.arange(3)}, "there are 3 starts"),
        ({"max_new": 0}, "max_new is 0 for 2 new tokens"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    fields = arguments(**changes)
    if not {"q_indptr", "max_new"} & fields.keys():
        with pytest.raises(ConfigError, match=message):
            paged_attention.decode_attention(**fields)
    if "num_splits" not in fields:
        usual = {"q_indptr": torch.arange(len(fields["queries"]) + 1, dtype=torch.int32), "max_new": 1}
        with pytest.raises(ConfigError, match=message):
            paged_attention.extend_attention(**{**usual, **fields})
