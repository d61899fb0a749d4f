"""Scoring the tokens of one forward pass as the model goes through its layers."""

from __future__ import annotations

import torch

from sglang_kvtc.gates.score import GateScorer

HELD_BYTES = 64 << 20
"""Most states that are held back: a chunk of a small model, or a layer or two of a large one."""


class PassScorer:
    """Scores of all layers of one pass after another.

    Between the large operations of a pass every small one finds cold caches, and scoring a layer is a dozen of them. So
    states are held back and scored together, layer after layer. That needs states which the model leaves as they are
    once their layer has read them. The first pass finds out: it compares them with copies, and where they differ every
    later layer is scored at once.
    """

    def __init__(self, scorer: GateScorer, held_bytes: int = HELD_BYTES) -> None:
        """held_bytes: most bytes of states that are held back; 0 scores every layer at once."""
        self._scorer, self._held_bytes = scorer, held_bytes
        self._held: list[tuple[int, torch.Tensor]] = []
        self._bytes = 0
        self._scores = torch.empty(0)
        self._is_begun = False
        # Of the first pass only.
        self._copies: list[torch.Tensor] | None = []

    def add(self, layer: int, states: torch.Tensor) -> None:
        """Take what enters attention of a layer, each layer once per pass: float[num_tokens, input_features].

        Raises ConfigError for states that do not fit the gates, at the latest in `finish`.
        """
        if not self._is_begun:
            config = self._scorer.config
            shape = (config.num_layers, len(states), config.num_kv_heads)
            self._scores = torch.empty(shape, dtype=torch.float32, device=states.device)
            self._is_begun = True
        self._held.append((layer, states))
        self._bytes += states.nbytes
        if self._copies is not None:
            self._copies.append(states.clone())
        if self._bytes > self._held_bytes:
            self._score_held()

    def finish(self) -> torch.Tensor:
        """Scores of the pass: f32[num_layers, num_tokens, num_kv_heads]; numbers of layers not added are undefined."""
        self._score_held()
        self._copies = None
        self._is_begun = False
        return self._scores

    def discard(self) -> None:
        """Forget a pass that did not come to its end."""
        self._held = []
        self._bytes = 0
        self._is_begun = False
        self._copies = None if self._copies is None else []

    def _score_held(self) -> None:
        held = self._held
        if self._copies:
            if not all(torch.equal(states, copy) for (_, states), copy in zip(held, self._copies, strict=True)):
                self._held_bytes = 0
                held = [(layer, copy) for (layer, _), copy in zip(held, self._copies, strict=True)]
            self._copies = []
        for layer, states in held:
            self._scorer.score(layer, states, out=self._scores[layer])
        self._held = []
        self._bytes = 0
