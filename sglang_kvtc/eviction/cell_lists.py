"""Lists of cells, one per request and KV head, and the ways to read them on the CPU: in place, or copied into a block.

Cells and lists are laid out as in attention.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from sglang_kvtc.errors import ConfigError

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

BLOCK_BYTES = 2 << 20
"""K and V of lists that are copied at once, where one list per thread does not need more: as much as an L2 cache."""
FILL_SHARE = 4
FILL_TOKENS = 64
"""A list joins a block if it is filled up with at most a quarter of its own length and these tokens: more would cost
more than another block."""
IN_PLACE_CELLS = 2048
"""Cells of one request, in order, for which a call of its own is cheaper than copying them."""
PROBE_TOKENS = 64
"""First tokens of lists, by which nearly all lists with holes are told apart from those without."""


class Scratch:
    """Memory that lists are copied into, kept from call to call: fresh memory costs more than the copy itself.

    It grows to what the largest call needs: BLOCK_BYTES or one list per thread while decoding, K and V of one request
    where that extends. Not for two threads at once.
    """

    def __init__(self) -> None:
        """Nothing is allocated before it is needed."""
        self._bytes = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]

    def rows(self, place: int, cells: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Room for `num_rows` cells, with the head size and dtype of `cells`; `place` is 0 or 1. It is not cleared."""
        num_bytes = num_rows * cells.shape[1] * cells.element_size()
        if len(self._bytes[place]) < num_bytes:
            self._bytes[place] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[place][:num_bytes].view(cells.dtype).view(num_rows, cells.shape[1])


class CellLists:
    """The lists of cells of a call, checked. `lengths` and `starts` (in `kv_indices`) are on the host."""

    def __init__(
        self,
        queries: torch.Tensor,
        k_cells: torch.Tensor,
        v_cells: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        batch: int,
        scratch: Scratch | None,
    ) -> None:
        _check(queries, k_cells, v_cells, kv_indptr, kv_indices)
        self.k_cells, self.v_cells = k_cells, v_cells
        self._dtype = queries.dtype
        self._scratch = scratch or Scratch()
        # Parts come with what joins them for one head size only, and rounded: in 16 bits twice is once too often.
        self._can_join = queries.element_size() >= 4 and k_cells.shape[1] == v_cells.shape[1]
        self._indices = kv_indices.contiguous()
        self._cut: set[int] = set()
        bounds: list[int] = kv_indptr.tolist()
        num_heads, num_lists = queries.shape[1], len(bounds) - 1
        self.num_kv_heads = num_lists // batch if batch else 1
        if num_lists != self.num_kv_heads * batch or (batch and (num_lists == 0 or num_heads % self.num_kv_heads)):
            raise ConfigError(
                f"kv_indptr is of {num_lists} lists, for {batch} requests of {num_heads} heads: expected one list per "
                "request and KV head, and a number of heads that is a multiple of that of KV heads"
            )
        self.starts = bounds[:-1]
        self.lengths = [stop - start for start, stop in zip(self.starts, bounds[1:], strict=True)]
        if bounds[0] != 0 or min(self.lengths, default=0) < 0 or bounds[-1] > len(kv_indices):
            raise ConfigError(
                f"kv_indptr runs from {bounds[0]} to {bounds[-1]} over {len(kv_indices)} kv_indices: expected it to "
                "begin with 0, never to fall and to end within kv_indices"
            )

    def of(self, request: int) -> range:
        """Numbers of the lists of a request, one per KV head."""
        return range(request * self.num_kv_heads, (request + 1) * self.num_kv_heads)

    def check_ends(self, new_lens: Sequence[int]) -> None:
        """Raise ConfigError where a list is shorter than the number of new tokens of its request."""
        for request, num_new in enumerate(new_lens):
            shortest = min(self.lengths[number] for number in self.of(request))
            if shortest < num_new:
                raise ConfigError(
                    f"request {request} has {num_new} new tokens and a list of {shortest} cells: expected every list "
                    "to end with the cells of all new tokens"
                )

    def blocks(self, numbers: Iterable[int], num_new: int = 0) -> Iterator[list[int]]:
        """Put lists of about the same length together, in ascending order of their numbers.

        A block is no larger than BLOCK_BYTES unless it needs to be for each thread to have a list. For `num_new` new
        tokens there is no such limit: what is computed outweighs what is copied.
        """
        cell_bytes = sum(cells.shape[1] * cells.element_size() for cells in (self.k_cells, self.v_cells))
        threads = torch.get_num_threads()
        block: list[int] = []
        longest = 0
        for number in sorted(numbers, key=lambda number: -self.lengths[number]):
            length = self.lengths[number]
            fits = num_new or len(block) < threads or (len(block) + 1) * longest * cell_bytes <= BLOCK_BYTES
            alike = length and longest - length <= length // FILL_SHARE + FILL_TOKENS
            if not fits or (block and length != longest and not alike):
                yield sorted(block)
                block = []
            if not block:
                longest = length
            block.append(number)
        if block:
            yield sorted(block)

    def copy(self, block: Sequence[int], num_new: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Copy the cells of some lists that are not empty, the shorter ones filled up before their last `num_new`.

        Returns keys and values, dtype[len(block), 1, longest, head size], which the next call overwrites, and which of
        those before the last `num_new` exist: bool[len(block), longest - num_new], None where all do.
        """
        starts = torch.tensor([self.starts[number] for number in block], dtype=torch.int32)[:, None]
        of_earlier = [self.lengths[number] - num_new for number in block]
        num_earlier = max(of_earlier)
        counts = torch.tensor(of_earlier, dtype=torch.int32)[:, None]
        columns = torch.arange(num_earlier + num_new, dtype=torch.int32)
        exists = None
        if min(of_earlier) < num_earlier:
            earlier, new = columns[:num_earlier], columns[:num_new]
            exists = earlier < counts
            # Filled up with the list's own cells, whose numbers are finite: 0 times what lies elsewhere could be NaN.
            offsets = torch.cat([earlier.minimum((counts - 1).clamp_(min=0)), counts + new], dim=1)
        else:
            offsets = columns.expand(len(block), -1)
        cells = self._indices.index_select(0, (starts + offsets).flatten())
        keys, values = (
            torch.index_select(buffer, 0, cells, out=self._scratch.rows(place, buffer, len(cells)))
            .view(len(block), 1, len(columns), buffer.shape[1])
            .to(self._dtype)
            for place, buffer in enumerate((self.k_cells, self.v_cells))
        )
        return keys, values, exists

    def take_runs(self, request: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], bool]:
        """Cut off what can be read in place of the lists of a request, from their beginning, where that is worth it.

        Returns keys and values as in `leading_run` of each run, and whether nothing is left of the lists.
        """
        numbers = self.of(request)
        runs: list[tuple[torch.Tensor, torch.Tensor]] = []
        while (left := self.lengths[numbers.start]) * len(numbers) >= IN_PLACE_CELLS:
            run, length = self.leading_run(request)
            if run is None or length * len(numbers) < IN_PLACE_CELLS or not (self._can_join or length == left):
                break
            runs.append(run)
            for number in numbers:
                self.starts[number] += length
                self.lengths[number] -= length
                self._cut.add(number)
        return runs, bool(runs) and self.lengths[numbers.start] == 0

    def is_cut(self, number: int) -> bool:
        """Whether `take_runs` has taken the beginning of a list."""
        return number in self._cut

    def leading_run(self, request: int) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, int]:
        """Keys and values of the first tokens of a request as views: dtype[num_kv_heads, 1, length, head size].

        As many tokens as have cells at one distance in every head, if all lists have one length and the first cells of
        heads one distance too, as in a piece of a request without holes. Returns the views and the length, or None.
        """
        numbers = self.of(request)
        heads, length = len(numbers), self.lengths[numbers.start]
        if length == 0 or any(self.lengths[number] != length for number in numbers):
            return None, 0
        start = self.starts[numbers.start]
        distance = self.starts[numbers[1]] - start if heads > 1 else length
        rows = self._indices.as_strided((heads, length), (distance, 1), self._indices.storage_offset() + start)
        cells = rows.numpy()
        first = int(cells[0, 0])
        step = int(cells[0, 1]) - first if length > 1 else 1
        head_step = int(cells[1, 0]) - first if heads > 1 else 1
        of_heads = first + head_step * np.arange(heads)[:, None]
        # Views cannot run backwards.
        if step <= 0 or head_step <= 0 or (cells[:, :1] != of_heads).any():
            return None, 0
        for columns in (min(PROBE_TOKENS, length), length):
            is_even = (cells[:, :columns] == of_heads + step * np.arange(columns)).all(axis=0)
            if not is_even.all():
                length = int(is_even.argmin())
                break
        last = int(cells[-1, length - 1])
        if not 0 <= first <= last < min(len(self.k_cells), len(self.v_cells)):
            raise IndexError(f"kv_indices of request {request} run from {first} to {last}, outside the cells")
        keys, values = (
            buffer.as_strided(
                (heads, 1, length, buffer.shape[1]),
                (head_step * buffer.stride(0), 0, step * buffer.stride(0), buffer.stride(1)),
                buffer.storage_offset() + first * buffer.stride(0),
            ).to(self._dtype)
            for buffer in (self.k_cells, self.v_cells)
        )
        return (keys, values), length


def _check(
    queries: torch.Tensor,
    k_cells: torch.Tensor,
    v_cells: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
) -> None:
    tensors = {
        "queries": (queries, 3, DTYPES),
        "k_cells": (k_cells, 2, None),
        "v_cells": (v_cells, 2, None),
        "kv_indptr": (kv_indptr, 1, (torch.int32, torch.int64)),
        "kv_indices": (kv_indices, 1, (torch.int32, torch.int64)),
    }
    for name, (tensor, num_dimensions, dtypes) in tensors.items():
        if tensor.device.type != "cpu":
            raise ConfigError(f"{name} lies on {tensor.device}: this backend is for the CPU")
        if tensor.dim() != num_dimensions:
            raise ConfigError(f"{name} has shape {list(tensor.shape)}: expected {num_dimensions} dimensions")
        if tensor.dtype not in dtypes if dtypes else not tensor.is_floating_point():
            expected = ", ".join(map(str, dtypes)) if dtypes else "floats"
            raise ConfigError(f"{name} is {tensor.dtype}: expected {expected}")
    if queries.shape[2] != k_cells.shape[1]:
        raise ConfigError(
            f"queries of shape {list(queries.shape)} do not fit k_cells of shape {list(k_cells.shape)}: expected the "
            "same head size"
        )
    if len(kv_indptr) == 0:
        raise ConfigError("kv_indptr is empty: expected a leading 0")
