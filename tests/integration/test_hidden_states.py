"""Scores of tokens: whichever way their hidden states reach the gates, they are those of the gates."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from gates.plain_gates import config as gate_config
from gates.plain_gates import plain_scores, trained_like
from integration.gated_engine import FEATURES, H, L, Model, cell_allocator, cell_pool, linear_gates
from sglang.srt.layers.radix_attention import AttentionType

from sglang_kvtc.errors import UnsupportedError
from sglang_kvtc.gates.model import Gates
from sglang_kvtc.gates.score import GateScorer
from sglang_kvtc.integration.cell_pool import CellKVPool
from sglang_kvtc.integration.hidden_states import HiddenStates

ROWS, INTERVAL = 5, 7


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attached(pool: CellKVPool, gates: Gates | None = None, dtype: torch.dtype = torch.float32) -> HiddenStates:
    return HiddenStates(GateScorer(gates or linear_gates(), dtype), pool, ROWS, INTERVAL)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sliding_window_size": 128}, "sliding-window attention"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only attention"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "decoder_bidirectional attention"),
        ({"logit_cap": 30.0}, "capped logits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_b_ev_13_a_layer_that_cells_cannot_serve_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"layers\.1\.self_attn has .*{named}.*without --kvtc-gates"):
        attached(cell_pool(4)).attach(Model(**options))


@pytest.mark.parametrize("scale", ["k_scale", "v_scale"])
def test_b_ev_13_quantised_kv_is_refused_by_name(scale: str) -> None:
    model = Model()
    setattr(model.layers[1].self_attn.attn, scale, 1.0)
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn has quantised KV"):
        attached(cell_pool(4)).attach(model)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_b_ev_13_a_model_without_attention_in_each_layer_of_the_pool_is_refused(count: int) -> None:
    with pytest.raises(UnsupportedError, match=rf"for layers {list(range(count))} of 2".replace("[", r"\[")):
        attached(cell_pool(4)).attach(Model(count))


def test_b_ev_13_attention_under_another_name_is_not_taken_for_it() -> None:
    model = Model()
    model.layers[1].attention = model.layers[1].self_attn
    del model.layers[1].self_attn
    with pytest.raises(UnsupportedError, match=r"Model: found attention modules .* for layers \[0\] of 2"):
        attached(cell_pool(4)).attach(model)


@pytest.mark.parametrize("kind", ["linear", "sink attention"])
def test_scores_of_a_prompt_are_those_of_the_gates(kind: str) -> None:
    shape = {"num_layers": L, "num_kv_heads": H, "input_features": FEATURES}
    gates = linear_gates() if kind == "linear" else trained_like(gate_config(**shape))
    pool = cell_pool(20, start_layer=3)
    slots = cell_allocator(pool).alloc(12)
    states, model = attached(pool, gates), Model(first_layer=3)
    states.attach(model)
    states.rows.add(2)
    inputs = noise(L, 12, FEATURES)
    states.start([2], None, slots)
    model.run(inputs)
    expected = torch.from_numpy(plain_scores(gates, inputs.double().numpy()))
    torch.testing.assert_close(pool.scores[:, slots].double(), expected, rtol=2**-11, atol=2**-20)
    direct = GateScorer(gates, torch.float32).score_layers(inputs)
    torch.testing.assert_close(pool.scores[:, slots].float(), direct, rtol=2**-11, atol=2**-20)
    others = torch.ones(pool.num_slots, dtype=torch.bool)
    others[slots] = False
    assert not pool.scores[:, others].any()


def test_a_pass_without_a_gated_request_scores_and_keeps_nothing() -> None:
    pool = cell_pool(20)
    slots = cell_allocator(pool).alloc(8)
    states, model = attached(pool), Model()
    states.attach(model)
    states.rows.add(1)
    for rows, positions, new in (([1], None, slots[:4]), ([0, 2], None, slots[4:6]), ([0, 2], [3, 4], slots[6:])):
        states.start(rows, positions, new)
        model.run(noise(L, len(new), FEATURES))
    assert pool.scores[:, slots[:4]].all() and not pool.scores[:, slots[4:]].any()
    states.score_pending(0, slots)
    states.score_pending(2, slots)
    assert not pool.scores[:, slots[4:]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_states_kept_for_later_are_scored_as_at_once(seed: int, dtype: torch.dtype) -> None:
    """Requests come and go in rows, some gated; each is scored at random moments, at the latest when its ring is full.

    The oracle scores every token alone and when it is computed.
    """
    rng = random.Random(seed)
    pool = cell_pool(400, slots_per_token=1)
    allocator = cell_allocator(pool)
    states, model = attached(pool, dtype=dtype), Model()
    states.attach(model)
    scorer = GateScorer(linear_gates(), dtype)
    tokens: dict[int, list[int]] = {}
    gated: set[int] = set()
    waiting: dict[int, int] = {}
    expected = torch.zeros(pool.scores.shape)
    is_due = torch.zeros(pool.num_slots, dtype=torch.bool)

    def settle(row: int) -> None:
        states.score_pending(row, torch.tensor(tokens[row], dtype=torch.int32))
        if waiting[row]:
            is_due[tokens[row][-waiting[row] :]] = True
        waiting[row] = 0

    for step in range(60):
        for row in set(range(ROWS)) - tokens.keys():
            if rng.random() < 0.5:
                # Rings are met at any place: positions do not start at 0.
                tokens[row], waiting[row] = [0] * rng.randint(0, 2 * INTERVAL), 0
                if rng.random() < 0.6:
                    gated.add(row)
                    states.rows.add(row)
        batch = rng.sample(sorted(tokens), rng.randint(0, len(tokens)))
        for row in batch:
            if waiting[row] == INTERVAL:
                settle(row)
        slots = allocator.alloc(len(batch))
        inputs = noise(L, len(batch), FEATURES, seed=step).to(dtype)
        states.start(batch, [len(tokens[row]) for row in batch], slots)
        model.run(inputs)
        for index, (row, slot) in enumerate(zip(batch, slots.tolist(), strict=True)):
            tokens[row].append(slot)
            if row in gated:
                expected[:, slot] = scorer.score_layers(inputs[:, index : index + 1])[:, 0]
                waiting[row] += 1
        if tokens and rng.random() < 0.3:
            settle(rng.choice(sorted(tokens)))
        if tokens and rng.random() < 0.15:
            row = rng.choice(sorted(tokens))
            states.discard(row)
            gated.discard(row)
            # What was not scored yet never will be.
            for book in (tokens, waiting):
                del book[row]
        torch.testing.assert_close(pool.scores[:, is_due].float(), expected[:, is_due], rtol=2**-10, atol=2**-20)
        assert not pool.scores[:, ~is_due].any()
    assert int(is_due.sum()) > 20


def test_a_flush_forgets_rows_and_what_waits_in_them() -> None:
    pool = cell_pool(20)
    slots = cell_allocator(pool).alloc(3)
    states, model = attached(pool), Model()
    states.attach(model)
    states.rows.update([1, 2])
    states.start([1, 2], [0, 0], slots[:2])
    model.run(noise(L, 2, FEATURES))
    states.clear()
    assert not states.rows
    states.score_pending(1, slots)
    states.score_pending(2, slots)
    assert not pool.scores.any()
