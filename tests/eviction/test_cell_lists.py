"""Which cells are read in place, and how many are copied, seen through the functions that use the lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eviction.plain_attention import Cells, assert_within_twice_torch, in_cells, random_request

from sglang_kvtc.eviction import cell_lists
from sglang_kvtc.eviction.attention import decode_attention, extend_attention

SCALING = 0.3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def decode(cells: Cells) -> torch.Tensor:
    return decode_attention(*cells.for_decode, SCALING)


def extend(cells: Cells) -> torch.Tensor:
    return extend_attention(*cells.for_decode, cells.new_lens, SCALING)


def count_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Cells copied by each call of `copy`, with what fills them up."""
    copied: list[int] = []
    copy = cell_lists.CellLists.copy

    def counted(lists: Any, *arguments: Any) -> Any:
        result = copy(lists, *arguments)
        copied.append(result[0].shape[0] * result[0].shape[2])
        return result

    monkeypatch.setattr(cell_lists.CellLists, "copy", counted)
    return copied


@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_of_one_block_may_have_nothing_where_others_have_much(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_lists, "FILL_TOKENS", 2000)
    copied = count_copies(monkeypatch)
    rng = generator(20)
    for num_new in (5, 1):
        # torch goes through keys in steps of some hundreds: whole steps are masked.
        request = random_request(rng, num_tokens=1300 + num_new, num_new=num_new, kept_shares=[0.0, 1.0], dtype=dtype)
        assert_within_twice_torch(extend(in_cells([request], seed=1)), [request], SCALING)
    assert copied == [2 * 1305, 2 * 1301]


def test_requests_without_holes_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = count_copies(monkeypatch)
    rng = generator(12)
    whole = [random_request(rng, num_tokens=num_tokens, num_new=1, kept_shares=[1.0] * 3) for num_tokens in (800, 900)]
    assert_within_twice_torch(decode(in_cells(whole, seed=None)), whole, SCALING)
    chunk = [random_request(rng, num_tokens=50, num_new=20, kept_shares=[1.0] * 3)]
    assert_within_twice_torch(extend(in_cells(chunk, seed=None)), chunk, SCALING)
    assert copied == []
    # One hole, and two cells exchanged, which the corners of the lists do not tell.
    holed = [*whole, random_request(rng, num_tokens=750, num_new=1, kept_shares=[1.0] * 3)]
    holed[2].kept[7, 1] = False
    assert_within_twice_torch(decode(in_cells(holed, seed=None)), holed, SCALING)
    assert 2249 <= sum(copied) <= 2250
    copied.clear()
    cells = in_cells(whole, seed=None)
    cells.kv_indices[[100, 101]] = cells.kv_indices[[101, 100]]
    assert_within_twice_torch(decode(cells), whole, SCALING)
    assert sum(copied) == 3 * 800


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_without_holes_are_read_in_place_and_what_follows_is_copied(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = generator(21)
    requests = [
        random_request(
            rng,
            num_tokens=num_tokens,
            num_new=1,
            kept_shares=shares,
            group=3,
            head_dim=head_dim,
            v_head_dim=64,
            dtype=dtype,
        )
        for head_dim in (64, 32)
        for num_tokens, shares in ((1700, [1.0, 1.0]), (1000, [0.3, 0.7]), (1100, [1.0, 1.0]), (2048, [1.0, 1.0]))
    ]
    copied = count_copies(monkeypatch)
    for batch in (requests[:4], requests[4:]):
        cells = in_cells(batch, seed=3, chunk_tokens=1024)
        copied.clear()
        assert_within_twice_torch(decode(cells), batch, SCALING)
        if dtype == torch.float32 and batch[0].keys.shape == batch[0].values.shape:
            # Two chunks and 676 tokens, holes, one chunk and 76 tokens, two chunks, of 2 heads each.
            holes = int(batch[1].kept.sum())
            assert 2 * (676 + 76) + holes <= sum(copied) <= 2 * (676 + 76) + 1.25 * holes + 128
        else:
            # What was rounded to 16 bits is not joined, nor are parts of unequal head sizes.
            assert sum(copied) >= len(cells.kv_indices)


def test_little_is_copied_beyond_the_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = generator(13)
    requests = [
        random_request(rng, num_tokens=num_tokens, num_new=1, kept_shares=[0.02, 0.3, 0.6, 1.0])
        for num_tokens in (30, 500, 2000)
    ]
    cells = in_cells(requests, seed=1)
    for function in (decode, extend):
        copied = count_copies(monkeypatch)
        function(cells)
        assert len(cells.kv_indices) <= sum(copied) <= 1.25 * len(cells.kv_indices) + 64 * 12
        assert len(copied) <= 8


def test_large_lists_are_copied_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_lists, "BLOCK_BYTES", 100 * 2 * 16 * 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    copied = count_copies(monkeypatch)
    requests = [
        random_request(generator(14), num_tokens=num_tokens, num_new=1, kept_shares=[1.0] * 4)
        for num_tokens in (30, 120)
    ]
    assert_within_twice_torch(decode(in_cells(requests, seed=1)), requests, SCALING)
    assert sorted(copied) == [30, 90, 120, 120, 120, 120]
