"""Gated eviction inside SGLang's running requests (Fast KVzip, arXiv 2601.17668, section "Inference").

One `Gating` per scheduler owns what evicts: the gates, the scores of tokens, the page tables and the budgets. Hooks
(integration.gating_hooks) call it before and after every forward pass. Everything runs on the scheduler thread, where
a forward pass of the CPU is complete when it returns; so cells that an eviction frees are read by nobody.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from sglang_kvtc.config import EvictionConfig
from sglang_kvtc.eviction.budget import DECODE_WINDOW, Budget
from sglang_kvtc.eviction.page_table import PageTables
from sglang_kvtc.eviction.score_codes import decode_scores, encode_scores
from sglang_kvtc.eviction.select import keep_mask
from sglang_kvtc.gates.io import GateFile
from sglang_kvtc.gates.model import GateShape
from sglang_kvtc.gates.score import GateScorer
from sglang_kvtc.integration.cell_pool import CellKVPool
from sglang_kvtc.integration.eviction_options import budget_of, describe_budget, load_gates_for
from sglang_kvtc.integration.flags import config_of
from sglang_kvtc.integration.hidden_states import HiddenStates
from sglang_kvtc.kernels.attention import resolve_backend
from sglang_kvtc.tier.store import Ids

logger = logging.getLogger(__name__)

STATE = "kvtc_gated"
"""Attribute of SGLang's request with its GatedRequest; ungated requests have none."""
OPT_OUT = "kvtc_gated"
"""Key of a request's `custom_params`: false keeps the request whole."""
NAMESPACE_SEPARATOR = "\x1f"
_LENGTH_STEP = 16
"""Lengths are rounded up to it where memory is estimated, so that estimates can be reused."""


class Publisher(Protocol):
    """Stores whole tokens under ids; the tier, where there is one."""

    def encode(self, slots: torch.Tensor, start_position: int, scores: torch.Tensor) -> Ids | None:
        """Copy slots i64[n] out, with codes u8[num_layers, n, num_kv_heads] of their scores; None without room."""
        ...

    def free(self, ids: Ids) -> None:
        """Drop what was stored."""
        ...


@dataclass(slots=True)
class GatedRequest:
    """What gating knows of one request while it holds a row of the request pool.

    restored: slots i64[n] of its own that a restored prefix is written into, before it has a row. length: tokens with
    KV after the last forward pass. evicted_at: the same at the last eviction; held_pairs: KV pairs of its own that were
    left then. encoded_from, encoded: the tokens handed to the publisher, under `ids`; None before the first.
    """

    restored: torch.Tensor | None = None
    length: int = 0
    evicted_at: int = 0
    held_pairs: int = 0
    encoded_from: int | None = None
    encoded: int = 0
    is_publishable: bool = True
    ids: list[Ids] = field(default_factory=list)

    def reset(self) -> None:
        """As before the first forward pass: a retracted request starts again."""
        self.restored = self.encoded_from = None
        self.length = self.evicted_at = self.held_pairs = self.encoded = 0
        self.is_publishable = True
        self.ids = []


@dataclass(slots=True)
class GatingCounters:
    """Since start. Pairs are KV pairs of one layer and head."""

    gated_requests: int = 0
    evictions: int = 0
    evicted_pairs: int = 0
    restored_tokens: int = 0
    published_tokens: int = 0
    unpublished_requests: int = 0


class Gating:
    """Scores, evicts and publishes the KV pairs of gated requests.

    publisher: the tier, if there is one. chunk_tokens: most tokens of a prompt in one forward pass; None for all.
    """

    def __init__(
        self,
        config: EvictionConfig,
        gates: GateFile,
        pool: CellKVPool,
        req_to_token: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        """req_to_token: i32[num_rows, max tokens], SGLang's slots of each request. dtype: of the projections."""
        self.budget = budget_of(config)
        self.decode_budget = msgspec.structs.replace(self.budget, window_tokens=DECODE_WINDOW)
        self.interval = config.decode_interval
        self.pool = pool
        self.gates = gates
        self._req_to_token = req_to_token
        num_rows = len(req_to_token)
        self.tables = PageTables(pool.cells, num_rows)
        self.attention = resolve_backend("auto", pool.device)
        self.states = HiddenStates(GateScorer(gates.gates, dtype), pool, num_rows, self.interval)
        self.publisher: Publisher | None = None
        self.chunk_tokens: int | None = None
        self.counters = GatingCounters()
        self.namespace = _namespace(gates, self.budget, self.interval)
        self._kept_tokens = functools.lru_cache(maxsize=1 << 16)(self._count_kept)

    @classmethod
    def of_runner(cls, runner: Any) -> Gating:
        """Of SGLang's model runner, whose model is loaded; the allocator and the request pool learn of it.

        Raises a KVTCError if gates or model do not fit.
        """
        config = config_of(runner.server_args).eviction
        pool: CellKVPool = runner.token_to_kv_pool
        gates = load_gates_for(config, Path(runner.server_args.model_path), _shape_of(runner, pool))
        gating = cls(config, gates, pool, runner.req_to_token_pool.req_to_token, runner.dtype)
        gating.budget.check_context(runner.model_config.context_len)
        gating.states.attach(runner.model)
        runner.token_to_kv_pool_allocator.gating = gating
        runner.req_to_token_pool.kvtc_gating = gating
        logger.info(gating.start_line(config))
        return gating

    def start_line(self, config: EvictionConfig) -> str:
        cells = self.pool.cells
        return (
            f"kvtc: gated eviction, gates {config.gates} ({self.gates.digest.hex()[:12]}), "
            f"{describe_budget(self.budget)}, every {self.interval} decoded tokens, attention backend "
            f"{self.attention.name}, {self.pool.size} tokens of memory in {cells.num_cells} cells, "
            f"{self.pool.num_slots - 1} slots, {self.pool.overhead_bytes} bytes of tables and scores beside "
            f"{sum(self.pool.get_kv_size_bytes())} bytes of KV"
        )

    def enter(self, req: Any, *, publishes: bool) -> None:
        """Make a queued request a gated one, unless it opted out. Safe to repeat, as after a retraction.

        Its prefixes are matched and published in a namespace of gates and budget, since KV that was computed over an
        evicted prefix is not what another request would compute. publishes: a tier takes what it computes; without
        one, nothing of it may enter the tree.
        """
        if hasattr(req, STATE) or _opted_out(req):
            return
        setattr(req, STATE, GatedRequest())
        req.extra_key = f"{req.extra_key or ''}{NAMESPACE_SEPARATOR}{self.namespace}"
        if not publishes:
            req.skip_radix_cache_insert = True
        self.counters.gated_requests += 1

    def before_batch(self, reqs: list[Any]) -> None:
        """Before a forward pass of these requests."""
        self.states.rows.update(req.kv.req_pool_idx for req in reqs if hasattr(req, STATE))

    def after_batch(self, reqs: list[Any]) -> None:
        """After a forward pass: evict from each request whose prompt grew or that is due while it generates."""
        for req in reqs:
            state: GatedRequest | None = getattr(req, STATE, None)
            if state is None or not req.kv.holds_kv:
                continue
            length = req.kv.kv_committed_len
            if state.length == 0 and state.restored is not None:
                # The tokens restored are stored already.
                state.encoded_from = state.encoded = req.kv.cache_protected_len + len(state.restored)
                state.restored = None
            is_prompt = length - state.length > 1
            state.length = length
            if is_prompt or length - state.evicted_at >= self.interval:
                self._evict(req, state, self.budget if is_prompt else self.decode_budget)

    def lists(self, rows: list[int], lengths: list[int], slots: torch.Tensor, new_lens: list[int] | None) -> list[Any]:
        """What the attention backend reads of a batch, one entry per layer, new tokens included.

        rows, lengths: of each request. slots: i64[num_new_tokens]. new_lens: new tokens of each request; None for one
        each, in a decode step.
        """
        known = self.tables.is_known(rows) if new_lens is None else [False] * len(rows)
        grown = [index for index, is_known in enumerate(known) if is_known]
        if grown:
            self.tables.append([rows[index] for index in grown], slots[grown] if len(grown) < len(rows) else slots)
        for row, length, is_known in zip(rows, lengths, known, strict=True):
            if not is_known:
                self.tables.set(row, self._slots(row, 0, length))
        return self.attention.lists(self.tables, rows, new_lens)

    def restore_into(self, req: Any, slots: torch.Tensor, scores: torch.Tensor | None) -> None:
        """Give a request a stored prefix as its own. It is whole at first, and evicted from like the rest.

        slots: i64[n], in which the prefix will be when the request's first forward pass reads it. scores: their codes
        u8[num_layers, n, num_kv_heads].
        """
        state: GatedRequest = getattr(req, STATE)
        state.restored = slots
        self.counters.restored_tokens += len(slots)
        # Tokens without a score are kept: nothing is known that speaks against them.
        known = 1.0 if scores is None else decode_scores(scores, self.pool.scores.dtype)
        self.pool.scores[:, slots] = known

    def take_ids(self, req: Any, end: int) -> tuple[int, Ids]:
        """Ids of the tokens that were stored for the request, up to position `end`, to be owned by the caller.

        Returns the position of the first one, and the ids: fewer where there was no room. Tokens not stored yet are
        whole, since only what was stored is ever evicted from.
        """
        state: GatedRequest = getattr(req, STATE)
        self._encode(req, state, end)
        start = end if state.encoded_from is None else state.encoded_from
        ids = np.concatenate(state.ids) if state.ids else np.empty(0, np.int64)
        state.ids = []
        wanted = max(0, end - start)
        if len(ids) > wanted and self.publisher is not None:
            self.publisher.free(ids[wanted:])
        return start, ids[:wanted]

    def release(self, req: Any) -> None:
        """Forget a request whose row is about to be given back."""
        self.tables.discard(req.kv.req_pool_idx)
        self.states.discard(req.kv.req_pool_idx)
        state: GatedRequest | None = getattr(req, STATE, None)
        if state is not None:
            if self.publisher is not None:
                for ids in state.ids:
                    self.publisher.free(ids)
            state.reset()

    def reset(self) -> None:
        """Forget all rows, as in a flush."""
        self.tables.clear()
        self.states.clear()

    def peak_tokens(self, num_prompt: int, num_new: int, chunk: int) -> int:
        """Most tokens of memory that an own part of `num_prompt` and then `num_new` tokens holds at any time.

        chunk: most tokens of a prompt in one forward pass, which are whole until it is over.
        """
        total = num_prompt + num_new
        kept = self._kept_tokens(_rounded(num_prompt), self.budget)
        # A prompt's window may be wider than that of decoding, and is there until the first eviction of that.
        decode = max(kept, self._kept_tokens(_rounded(total), self.decode_budget)) + self.interval
        return max(min(num_prompt, kept + min(chunk, num_prompt)), min(total, decode))

    def growth_tokens(self, req: Any, num_new: float) -> float:
        """Tokens of memory that a running request may yet take for `num_new` more tokens; at most that number."""
        state: GatedRequest | None = getattr(req, STATE, None)
        if state is None or state.evicted_at == 0:
            return num_new
        own = state.length - req.kv.cache_protected_len
        held = state.held_pairs / self.pool.cells.cells_per_token + state.length - state.evicted_at
        peak = self._kept_tokens(_rounded(own + int(num_new)), self.decode_budget) + self.interval
        return min(num_new, max(0.0, peak - held))

    def stats(self) -> dict[str, float]:
        """Flat numbers for the server's state page."""
        cells = self.pool.cells
        return {
            "cells": cells.num_cells - cells.cells_per_token,
            "used_cells": cells.used_cells,
            "free_tokens": cells.free_tokens,
            "overhead_bytes": self.pool.overhead_bytes,
            **{name: getattr(self.counters, name) for name in self.counters.__dataclass_fields__},
        }

    def _evict(self, req: Any, state: GatedRequest, budget: Budget) -> None:
        """Bring the request's own part under its budget. What a tree shares with others is never touched."""
        row, first = req.kv.req_pool_idx, req.kv.cache_protected_len
        cells = self.pool.cells
        own = self._slots(row, first, state.length)
        self.states.score_pending(row, self._slots(row, 0, state.length))
        state.evicted_at = state.length
        target = budget.target_pairs(cells.num_layers, len(own), cells.num_kv_heads)
        if target >= len(own) * cells.cells_per_token:
            state.held_pairs = int(cells.alive(own).sum())
            return
        keep = keep_mask(self.pool.scores[:, own], budget, cells.alive(own))
        self._encode(req, state, state.length)
        self.counters.evicted_pairs += cells.evict(own, keep)
        self.counters.evictions += 1
        state.held_pairs = int(keep.sum())
        # Its lists name freed cells; they are built anew before the next step.
        self.tables.discard(row)

    def _encode(self, req: Any, state: GatedRequest, end: int) -> None:
        """Hand the publisher all own tokens before `end` that it does not have yet."""
        if self.publisher is None or not state.is_publishable:
            return
        if state.encoded_from is None:
            state.encoded_from = state.encoded = req.kv.cache_protected_len
        start = state.encoded
        if start >= end:
            return
        slots = self._slots(req.kv.req_pool_idx, start, end)
        self.states.score_pending(req.kv.req_pool_idx, self._slots(req.kv.req_pool_idx, 0, state.length))
        ids = self.publisher.encode(slots, start, encode_scores(self.pool.scores[:, slots]))
        if ids is None:
            state.is_publishable = False
            self.counters.unpublished_requests += 1
            return
        state.ids.append(ids)
        state.encoded = end

    def _slots(self, row: int, start: int, end: int) -> torch.Tensor:
        return self._req_to_token[row, start:end].long()

    def _count_kept(self, num_tokens: int, budget: Budget) -> int:
        cells = self.pool.cells
        pairs = budget.target_pairs(cells.num_layers, num_tokens, cells.num_kv_heads)
        return min(num_tokens, -(-pairs // cells.cells_per_token))


def gating_of(allocator: Any) -> Gating | None:
    """What evicts from the slots of an allocator of SGLang; None for a stock one."""
    return getattr(allocator, "gating", None)


def _shape_of(runner: Any, pool: CellKVPool) -> GateShape:
    config = runner.model_config
    return GateShape(pool.layer_num, config.hidden_size, pool.head_num, config.num_attention_heads // pool.head_num)


def _namespace(gates: GateFile, budget: Budget, interval: int) -> str:
    content = msgspec.json.encode([gates.digest.hex(), msgspec.to_builtins(budget), interval])
    return f"kvtc-gated-{hashlib.sha256(content).hexdigest()[:32]}"


def _opted_out(req: Any) -> bool:
    custom = req.sampling_params.custom_params
    return isinstance(custom, dict) and custom.get(OPT_OUT) is False


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // _LENGTH_STEP) * _LENGTH_STEP
