"""Which cells each KV head of a request attends to, as paged attention wants to read it.

The convention is FlashInfer's (read in version 0.7.2: plan() of its wrappers, page.cuh). Heads that keep different
tokens cannot share a page, so a page is one cell, and each KV head of a request is a request of its own with one KV
head: entry b x num_kv_heads + h of a batch is head h of its b-th request, for which

    kv_indices[kv_indptr[e] : kv_indptr[e + 1]]

are the cells, oldest token first. The newest tokens of a request have cells in all heads, so that FlashInfer's causal
mask, which lines up the last query with the last key, is right whatever was evicted before them.

A head may have no cells at all, although none that attends has, because it attends to its own token. FlashInfer's
kernels take two equal kv_indptr for no keys (PagedKV::get_length) and answer with zeros, but its get_seq_lens, from
which the host plans, counts kv_last_page_len even then. So kv_last_page_len is 1 for entries with pages and 0 for
others: both then agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_kvtc.errors import CellPoolError, ConfigError
from sglang_kvtc.eviction.cells import CellPool

LEAST_ROOM = 128
"""Tokens that can be appended before a list is moved, at least: as many as are decoded between two evictions."""
_ROOM_PARTS = 4
"""Room is also a quarter of the mean list: what is moved then stays in proportion to what is appended."""
_LEAST_ARENA = 1 << 12


@dataclass(frozen=True, slots=True)
class PageTable:
    """The lists of a batch in one layer.

    kv_indptr: i32[batch x num_kv_heads + 1]; kv_indices: i32[kv_indptr[-1]], cells; kv_last_page_len: i32[batch x
    num_kv_heads]: all three as described above, new tensors on the pool's device.
    kv_indptr_host: kv_indptr on the host, for planning.
    positions: i32[kv_indptr[-1]], the position in its request of each token of kv_indices; None where the tables do not
        keep positions.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    kv_indptr_host: torch.Tensor
    positions: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Extents:
    """Where the lists of a batch in one layer lie in `PageTables.arena`, for kernels that read them in place.

    starts: i64[batch x num_kv_heads]; lengths: i32[batch x num_kv_heads]; both on the pool's device.
    """

    starts: torch.Tensor
    lengths: torch.Tensor


class PageTables:
    """Lists of cells of many requests, kept from step to step.

    arena: i32[size] on the pool's device: every (request, layer, KV head) has a piece of it with its list and room to
    append. Lengths are kept on the host, since every appended token adds one cell to each list; only `set`, at the
    start of a request and after an eviction, reads them from the device.

    Requests are rows 0 to max_requests - 1, the engine's own numbers. Per pair: append and batch are O(1) amortised, in
    a number of torch operations that does not depend on the batch. Memory: 4 bytes (8 with positions) per pair of room;
    the arena is at most twice what is in use when it is made, and for a moment the old one is there too.

    The lists name cells, so they hold until pairs of the request are evicted or freed in the pool: call `set` or
    `remove` before the next batch.
    """

    def __init__(self, pool: CellPool, max_requests: int, *, keep_positions: bool = False) -> None:
        """No request is known at first. Raises ConfigError if there can be none."""
        if max_requests < 1:
            raise ConfigError(f"page tables for {max_requests} requests: expected at least 1")
        shape = (max_requests, pool.num_layers, pool.num_kv_heads)
        self._pool = pool
        self._starts = torch.zeros(shape, dtype=torch.int64)
        self._lengths = torch.zeros(shape, dtype=torch.int64)
        # Tokens that fit behind the lists of each row, and tokens it has, evicted ones included; -1: no such request.
        self._room = torch.zeros(max_requests, dtype=torch.int64)
        self._tokens = torch.full((max_requests,), -1, dtype=torch.int64)
        # One row for cells and, if wanted, one for positions.
        self._store = torch.zeros((1 + keep_positions, _LEAST_ARENA), dtype=torch.int32, device=pool.device)
        self._end = 0

    @property
    def arena(self) -> torch.Tensor:
        """See the class. Another tensor after any append or set that found it full."""
        return self._store[0]

    def set(self, request: int, slots: torch.Tensor, visible: torch.Tensor | None = None) -> None:
        """Build the lists of a request from the pool's table, whether or not it had any.

        slots: i64[num_tokens], all of the request's in order of positions, on the pool's device. visible:
        bool[num_layers, num_tokens, num_kv_heads], pairs to list, for requests that skip pairs which exist, such as
        those of a prefix that others use; None for all. Raises CellPoolError for a number that is no row, ConfigError
        for a mask of another shape.
        """
        row = self._rows([request], known=False)
        listed = self._pool.alive(slots)
        if visible is not None:
            if visible.shape != listed.shape or visible.dtype != torch.bool:
                raise ConfigError(
                    f"visible is {visible.dtype}{list(visible.shape)}: expected bool{list(listed.shape)} of the slots"
                )
            listed = listed & visible
        counts = listed.sum(dim=1).cpu()
        # Its old lists, if any, are not moved any more.
        self._tokens[row] = -1
        self._place(row, counts[None], self._spare(counts[None]))
        self._tokens[row] = len(slots)
        by_head = listed.transpose(1, 2)
        places = self._spread(self._starts[row].flatten(), counts.flatten())
        self._store[0, places] = self._pool.table[:, slots].transpose(1, 2)[by_head]
        if len(self._store) > 1:
            positions = torch.arange(len(slots), dtype=torch.int32, device=self._pool.device)
            self._store[1, places] = positions.expand_as(by_head)[by_head]

    def append(
        self, requests: Sequence[int] | torch.Tensor, slots: torch.Tensor, counts: Sequence[int] | None = None
    ) -> None:
        """Append new tokens to all lists of their requests.

        requests: known and distinct, a sequence or an i64 tensor (on a device it is waited for). slots: i64[num_tokens]
        on the pool's device, allocated and with no pair evicted: first those of the first request, in order of
        positions. counts: tokens of each request; None for one each.

        Raises CellPoolError for unknown or repeated requests and (if the pool validates) for slots without all their
        cells, ConfigError for counts that do not add up; nothing is changed then.
        """
        rows = self._rows(requests, known=True)
        new = torch.ones_like(rows) if counts is None else torch.tensor(counts, dtype=torch.int64)
        if new.shape != rows.shape or bool((new < 0).any()) or int(new.sum()) != len(slots):
            raise ConfigError(
                f"{len(slots)} slots appended to {len(rows)} requests with counts {new.tolist()}: expected a count for "
                "every request and a slot for every token"
            )
        if len(rows.unique()) != len(rows):
            raise CellPoolError(f"requests {rows.tolist()} are not distinct: append to each once, with a count")
        cells = self._pool.table[:, slots]
        if self._pool.validate and bool((cells < 0).any()):
            raise CellPoolError("slots without all their cells are appended: append before evicting, or use set")
        is_full = self._room[rows] < new
        if bool(is_full.any()):
            full = rows[is_full]
            self._place(full, self._lengths[full], new[is_full] + self._spare(self._lengths[full]), moved=True)
        owner = torch.arange(len(rows)).repeat_interleave(new)
        nth = torch.arange(len(slots)) - (new.cumsum(0) - new)[owner]
        ends = self._starts[rows] + self._lengths[rows]
        places = self._to_device(ends[owner] + nth.view(-1, 1, 1))
        self._store[0, places] = cells.transpose(0, 1)
        if len(self._store) > 1:
            positions = self._to_device((self._tokens[rows][owner] + nth).int())
            self._store[1, places] = positions.view(-1, 1, 1).expand(places.shape)
        self._lengths[rows] += new.view(-1, 1, 1)
        self._room[rows] -= new
        self._tokens[rows] += new

    def remove(self, requests: Sequence[int] | torch.Tensor) -> None:
        """Forget requests. Raises CellPoolError for unknown ones."""
        rows = self._rows(requests, known=True)
        self._tokens[rows] = -1

    def discard(self, request: int) -> None:
        """Forget a request, if it is known. Raises CellPoolError for a number that is no row."""
        self._tokens[self._rows([request], known=False)] = -1

    def clear(self) -> None:
        """Forget all requests."""
        self._tokens.fill_(-1)
        self._end = 0

    def is_known(self, requests: Sequence[int]) -> list[bool]:
        """Whether each request has lists. Raises CellPoolError for a number that is no row."""
        known: list[bool] = (self._tokens[self._rows(requests, known=False)] >= 0).tolist()
        return known

    def num_tokens(self, request: int) -> int:
        """Tokens of a request, evicted ones included: the position that its next token has."""
        return int(self._tokens[self._rows([request], known=True)])

    def lengths(self, requests: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Lengths of all lists of these requests: i64[batch, num_layers, num_kv_heads] on the host."""
        return self._lengths[self._rows(requests, known=True)]

    def batch(self, requests: Sequence[int] | torch.Tensor, layer: int) -> PageTable:
        """The page table of a batch in one layer, in the order of `requests`; see PageTable.

        requests: known ones, as in `append`, but they may repeat. Copies 4 bytes (8 with positions) per listed pair.
        """
        return self._tables(self._rows(requests, known=True), slice(layer, layer + 1))[0]

    def batches(self, requests: Sequence[int] | torch.Tensor) -> list[PageTable]:
        """The page tables of a batch in all layers, made together: for small batches much cheaper than one by one.

        The tensors are views of common ones. Otherwise as `batch`.
        """
        return self._tables(self._rows(requests, known=True), slice(None))

    def extents(self, requests: Sequence[int] | torch.Tensor, layer: int) -> Extents:
        """Where the lists of a batch lie; requests as in `batch`. They hold until the next `append` or `set`."""
        rows = self._rows(requests, known=True)
        starts, lengths = self._starts[rows, layer].flatten(), self._lengths[rows, layer].flatten()
        return Extents(self._to_device(starts), self._to_device(lengths.int()))

    def _tables(self, rows: torch.Tensor, layers: slice) -> list[PageTable]:
        starts, lengths = (of[rows, layers].transpose(0, 1).flatten(1) for of in (self._starts, self._lengths))
        indptr = torch.zeros((len(lengths), lengths.shape[1] + 1), dtype=torch.int32)
        torch.cumsum(lengths, 1, out=indptr[:, 1:])
        places = self._spread(starts.flatten(), lengths.flatten())
        # Along one dimension: several times faster than by an index of all.
        sizes = indptr[:, -1].tolist()
        cells, *positions = (entries.index_select(0, places).split(sizes) for entries in self._store)
        return [
            PageTable(kv_indptr, of_layer, last, host, at[0] if at else None)
            for kv_indptr, of_layer, last, host, *at in zip(
                self._to_device(indptr),
                cells,
                self._to_device(lengths.clamp(max=1).int()),
                indptr,
                *positions,
                strict=True,
            )
        ]

    def _spare(self, lengths: torch.Tensor) -> torch.Tensor:
        """Room i64[k] for rows with lists of these lengths i64[k, num_layers, num_kv_heads]."""
        mean = lengths.flatten(1).sum(dim=1) // self._pool.cells_per_token
        return (mean // _ROOM_PARTS).clamp(min=LEAST_ROOM)

    def _place(self, rows: torch.Tensor, lengths: torch.Tensor, room: torch.Tensor, *, moved: bool = False) -> None:
        """Give rows i64[k] new pieces for lists of `lengths` i64[k, num_layers, num_kv_heads] with `room` i64[k] each.

        moved: their lists move there; without, what is in the pieces is to be written by the caller.
        """
        needed = int((lengths + room.view(-1, 1, 1)).sum())
        if self._end + needed > self._store.shape[1]:
            self._compact(needed)
        starts = self._laid_out(lengths, room)
        if moved:
            old = self._spread(self._starts[rows].flatten(), lengths.flatten())
            self._store[:, self._spread(starts.flatten(), lengths.flatten())] = self._store[:, old]
        self._starts[rows], self._lengths[rows], self._room[rows] = starts, lengths, room

    def _compact(self, needed: int) -> None:
        """Make a new arena of all lists in use, as large again as they and `needed` entries."""
        rows = (self._tokens >= 0).nonzero().view(-1)
        lengths, room = self._lengths[rows], self._room[rows]
        size = needed + int((lengths + room.view(-1, 1, 1)).sum())
        old_store, old = self._store, self._spread(self._starts[rows].flatten(), lengths.flatten())
        self._store = old_store.new_zeros((len(old_store), max(_LEAST_ARENA, 2 * size)))
        self._end = 0
        self._starts[rows] = starts = self._laid_out(lengths, room)
        self._store[:, self._spread(starts.flatten(), lengths.flatten())] = old_store[:, old]

    def _laid_out(self, lengths: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """Starts, of the shape of `lengths`, of pieces one after the other from the end of what is taken on."""
        ends = (lengths + room.view(-1, 1, 1)).flatten().cumsum(0) + self._end
        starts = ends - (lengths + room.view(-1, 1, 1)).flatten()
        self._end = int(ends[-1]) if len(ends) else self._end
        return starts.view(lengths.shape)

    def _spread(self, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Places in the arena, on the device, of lists that start at `starts` i64[k] and have `lengths` i64[k]."""
        total = int(lengths.sum())
        # 32 bits wherever they suffice: making the places costs more than using them.
        dtype = torch.int32 if self._store.shape[1] < 1 << 31 else torch.int64
        shifts = self._to_device(torch.stack([starts - lengths.cumsum(0) + lengths, lengths]).to(dtype))
        places = torch.arange(total, dtype=dtype, device=self._pool.device)
        # The size is said, or the device would be asked for it.
        places += shifts[0].repeat_interleave(shifts[1], output_size=total)
        return places

    def _rows(self, requests: Sequence[int] | torch.Tensor, *, known: bool) -> torch.Tensor:
        """Checked requests as i64[k] on the host."""
        rows = torch.as_tensor(requests, dtype=torch.int64, device="cpu")
        is_wrong = (rows < 0) | (rows >= len(self._tokens))
        if bool(is_wrong.any()):
            raise CellPoolError(f"request {int(rows[is_wrong][0])} is not one of 0 to {len(self._tokens) - 1}")
        if known and bool((unknown := self._tokens[rows] < 0).any()):
            raise CellPoolError(f"request {int(rows[unknown][0])} has no page table: set it first")
        return rows

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._pool.device, non_blocking=True)
