from __future__ import annotations

import numpy as np
import pytest
import torch
from gates.plain_gates import config, plain_scores, trained_like

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.gates.model import BiasForm, GateConfig, GateKind, Gates, SinkAttentionGates
from sglang_kvtc.gates.score import BACKENDS, BLOCK_TOKENS, GateScorer

VARIANTS = [
    config(num_kv_heads=3, num_layers=5, input_features=32),
    config(bias_form=BiasForm.PAPER),
    config(num_sinks=0),
    config(num_sinks=0, bias_form=BiasForm.PAPER),
    config(group_size=1, num_kv_heads=1, gate_dim=7, num_sinks=3),
    config(group_size=8),
    config(GateKind.LINEAR),
    config(GateKind.MLP, input_features=40),
]
SINK_ATTENTION = [made for made in VARIANTS if made.kind is GateKind.SINK_ATTENTION]
CASES = [(made, "torch") for made in VARIANTS] + [(made, "numba") for made in SINK_ATTENTION]
by_case = pytest.mark.parametrize(("made", "backend"), CASES, ids=[f"{VARIANTS.index(m)}-{b}" for m, b in CASES])
by_backend = pytest.mark.parametrize("backend", BACKENDS)


def inputs(made: GateConfig, num_tokens: int, seed: int = 3) -> torch.Tensor:
    shape = (made.num_layers, num_tokens, made.input_features)
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def exact(gates: Gates, tokens: torch.Tensor) -> torch.Tensor:
    """forward() in double precision; the gates are left as they are."""
    doubled = type(gates)(gates.config).double()
    doubled.load_state_dict(gates.state_dict())
    return doubled(tokens).detach()


@by_case
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_fp32_scores_are_those_of_the_gates(made: GateConfig, backend: str, num_tokens: int) -> None:
    gates, tokens = trained_like(made), inputs(made, num_tokens)
    scorer = GateScorer(gates, torch.float32, backend)
    scores = scorer.score_layers(tokens)
    assert scores.dtype == torch.float32
    np.testing.assert_allclose(scores.numpy(), plain_scores(gates, tokens.double().numpy()), rtol=0, atol=1e-5)
    for layer in range(made.num_layers):
        torch.testing.assert_close(scorer.score(layer, tokens[layer]), scores[layer], rtol=0, atol=1e-5)


@by_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_costs_no_more_than_the_plain_gates_in_it(
    made: GateConfig, backend: str, dtype: torch.dtype
) -> None:
    """The error stays below twice that of forward() itself with parameters and inputs in that dtype."""
    gates, tokens = trained_like(made), inputs(made, 200).to(dtype)
    expected = exact(gates, tokens)
    rounded = type(gates)(made).to(dtype)
    rounded.load_state_dict(gates.state_dict())
    plain = (rounded(tokens).detach().double() - expected).abs()
    ours = (GateScorer(gates, dtype, backend).score_layers(tokens).double() - expected).abs()
    assert ours.max() <= 2 * plain.max()
    assert ours.mean() <= plain.mean()


@by_backend
@pytest.mark.parametrize("form", BiasForm)
def test_scores_are_right_where_exponentials_would_overflow(form: BiasForm, backend: str) -> None:
    made = config(bias_form=form, group_size=1)
    gates, tokens = trained_like(made), inputs(made, 50)
    assert isinstance(gates, SinkAttentionGates)
    with torch.no_grad():
        gates.q_norm.mul_(20)
        gates.k_norm.mul_(3)
        gates.sinks.mul_(5)
        gates.bias.mul_(30)
    with torch.no_grad():
        naive = (gates.sinks * gates.q_norm[:, None, None]).norm(dim=-1).max().exp()
    assert naive.isinf(), "smaller exponents would need no care"
    scores = GateScorer(gates, torch.float32, backend).score_layers(tokens)
    assert scores.min() < 1e-3
    assert scores.max() > 1 - 1e-3
    torch.testing.assert_close(scores.double(), exact(gates, tokens), rtol=0, atol=1e-4)


@by_case
def test_extreme_inputs_give_scores(made: GateConfig, backend: str) -> None:
    gates = trained_like(made)
    for magnitude in (0.0, 1e-15, 1e15):
        scores = GateScorer(gates, torch.float32, backend).score_layers(inputs(made, 9) * magnitude)
        assert ((scores >= 0) & (scores <= 1)).all()


@by_backend
def test_scores_go_into_a_given_buffer_of_any_strides(backend: str) -> None:
    made = VARIANTS[0]
    tokens = inputs(made, 11)
    scorer = GateScorer(trained_like(made), torch.float32, backend)
    expected = scorer.score_layers(tokens)
    buffer = torch.full((20, 5, 3), -1.0)
    out = buffer[2:13].transpose(0, 1)
    assert scorer.score_layers(tokens, out=out) is out
    assert torch.equal(out, expected)
    assert buffer[:2].eq(-1).all()
    assert buffer[13:].eq(-1).all()
    out = torch.full((11, 3), -1.0)
    assert scorer.score(4, tokens[4], out=out) is out
    torch.testing.assert_close(out, expected[4], rtol=0, atol=1e-5)


@by_backend
def test_many_tokens_are_scored_block_by_block(backend: str) -> None:
    made = config(num_layers=5, input_features=8)
    scorer = GateScorer(trained_like(made), torch.float32, backend)
    tokens = inputs(made, BLOCK_TOKENS // 2)
    expected = torch.stack([scorer.score(layer, tokens[layer]) for layer in range(5)])
    torch.testing.assert_close(scorer.score_layers(tokens), expected, rtol=0, atol=1e-5)
    longer = inputs(made, BLOCK_TOKENS + 5)
    assert scorer.score_layers(longer).shape == (5, BLOCK_TOKENS + 5, 2)


@by_case
def test_every_member_of_a_token_range_gets_the_score_it_gets_alone(made: GateConfig, backend: str) -> None:
    tokens = inputs(made, 6)
    scorer = GateScorer(trained_like(made), torch.float32, backend)
    alone = torch.cat([scorer.score_layers(tokens[:, [token]]) for token in range(6)], dim=1)
    torch.testing.assert_close(scorer.score_layers(tokens), alone, rtol=0, atol=1e-5)


@by_backend
def test_the_scorer_keeps_its_own_parameters(backend: str) -> None:
    made = config()
    gates, tokens = trained_like(made), inputs(made, 5)
    scorer = GateScorer(gates, torch.float32, backend)
    before = scorer.score_layers(tokens)
    with torch.no_grad():
        for parameter in gates.parameters():
            parameter.zero_()
    assert torch.equal(scorer.score_layers(tokens), before)
    assert not before.requires_grad


def test_a_dtype_that_is_no_float_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be scored in torch\.int8"):
        GateScorer(trained_like(config()), torch.int8)
