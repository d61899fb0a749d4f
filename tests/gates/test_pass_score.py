"""Scores of whole passes are those of the scorer, held back or not, and models that overwrite states are found out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from gates.plain_gates import config, trained_like

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.gates.pass_score import PassScorer
from sglang_kvtc.gates.score import GateScorer

MADE = config(num_kv_heads=3, num_layers=5, input_features=32)
LAYER_BYTES = 13 * 32 * 4


class CountingScorer(GateScorer):
    """Notes which layers are scored, and when: beside the number of layers the model has come through."""

    def __init__(self) -> None:
        super().__init__(trained_like(MADE), torch.float32)
        self.layers_seen = 0
        self.calls: list[tuple[int, int]] = []

    def score(self, layer: int, inputs: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self.calls.append((layer, self.layers_seen))
        return super().score(layer, inputs, out)


def states(seed: int, num_tokens: int = 13) -> torch.Tensor:
    shape = (MADE.num_layers, num_tokens, MADE.input_features)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(
    scorer: CountingScorer, passes: PassScorer, layers: Sequence[torch.Tensor], spoils: bool = False
) -> torch.Tensor:
    """A pass through a model, which may write over its states when the next layer begins."""
    scorer.calls.clear()
    inputs = [layer.clone() for layer in layers]
    for layer, entering in enumerate(inputs):
        scorer.layers_seen = layer
        passes.add(layer, entering)
        if spoils and layer:
            inputs[layer - 1].zero_()
    return passes.finish()


@pytest.mark.parametrize("held_bytes", [0, LAYER_BYTES, 2 * LAYER_BYTES, 1 << 20])
def test_scores_are_those_of_all_layers_at_once(held_bytes: int) -> None:
    scorer = CountingScorer()
    passes = PassScorer(scorer, held_bytes)
    for seed, num_tokens in ((1, 13), (2, 13), (3, 1), (4, 0)):
        expected = GateScorer.score_layers(scorer, states(seed, num_tokens))
        torch.testing.assert_close(run(scorer, passes, states(seed, num_tokens)), expected, rtol=0, atol=0)


def test_layers_wait_until_their_states_take_too_much_memory() -> None:
    scorer = CountingScorer()
    run(scorer, PassScorer(scorer), states(0))
    assert scorer.calls == [(layer, 4) for layer in range(5)]
    passes = PassScorer(scorer, held_bytes=2 * LAYER_BYTES)
    for _ in range(2):
        run(scorer, passes, states(0))
        assert scorer.calls == [(0, 2), (1, 2), (2, 2), (3, 4), (4, 4)]


def test_a_model_that_overwrites_its_states_is_found_out_and_scored_right_from_the_first_pass() -> None:
    scorer = CountingScorer()
    passes = PassScorer(scorer)
    for seed in range(3):
        expected = GateScorer.score_layers(scorer, states(seed))
        torch.testing.assert_close(run(scorer, passes, states(seed), spoils=True), expected, rtol=0, atol=0)
        assert scorer.calls == [(layer, layer if seed else 4) for layer in range(5)]


def test_a_pass_that_broke_off_leaves_nothing_behind() -> None:
    scorer = CountingScorer()
    passes = PassScorer(scorer)
    for _ in range(2):
        passes.add(0, states(0)[0])
        passes.discard()
        expected = GateScorer.score_layers(scorer, states(1, 7))
        torch.testing.assert_close(run(scorer, passes, states(1, 7)), expected, rtol=0, atol=0)


def test_states_of_another_width_are_refused() -> None:
    passes = PassScorer(CountingScorer())
    passes.add(0, torch.zeros(13, 31))
    with pytest.raises(ConfigError, match="inputs are"):
        passes.finish()
