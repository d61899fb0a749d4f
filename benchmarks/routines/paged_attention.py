"""Time of paged per-head attention on the CPU, next to torch's SDPA on dense contiguous K and V, on the same threads.

SDPA runs on all tokens, as without eviction, and on as many as are kept on average, as if every head had kept the same
ones and they lay in order. Both and ours take turns; times are medians. Values are random, since they do not change
the time. Lists differ in length: a head keeps half to one and a half times the average.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_kvtc.errors import ConfigError, KVTCError
from sglang_kvtc.eviction.attention import decode_attention, extend_attention
from sglang_kvtc.eviction.cell_lists import Scratch

HELP = "time of per-head attention on cells with holes, next to torch's SDPA on dense K and V"

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = {"smollm2-135m": Shape(9, 3, 64), "llama-3.1-8b": Shape(32, 8, 128)}
LAYOUTS = ("holes", "scattered", "grown", "whole")
"""holes: the cells of a head in order, as a prompt gets them, some of them gone. scattered: anywhere, as after much
reuse, some of them gone. whole: in order, nothing is gone. grown: the same, but the last 128 tokens, as if decoded
singly, lie anywhere."""
GROWN_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes default to decoding in a batch of 8 and to a chunk of 512 tokens."""
    parser.add_argument("--models", type=_names(SHAPES), default=tuple(SHAPES), help="of " + ", ".join(SHAPES))
    parser.add_argument("--layouts", type=_names(LAYOUTS), default=LAYOUTS, help="of " + ", ".join(LAYOUTS))
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of queries and cells")
    parser.add_argument("--batch", type=int, default=8, help="requests that decode (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=4000, help="earlier tokens of each (default %(default)s)")
    parser.add_argument("--kept", type=_counts, default=(512, 1000, 2000), help="kept per head, on average, to decode")
    parser.add_argument("--new", type=int, default=512, help="tokens of the chunk (default %(default)s)")
    parser.add_argument("--chunk-kept", type=int, default=1024, help="kept per head before it (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="turns after the warm-up (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of values and holes (default %(default)s)")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row per model, layout and size; `over_full` and `over_kept` are times over those of SDPA."""
    most = max(*args.kept, args.chunk_kept)
    if 3 * most > 2 * args.tokens:
        raise ConfigError(
            f"--tokens {args.tokens}: expected one and a half times the {most} that are kept on average, or more"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        with torch.inference_mode():
            return list(_rows(args))
    finally:
        torch.set_num_threads(threads)


def _rows(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    for model in args.models:
        for layout in args.layouts:
            for kept in args.kept if layout in ("holes", "scattered") else (args.tokens,):
                case = Case(SHAPES[model], layout, args.batch, 1, args.tokens, kept, DTYPES[args.dtype], args.seed)
                yield {"case": "decode", "model": model, "dtype": args.dtype, **case.measure(args.repeats)}
            kept = args.chunk_kept if layout in ("holes", "scattered") else args.tokens
            case = Case(SHAPES[model], layout, 1, args.new, args.tokens, kept, DTYPES[args.dtype], args.seed)
            yield {"case": "extend", "model": model, "dtype": args.dtype, **case.measure(args.repeats)}


class Case:
    """Requests of `num_tokens` earlier and `num_new` new tokens, as cells and as dense tensors."""

    def __init__(
        self,
        shape: Shape,
        layout: str,
        batch: int,
        num_new: int,
        num_tokens: int,
        num_kept: int,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)
        heads, total = shape.num_kv_heads, num_tokens + num_new
        self._shape, self._layout, self._num_new, self._num_kept = shape, layout, num_new, num_kept
        self._scratch = Scratch()
        self._scaling = shape.head_dim**-0.5
        self._queries = torch.randn(batch, num_new, shape.num_heads, shape.head_dim, generator=rng).to(dtype)
        # [batch, num_kv_heads, total, head_dim]
        self._keys, self._values = (
            torch.randn(batch, heads, total, shape.head_dim, generator=rng).to(dtype) for _ in range(2)
        )
        self._visible = torch.ones(batch, heads, total, dtype=torch.bool)
        if layout in ("holes", "scattered"):
            shares = (0.5 + torch.rand(batch, heads, 1, generator=rng)) * num_kept / num_tokens
            self._visible[..., :num_tokens] = torch.rand(batch, heads, num_tokens, generator=rng) < shares
        # [batch, num_kv_heads, total]: the cell of every pair.
        table = torch.arange(batch * heads * total).view(batch, heads, total)
        first_single = {"scattered": 0, "grown": max(0, total - GROWN_TOKENS)}.get(layout, total)
        singles = table[..., first_single:].flatten()
        shuffled = singles[torch.randperm(len(singles), generator=rng)]
        table[..., first_single:] = shuffled.view(batch, heads, -1)
        self._k_cells, self._v_cells = (
            torch.empty(table.numel(), shape.head_dim, dtype=dtype).index_copy_(
                0, table.flatten(), dense.view(-1, shape.head_dim)
            )
            for dense in (self._keys, self._values)
        )
        self._indices = table[self._visible].int()
        self._indptr = torch.zeros(batch * heads + 1, dtype=torch.int32)
        self._indptr[1:] = self._visible.sum(dim=2).flatten().cumsum(0)

    def measure(self, repeats: int) -> dict[str, object]:
        """Times, ratios and errors; see `_errors` for what it raises."""
        error, of_torch = self._errors(self.paged())
        kept = slice(self._num_kept + self._num_new)
        kept_keys, kept_values = (dense[:, :, kept].contiguous() for dense in (self._keys, self._values))
        turns: dict[str, Callable[[], torch.Tensor]] = {
            "paged": self.paged,
            "full": lambda: self._sdpa(self._queries, self._keys, self._values),
            "kept": lambda: self._sdpa(self._queries, kept_keys, kept_values),
        }
        times: defaultdict[str, list[float]] = defaultdict(list)
        for repeat in range(WARM_UP + repeats):
            for name, function in turns.items():
                start = time.perf_counter()
                function()
                if repeat >= WARM_UP:
                    times[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        return {
            "layout": self._layout,
            "batch": len(self._queries),
            "new": self._num_new,
            "earlier": self._visible.shape[2] - self._num_new,
            "kept": self._num_kept,
            **{f"{name}_ms": 1e3 * median for name, median in medians.items()},
            "over_full": medians["paged"] / medians["full"],
            "over_kept": medians["paged"] / medians["kept"],
            "max_error": error,
            "torch_max_error": of_torch,
        }

    def paged(self) -> torch.Tensor:
        """Ours: dtype[batch, num_new, num_heads, head_dim]."""
        batch, num_new = self._queries.shape[:2]
        queries = self._queries.flatten(0, 1)
        cells = (queries, self._k_cells, self._v_cells, self._indptr, self._indices)
        if num_new == 1:
            attended = decode_attention(*cells, self._scaling, scratch=self._scratch)
        else:
            attended = extend_attention(*cells, [num_new] * batch, self._scaling, scratch=self._scratch)
        return attended.view_as(self._queries)

    def _sdpa(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        """SDPA, laid out like the queries. visible: bool[batch, num_kv_heads, tokens], None for all."""
        num_new, num_tokens = queries.shape[1], keys.shape[2]
        mask = None
        if num_new > 1:
            mask = torch.ones(num_new, num_tokens, dtype=torch.bool).tril(num_tokens - num_new)
        if visible is not None:
            group = self._shape.num_heads // self._shape.num_kv_heads
            of_heads = visible.repeat_interleave(group, dim=1)[:, :, None]
            mask = of_heads if mask is None else mask & of_heads
        return scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, mask, scale=self._scaling, enable_gqa=True
        ).transpose(1, 2)

    def _errors(self, attended: torch.Tensor) -> tuple[float, float]:
        """Largest errors of ours and of SDPA on masked dense tensors, against SDPA in fp64, of the last 16 tokens.

        Raises KVTCError when ours is more than twice that of SDPA.
        """
        last = slice(max(0, self._num_new - 16), None)
        errors = [0.0, 0.0]
        for request, queries in enumerate(self._queries[:, last]):
            here = slice(request, request + 1)
            keys, values, visible = self._keys[here], self._values[here], self._visible[here]
            exact = self._sdpa(queries[None].double(), keys.double(), values.double(), visible)
            of_torch = self._sdpa(queries[None], keys, values, visible)
            for place, result in enumerate((attended[here, last], of_torch)):
                # A NaN stays one.
                errors[place] = max(float((result - exact).abs().max()), errors[place])
        if not errors[0] <= 2 * errors[1]:
            raise KVTCError(f"results are off by {errors[0]:.2g}, which is more than twice torch's {errors[1]:.2g}")
        return errors[0], errors[1]


def _names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Parser of names separated by commas."""

    def names(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {', '.join(known)}")
        return chosen

    return names


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(count) for count in text.split(","))
