"""Catches the hidden states that enter each layer's attention and turns them into scores of the gates.

New tokens of a prompt are scored within the pass that computes them (gates.pass_score). A decode step only copies its
states: they are scored together when an eviction falls due, in one call for all layers (Fast KVzip, section
"Inference").
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from sglang_kvtc.errors import UnsupportedError
from sglang_kvtc.gates.pass_score import PassScorer
from sglang_kvtc.gates.score import GateScorer
from sglang_kvtc.integration.cell_pool import SCORE_DTYPE, CellKVPool

ATTENTION_SUFFIX = ".self_attn"
"""Name of the attention modules of the models SGLang serves with plain attention."""


class HiddenStates:
    """Scores of tokens, kept in `CellKVPool.scores`. Rows are those of SGLang's request pool.

    Memory: num_layers x interval x hidden size per row that was ever used.
    """

    def __init__(self, scorer: GateScorer, pool: CellKVPool, num_rows: int, interval: int) -> None:
        """interval: most tokens of one row between two calls of `score_pending`."""
        self._scorer, self._pool, self._interval = scorer, pool, interval
        self._pass = PassScorer(scorer)
        config = scorer.config
        # Untouched memory is not backed by the operating system.
        self._states = torch.empty(
            (config.num_layers, num_rows * interval, config.input_features), dtype=scorer.dtype, device=pool.device
        )
        self._pending: defaultdict[int, list[int]] = defaultdict(list)
        self.rows: set[int] = set()
        # Of the forward pass under way: where its states or scores go.
        self._slots: torch.Tensor | None = None
        self._places: torch.Tensor | None = None
        self._picked: torch.Tensor | None = None

    def attach(self, model: torch.nn.Module) -> None:
        """Hook every attention module of a loaded model.

        Raises UnsupportedError where not every layer of the KV pool has one whose attention is plain and causal.
        """
        found: list[int] = []
        for name, module in model.named_modules():
            attention = getattr(module, "attn", None)
            if not name.endswith(ATTENTION_SUFFIX) or attention is None:
                continue
            check_attention(name, attention)
            found.append(attention.layer_id - self._pool.start_layer)
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
        if found != list(range(self._pool.layer_num)):
            raise UnsupportedError(
                f"{type(model).__name__}: found attention modules named *{ATTENTION_SUFFIX} for layers {found} of "
                f"{self._pool.layer_num}: its hidden states cannot be scored, start without --kvtc-gates"
            )

    def start(self, rows: list[int], positions: list[int] | None, slots: torch.Tensor) -> None:
        """Say which tokens the next forward pass computes.

        rows: of the requests of the batch. positions: of the one new token of each, or None if they have several:
        then all are scored at once. slots: i64[num_new_tokens].
        """
        self._slots = self._places = self._picked = None
        self._pass.discard()
        if self.rows.isdisjoint(rows):
            return
        if positions is None:
            self._slots = slots
            return
        picked = [index for index, row in enumerate(rows) if row in self.rows]
        for index in picked:
            self._pending[rows[index]].append(positions[index])
        self._places = torch.tensor([self._place(rows[index], positions[index]) for index in picked])
        if len(picked) < len(rows):
            self._picked = torch.tensor(picked)

    def score_pending(self, row: int, slots: torch.Tensor) -> None:
        """Score what is buffered of a row. slots: [num_tokens], all of the request's in order of positions."""
        positions = self._pending.pop(row, None)
        if not positions:
            return
        places = torch.tensor([self._place(row, position) for position in positions])
        scores = self._scorer.score_layers(self._states[:, places])
        self._pool.scores[:, slots[torch.tensor(positions)].long()] = scores.to(SCORE_DTYPE)

    def discard(self, row: int) -> None:
        """Forget a row."""
        self._pending.pop(row, None)
        self.rows.discard(row)

    def clear(self) -> None:
        """Forget all rows."""
        self._pending.clear()
        self.rows.clear()

    def _place(self, row: int, position: int) -> int:
        return row * self._interval + position % self._interval

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a layer's attention. Models pass hidden_states by name, or after the positions."""
        states: torch.Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[1]
        layer = module.attn.layer_id - self._pool.start_layer
        if self._slots is not None:
            self._pass.add(layer, states)
            if layer == self._pool.layer_num - 1:
                self._pool.scores.index_copy_(1, self._slots, self._pass.finish().to(SCORE_DTYPE))
        elif self._places is not None:
            states = states if self._picked is None else states[self._picked]
            self._states[layer].index_copy_(0, self._places, states.to(self._states.dtype))


def check_attention(name: str, attention: Any) -> None:
    """Raises UnsupportedError unless a layer attends causally to everything before it, as cells are read."""
    window = attention.sliding_window_size
    kind = getattr(attention.attn_type, "value", attention.attn_type)
    found = {
        "sliding-window attention": window is not None and window > -1,
        "cross attention": attention.is_cross_attention,
        f"{kind} attention": kind != "decoder",
        "capped logits": bool(attention.logit_cap),
        "chunked attention": attention.use_irope,
        "a temperature by length": attention.xai_temperature_len > 0,
        "quantised KV": attention.k_scale is not None or attention.v_scale is not None,
    }
    for what, is_found in found.items():
        if is_found:
            raise UnsupportedError(f"{name} has {what}, which gated eviction cannot serve: start without --kvtc-gates")
