"""The cells that hold KV pairs: who owns which, and which are free.

A cell is the place of one K and one V vector, those of one token in one layer and one KV head. All layers share one
buffer of cells, so that whatever is evicted anywhere makes room for anything. The pool keeps the books of such a
buffer; the buffers themselves belong to the engine. Tokens are named by the engine's slots, and

    table: i32[num_layers, num_slots, num_kv_heads]

says which cell holds a pair, or -1 where it does not exist. Slot 0 is the engine's padding slot: it has num_layers x
num_kv_heads cells of its own for ever (the first ones), so that what is read or written there meets no live pair.

Memory besides K and V: 4 bytes per entry of the table and 4 bytes per cell of the free list, against 2 x head_dim x
itemsize bytes per cell: with heads of 128 in bf16 0.8% each, the table's share times num_slots x num_layers x
num_kv_heads / num_cells, since slots may outnumber the tokens that fit. And 9 bytes per slot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from sglang_kvtc.errors import CellPoolError, ConfigError

SEARCH_CELLS = 1 << 16
"""Free cells among which a place for a prompt is looked for, at least."""
_SEARCH_FACTOR = 4
"""The same in multiples of the cells that the prompt takes: the cost stays in proportion to writing it."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """Cells that no table entry names any more, but that steps up to `step` may still read."""

    step: int
    cells: torch.Tensor
    to_front: bool


class CellPool:
    """Ownership of `num_cells` cells by the (layer, slot, KV head) entries of a table.

    Free cells are a ring with two ends, with no search structure beside it. Prompts take from its front, where runs
    are; tokens of a decode step take from its back, to which eviction returns its scattered cells. Costs, in torch
    operations whose number does not depend on sizes: with m = n x num_layers x num_kv_heads pairs of the n slots given,
    evict, free, and allocate of a decode step are O(m); allocate of a prompt is O(w log w) with w at most the larger of
    4 m and `search_cells`. Nothing costs O(num_cells) but check(), defragment(), and the return of the last used cell
    (which leaves one whole run again). Temporary memory: at most 32 bytes per pair given and, for a prompt, 96 bytes
    per cell searched. Eviction takes no cell, so it works in a full pool.

    Counters are kept on the host. Where a call cannot know how many cells it frees, it reads one number from the
    device, unless the caller says it. Work on the table goes to the current stream, which has to be the one that runs
    the model's steps. Not safe for use from several threads at once.

    Reuse. The engine may have launched steps whose kernels hold cells they have yet to read. `launch(step)` tells the
    pool of a step, `advance(step)` that it is done: cells freed in between are pending and given to nobody. Where
    neither is called, as on a CPU, freed cells are usable at once.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        num_slots: int,
        num_cells: int,
        device: torch.device | str = "cpu",
        *,
        validate: bool = True,
        search_cells: int = SEARCH_CELLS,
    ) -> None:
        """All cells but those of the padding slot are free.

        num_slots: the engine's slots, padding slot included. num_cells: with those of the padding slot. validate: look
        at the slots of every call (and at counts that are said), which on a GPU waits for it; without, a wrong call
        corrupts the books, which only check() finds. search_cells: see SEARCH_CELLS; num_cells or more makes the search
        for runs complete. Raises ConfigError for sizes that make no pool.
        """
        self.num_layers, self.num_kv_heads = num_layers, num_kv_heads
        self.num_slots, self.num_cells = num_slots, num_cells
        self.cells_per_token = num_layers * num_kv_heads
        if min(num_layers, num_kv_heads) < 1 or num_slots < 2 or search_cells < 1:
            raise ConfigError(
                f"a cell pool of {num_layers} layers, {num_kv_heads} KV heads, {num_slots} slots and search_cells "
                f"{search_cells}: expected at least 1, 1, 2 (one is for padding) and 1"
            )
        if not 2 * self.cells_per_token <= num_cells < 1 << 31:
            raise ConfigError(
                f"a cell pool of {num_cells} cells: expected at least {2 * self.cells_per_token}, two tokens of "
                f"{self.cells_per_token} of which one is for padding, and less than 2**31, since cells are int32"
            )
        self.device = torch.device(device)
        self.validate = validate
        self._search_cells = search_cells
        self.table = torch.empty((num_layers, num_slots, num_kv_heads), dtype=torch.int32, device=self.device)
        self._is_owned = torch.empty(num_slots, dtype=torch.bool, device=self.device)
        self._scratch = torch.empty(num_slots, dtype=torch.int64, device=self.device)
        self._ring = torch.empty(num_cells - self.cells_per_token, dtype=torch.int32, device=self.device)
        self._pending: deque[_Pending] = deque()
        self._launched = self._done = -1
        self._front = self._free = self._used = self._pending_cells = 0
        self._is_scattered = False
        self.reset()

    def reset(self) -> None:
        """Forget all slots. No step may be under way that reads cells."""
        self.table.fill_(-1)
        padding = torch.arange(self.cells_per_token, dtype=torch.int32, device=self.device)
        self.table[:, 0] = padding.view(self.num_layers, self.num_kv_heads)
        self._is_owned.zero_()
        self._pending.clear()
        self._pending_cells = 0
        self._done = self._launched
        self._used, self._free = 0, len(self._ring)
        self._reset_ring()

    @property
    def free_cells(self) -> int:
        """Cells that an allocation can have now."""
        return self._free

    @property
    def free_tokens(self) -> int:
        """Whole tokens that fit now: `free_cells` // (num_layers x num_kv_heads)."""
        return self._free // self.cells_per_token

    @property
    def book_bytes(self) -> int:
        """Memory of the table and of everything else the pool keeps beside K and V."""
        return sum(books.nbytes for books in (self.table, self._ring, self._is_owned, self._scratch))

    @property
    def used_cells(self) -> int:
        """Cells that hold pairs, those of the padding slot not counted."""
        return self._used

    @property
    def pending_cells(self) -> int:
        """Cells freed while a step was under way: neither used nor free before `advance`."""
        return self._pending_cells

    def allocate(self, slots: torch.Tensor, *, as_runs: bool = True) -> bool:
        """Give every (layer, KV head) of new tokens a cell.

        slots: i64[n], distinct and not allocated, on the pool's device. as_runs: the slots are consecutive tokens of
        one request. Then the cells of each (layer, KV head) are consecutive, in the order of the slots, in as many of
        them as there are free runs of n cells (a longer run serves several) among the cells searched; the others share
        what is left in ascending order, so that they are cut into as few pieces as the fragments allow. Without it
        cells are taken as they come, which is cheaper: for decode steps, where slots belong to different requests.

        Returns whether there were enough free cells: if not, nothing was changed. Raises CellPoolError for a slot that
        is allocated already, given twice or not the pool's.
        """
        self._check_slots(slots, owned=False)
        count = len(slots) * self.cells_per_token
        if count > self._free:
            return False
        if count == 0:
            return True
        if as_runs and len(slots) > 1:
            cells = self._take_runs(len(slots))
        else:
            self._free -= count
            cells = self._ring[self._places(self._front + self._free, count)]
            self._is_scattered = True
        by_head = cells.view(self.num_layers, self.num_kv_heads, len(slots))
        self.table[:, slots] = by_head.transpose(1, 2)
        self._is_owned[slots] = True
        self._used += count
        return True

    def evict(self, slots: torch.Tensor, keep: torch.Tensor, num_freed: int | None = None) -> int:
        """Free the cells of pairs that are not kept. The slots stay allocated, even those that keep no pair.

        slots: i64[n], distinct and allocated. keep: bool[num_layers, n, num_kv_heads], True = kept; pairs that do not
        exist are ignored: they neither come back nor count. num_freed: the number of existing pairs not kept, if the
        caller knows it; then nothing is read from the device.

        Returns the number of cells freed. Raises CellPoolError for slots that are not allocated or are given twice, and
        for a wrong `num_freed`; ConfigError for a mask of another shape or dtype.
        """
        shape = (self.num_layers, len(slots), self.num_kv_heads)
        if keep.shape != shape or keep.dtype != torch.bool:
            raise ConfigError(f"keep is {keep.dtype}{list(keep.shape)}: expected bool{list(shape)} for these slots")
        self._check_slots(slots, owned=True)
        return self._release(slots, keep, num_freed)

    def free(self, slots: torch.Tensor, num_freed: int | None = None) -> int:
        """Free all cells that the slots still have, and the slots.

        slots, num_freed, result and errors: as in `evict`. Freeing a slot twice is an error.
        """
        self._check_slots(slots, owned=True)
        freed = self._release(slots, None, num_freed)
        self._is_owned[slots] = False
        return freed

    def alive(self, slots: torch.Tensor) -> torch.Tensor:
        """Which pairs exist: bool[num_layers, n, num_kv_heads] for slots i64[n] (all do in padding slot 0)."""
        return self.table[:, slots] >= 0

    def run_starts(self, slots: torch.Tensor) -> torch.Tensor:
        """First cell of each (layer, KV head) whose cells of all these slots are consecutive, -1 for the others.

        slots: i64[n], n at least 1. Returns i32[num_layers, num_kv_heads]. A head with a run can be read as the slice
        [first, first + n) of the buffers, without an index.
        """
        cells = self.table[:, slots]
        first = cells[:, :1]
        expected = first + torch.arange(len(slots), dtype=torch.int32, device=self.device)[:, None]
        return torch.where((cells == expected).all(dim=1), first[:, 0], -1)

    def launch(self, step: int) -> None:
        """Say that the kernels of a step are on their way: what is freed from now on may still be read by them.

        step: larger than that of any call before; CellPoolError otherwise.
        """
        if step <= self._launched:
            raise CellPoolError(f"step {step} was launched after step {self._launched}: number steps in rising order")
        self._launched = step

    def advance(self, step: int) -> None:
        """Say that all steps up to this one are done: cells freed before any later launch become usable."""
        self._done = max(self._done, min(step, self._launched))
        while self._pending and self._pending[0].step <= self._done:
            pending = self._pending.popleft()
            self._pending_cells -= len(pending.cells)
            self._give_back(pending.cells, pending.to_front)
        if self._is_scattered and self._free == len(self._ring):
            self._reset_ring()

    def fence(self) -> None:
        """Say that no launched step is under way, as after a synchronisation of the device."""
        self.advance(self._launched)

    def defragment(self) -> None:
        """Order the free cells, so that prompts find all free runs. O(free_cells log free_cells): for idle moments."""
        free = self._ring[self._places(self._front, self._free)].sort().values
        self._front = 0
        self._ring[: self._free] = free

    def check(self) -> None:
        """Check all books against one another, at the cost of reading all of them.

        Raises CellPoolError when cells are owned twice or lost, a counter is wrong, or a free slot has cells.
        """
        live = self.table[:, 1:][self.table[:, 1:] >= 0]
        pending = [entry.cells for entry in self._pending]
        free = self._ring[self._places(self._front, self._free)]
        every = torch.cat([self.table[:, 0].flatten(), live, free, *pending]).sort().values
        faults = {
            "the padding slot lost its cells": not torch.equal(
                self.table[:, 0].flatten().long(), torch.arange(self.cells_per_token, device=self.device)
            ),
            "cells have two owners or none": not torch.equal(
                every.long(), torch.arange(self.num_cells, device=self.device)
            ),
            f"{len(live)} cells are in use but {self._used} are counted": len(live) != self._used,
            f"pending cells are not the {self._pending_cells} counted": sum(map(len, pending)) != self._pending_cells,
            "a slot that is not allocated has cells": bool((self.table[:, 1:] >= 0)[:, ~self._is_owned[1:]].any()),
        }
        if found := [fault for fault, is_found in faults.items() if is_found]:
            raise CellPoolError(f"the cell pool is corrupt ({'; '.join(found)}): this is a bug; restart the engine")

    def _check_slots(self, slots: torch.Tensor, *, owned: bool) -> None:
        if slots.ndim != 1 or slots.dtype != torch.int64:
            raise ConfigError(f"slots are {slots.dtype}{list(slots.shape)}: expected int64 of [num_tokens]")
        if not self.validate or len(slots) == 0:
            return
        is_foreign = (slots <= 0) | (slots >= self.num_slots)
        if bool(is_foreign.any()):
            raise CellPoolError(
                f"slot {int(slots[is_foreign][0])} is not one of 1 to {self.num_slots - 1}: it is another pool's, or "
                "the padding slot 0, which is always there"
            )
        # Of slots given twice only one writer wins, which the other one sees.
        order = torch.arange(len(slots), device=self.device)
        self._scratch[slots] = order
        is_repeated = self._scratch[slots] != order
        if bool(is_repeated.any()):
            raise CellPoolError(f"slot {int(slots[is_repeated][0])} is given twice in one call: give it once")
        is_wrong = self._is_owned[slots] != owned
        if bool(is_wrong.any()):
            slot = int(slots[is_wrong][0])
            if owned:
                raise CellPoolError(f"slot {slot} is not allocated (freed twice?): allocate it before using it")
            raise CellPoolError(f"slot {slot} is allocated already: free it before allocating it again")

    def _release(self, slots: torch.Tensor, keep: torch.Tensor | None, num_freed: int | None) -> int:
        """Take from the table, and retire, the cells of all pairs or of those that `keep` does not keep."""
        entries = self.table[:, slots]
        gone = entries >= 0
        if keep is not None:
            gone &= ~keep
        # By layer, head and token: as runs lie.
        by_head = gone.transpose(1, 2).reshape(-1)
        if num_freed is not None and self.validate and (found := int(by_head.sum())) != num_freed:
            raise CellPoolError(f"num_freed is {num_freed} but {found} cells would be freed: correct the count")
        candidates = entries.transpose(1, 2).reshape(-1)
        if num_freed is None:
            cells = candidates[by_head]
        else:
            cells = candidates[torch.nonzero_static(by_head, size=num_freed).view(-1)]
        if len(cells) == 0:
            return 0
        self.table[:, slots] = entries.masked_fill_(gone, -1)
        self._used -= len(cells)
        is_eviction = keep is not None
        self._is_scattered |= is_eviction
        if self._launched > self._done:
            self._pending.append(_Pending(self._launched, cells, to_front=not is_eviction))
            self._pending_cells += len(cells)
        else:
            self._give_back(cells, to_front=not is_eviction)
            if self._is_scattered and self._free == len(self._ring):
                self._reset_ring()
        return len(cells)

    def _give_back(self, cells: torch.Tensor, to_front: bool) -> None:
        if to_front:
            self._front = (self._front - len(cells)) % len(self._ring)
            self._ring[self._places(self._front, len(cells))] = cells
        else:
            self._ring[self._places(self._front + self._free, len(cells))] = cells
        self._free += len(cells)

    def _reset_ring(self) -> None:
        torch.arange(self.cells_per_token, self.num_cells, out=self._ring)
        self._front, self._is_scattered = 0, False

    def _places(self, first: int, count: int) -> slice | torch.Tensor:
        """Where `count` elements of the ring lie from its place `first` on."""
        first %= len(self._ring)
        if first + count <= len(self._ring):
            return slice(first, first + count)
        return torch.arange(first, first + count, device=self.device) % len(self._ring)

    def _take_runs(self, num_tokens: int) -> torch.Tensor:
        """Cells i32[num_layers x num_kv_heads x num_tokens] from the front of the ring, runs of `num_tokens` first.

        No size depends on what is found, so that nothing is read from the device.
        """
        count = num_tokens * self.cells_per_token
        cells = self._ring[self._places(self._front, count)]
        # Most often they are runs as they lie; looking costs a GPU more than sorting.
        if self.device.type != "cpu" or not _are_runs(cells.view(-1, num_tokens)):
            width = min(self._free, max(_SEARCH_FACTOR * count, self._search_cells))
            places = self._places(self._front, width)
            cells = _runs_first(self._ring[places], num_tokens)
            self._ring[places] = cells
            cells = cells[:count]
            self._is_scattered = True
        self._front = (self._front + count) % len(self._ring)
        self._free -= count
        return cells


def _are_runs(cells: torch.Tensor) -> bool:
    """Whether each row of cells i32[num_runs, num_tokens] is one run."""
    return bool((cells[:, 1:] - cells[:, :-1] == 1).all())


def _runs_first(cells: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The same cells in another order: first all that can be had as runs of `num_tokens`, one run after the other.

    Every maximal run is cut into such pieces from its start; what is left of them comes last. Both parts ascend.
    """
    ordered = cells.sort().values
    place = torch.arange(len(ordered), device=cells.device)
    starts_run = torch.ones(len(ordered), dtype=torch.bool, device=cells.device)
    starts_run[1:] = ordered[1:] - ordered[:-1] != 1
    start = torch.where(starts_run, place, 0).cummax(0).values
    first = place - (place - start) % num_tokens
    last = first + num_tokens - 1
    # Cells are distinct and ascend, so the ends of a piece tell whether all of it is there.
    spans = ordered[last.clamp(max=len(ordered) - 1)] - ordered[first]
    is_whole = (last < len(ordered)) & (spans == num_tokens - 1)
    whole_before = is_whole.cumsum(0)
    target = torch.where(is_whole, whole_before - 1, whole_before[-1] + place - whole_before)
    return torch.empty_like(ordered).scatter_(0, target, ordered)
