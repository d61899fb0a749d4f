"""What fitting one side needs of the calibration rows, gathered as they stream by.

Everything here can be taken out as tensors and put back, so that an interrupted run goes on where it was, and two of a
kind can be merged, so that several runs over different text make one artifact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from sglang_kvtc.codec.allocate import SAMPLE_TOKENS
from sglang_kvtc.errors import ConfigError

_BLOCK_ROWS = 2048
_PANEL_FEATURES = 1024


class Covariance:
    """Streaming mean and covariance of rows of p features; memory is one p x p matrix in fp64.

    Rows are shifted by the mean of the first block, so that a large common offset costs no precision.
    """

    def __init__(self, num_features: int, device: torch.device) -> None:
        self._block = torch.empty(_BLOCK_ROWS, num_features, device=device)
        self._fill = 0
        self._shift: torch.Tensor | None = None
        self._sum = torch.zeros(num_features, dtype=torch.float64, device=device)
        self._products = torch.zeros(num_features, num_features, dtype=torch.float64, device=device)
        self._flushed_rows = 0

    @staticmethod
    def planned_bytes(num_features: int) -> int:
        """Bytes of a covariance of so many features."""
        return num_features * (8 * num_features + 8 + 4 * _BLOCK_ROWS)

    @property
    def num_rows(self) -> int:
        """Rows added so far."""
        return self._flushed_rows + self._fill

    def add(self, rows: torch.Tensor) -> None:
        """Add `rows`: float[n, p], on any device."""
        for part in rows.split(_BLOCK_ROWS):
            head = part[: _BLOCK_ROWS - self._fill]
            self._block[self._fill : self._fill + len(head)] = head
            self._fill += len(head)
            if self._fill == _BLOCK_ROWS:
                self._flush()
                rest = part[len(head) :]
                self._block[: len(rest)] = rest
                self._fill = len(rest)

    def _flush(self) -> None:
        if self._fill == 0:
            return
        block = self._block[: self._fill]
        if self._shift is None:
            self._shift = block.mean(dim=0)
        block -= self._shift
        self._sum += block.sum(dim=0, dtype=torch.float64)
        # Only the panels on and right of the diagonal: the matrix is symmetric, which saves almost half the work.
        for panel in self._panels():
            self._products[panel, panel.start :] += block[:, panel].T @ block[:, panel.start :]
        self._flushed_rows += self._fill
        self._fill = 0

    def _panels(self) -> Iterator[slice]:
        num_features = len(self._sum)
        for start in range(0, num_features, _PANEL_FEATURES):
            yield slice(start, min(start + _PANEL_FEATURES, num_features))

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean: f64[p] and covariance: f32[p, p] (divided by n) of the rows.

        The sums stay as they are: rows may be added later. Raises ConfigError when there are no rows.
        """
        self._flush()
        if self._shift is None:
            raise ConfigError("no calibration tokens are left after the sink positions: ask for more --tokens")
        offset = self._sum / self._flushed_rows
        covariance = torch.empty(self._products.shape, device=self._products.device)
        for panel in self._panels():
            right = slice(panel.start, None)
            part = self._products[panel, right] / self._flushed_rows - torch.outer(offset[panel], offset[right])
            covariance[panel, right] = part
            covariance[panel.stop :, panel] = covariance[panel, panel.stop :].T
        return self._shift.double() + offset, covariance

    def merge(self, other: Covariance) -> None:
        """Add the rows of `other`, which must be on the same device; of it, only unfinished blocks are folded in."""
        self._flush()
        other._flush()
        if other._shift is None:
            return
        if self._shift is None:
            self._shift = other._shift.clone()
        # Around our shift, a row x of the other one is (x - its shift) + moved.
        moved = other._shift.double() - self._shift.double()
        rows, sums = other._flushed_rows, other._sum
        for panel in self._panels():
            right = slice(panel.start, None)
            products = self._products[panel, right]
            products += other._products[panel, right]
            products += torch.outer(sums[panel], moved[right])
            products += torch.outer(moved[panel], sums[right] + rows * moved[right])
        self._sum += sums + rows * moved
        self._flushed_rows += rows

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that `restore` needs, the unfinished block included: going on gives the same bits as never stopping."""
        found = {
            "block": self._block[: self._fill],
            "sum": self._sum,
            "products": self._products,
            "flushed_rows": torch.tensor([self._flushed_rows]),
        }
        return found if self._shift is None else found | {"shift": self._shift}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Become what `tensors` was taken from. Raises KeyError or RuntimeError for tensors of something else."""
        self._fill = len(tensors["block"])
        self._block[: self._fill] = tensors["block"]
        self._sum.copy_(tensors["sum"])
        self._products.copy_(tensors["products"])
        self._flushed_rows = int(tensors["flushed_rows"])
        self._shift = tensors["shift"].to(self._sum.device) if "shift" in tensors else None


class Reservoir:
    """A uniform sample of at most `capacity` of all rows added, reproducible from `seed` (algorithm R, in blocks)."""

    def __init__(self, capacity: int, num_features: int, dtype: torch.dtype, seed: int) -> None:
        self._rows = torch.empty(capacity, num_features, dtype=dtype)
        self._generator = torch.Generator().manual_seed(seed)
        self._seen = 0

    @staticmethod
    def planned_bytes(capacity: int, num_features: int, dtype: torch.dtype) -> int:
        """Bytes of a reservoir of this size."""
        return capacity * num_features * dtype.itemsize

    def add(self, rows: torch.Tensor) -> None:
        """Add `rows`: float[n, p], on any device."""
        room = min(max(len(self._rows) - self._seen, 0), len(rows))
        self._rows[self._seen : self._seen + room] = rows[:room].to(self._rows)
        self._seen += room
        late = rows[room:]
        if len(late) == 0:
            return
        # Row number i (from 0) of all takes a uniform slot of i + 1 and is kept when that slot exists.
        numbers = torch.arange(self._seen, self._seen + len(late), dtype=torch.float64)
        slots = (torch.rand(len(late), generator=self._generator, dtype=torch.float64) * (numbers + 1)).long()
        for index in torch.nonzero(slots < len(self._rows)).flatten().tolist():
            self._rows[slots[index]] = late[index].to(self._rows)
        self._seen += len(late)

    @property
    def num_rows(self) -> int:
        """Rows added so far."""
        return self._seen

    @property
    def rows(self) -> torch.Tensor:
        """dtype[min(capacity, rows added), p], on the CPU."""
        return self._rows[: self._seen]

    def merge(self, other: Reservoir) -> None:
        """Become a uniform sample of the rows that were added here or to `other`.

        Where one of the two had to leave rows out, the capacity shrinks to the rows it kept: a larger sample could need
        more of them.
        """
        ours, theirs, seen = self.rows, other.rows, self._seen + other._seen
        size = min(len(self._rows), seen)
        for part in (self, other):
            if len(part.rows) < part._seen:
                size = min(size, len(part.rows))
        if size == seen:
            self._rows[len(ours) : size] = theirs
        else:
            num_ours = self._rows_from_here(size, seen)
            kept = torch.randperm(len(ours), generator=self._generator)[:num_ours]
            added = torch.randperm(len(theirs), generator=self._generator)[: size - num_ours]
            # In place and row by row: the rows may take gigabytes. Theirs replace ours that are not kept.
            dropped = torch.ones(max(size, len(ours)), dtype=torch.bool)
            dropped[kept] = False
            outside = kept[kept >= size]
            slots = torch.nonzero(dropped[:size]).flatten()
            rows = itertools.chain((ours[index] for index in outside), (theirs[index] for index in added))
            for slot, row in zip(slots.tolist(), rows, strict=True):
                self._rows[slot] = row
            self._rows = self._rows[:size]
        self._seen = seen

    def _rows_from_here(self, size: int, seen: int) -> int:
        """How many of `size` rows, drawn without replacement from all `seen`, were added to this reservoir."""
        here, left, count = self._seen, seen, 0
        for draw in torch.rand(size, generator=self._generator, dtype=torch.float64).tolist():
            if draw * left < here:
                here -= 1
                count += 1
            left -= 1
        return count

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that `restore` needs: going on draws the same rows as never stopping."""
        return {"rows": self.rows, "seen": torch.tensor([self._seen]), "generator": self._generator.get_state()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Become what `tensors` was taken from. Raises KeyError or RuntimeError for tensors of something else."""
        self._seen = int(tensors["seen"])
        self._rows[: self._seen] = tensors["rows"]
        self._generator.set_state(tensors["generator"])


@dataclass(frozen=True, slots=True)
class SideStatistics:
    """What fitting one side needs.

    moments: the covariance for an exact PCA, or a sample of bf16 rows for a randomized one. allocation: f32 rows of
    other sequences.
    """

    moments: Covariance | Reservoir
    allocation: Reservoir

    @classmethod
    def empty(cls, num_features: int, pca_rows: int | None, seed: int, device: torch.device) -> SideStatistics:
        """pca_rows: rows to sample for a randomized PCA, or None for the covariance of all rows, kept on `device`."""
        return cls(
            moments=Covariance(num_features, device)
            if pca_rows is None
            else Reservoir(pca_rows, num_features, torch.bfloat16, seed),
            allocation=Reservoir(SAMPLE_TOKENS, num_features, torch.float32, seed),
        )

    @staticmethod
    def planned_bytes(num_features: int, pca_rows: int | None) -> int:
        """Bytes of the tensors that `empty` with these arguments allocates."""
        moments = (
            Covariance.planned_bytes(num_features)
            if pca_rows is None
            else Reservoir.planned_bytes(pca_rows, num_features, torch.bfloat16)
        )
        return moments + Reservoir.planned_bytes(SAMPLE_TOKENS, num_features, torch.float32)

    def describe_pca(self) -> str:
        """Which PCA these statistics are for."""
        moments = self.moments
        return "exact" if isinstance(moments, Covariance) else f"randomized, {len(moments.rows)} rows"

    def merge(self, other: SideStatistics) -> None:
        """Add what `other` gathered, of the same features, for the same PCA and on the same device."""
        match self.moments, other.moments:
            case Covariance() as ours, Covariance() as theirs:
                ours.merge(theirs)
            case Reservoir() as ours, Reservoir() as theirs:
                ours.merge(theirs)
            case _:
                raise ConfigError("statistics of an exact and of a randomized PCA cannot be merged")
        self.allocation.merge(other.allocation)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that `restore` needs, by dotted name."""
        return {
            f"{name}.{key}": tensor
            for name, part in (("moments", self.moments), ("allocation", self.allocation))
            for key, tensor in part.tensors().items()
        }

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Become what `tensors` was taken from. Raises KeyError or RuntimeError for tensors of something else."""
        for name, part in (("moments", self.moments), ("allocation", self.allocation)):
            prefix = f"{name}."
            part.restore({key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)})
