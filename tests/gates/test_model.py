from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gates.plain_gates import config, plain_scores, trained_like

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.gates.model import (
    BiasForm,
    GateConfig,
    GateKind,
    SinkAttentionGates,
    mlp_width,
    new_gates,
    parameters_per_layer,
)

VARIANTS = [
    config(),
    config(bias_form=BiasForm.PAPER),
    config(num_sinks=0),
    config(num_sinks=0, bias_form=BiasForm.PAPER),
    config(GateKind.LINEAR),
    config(GateKind.MLP, input_features=40),
]
by_variant = pytest.mark.parametrize(
    "made", VARIANTS, ids=["released", "paper", "no sinks", "paper without sinks", "linear", "mlp"]
)


def inputs(made: GateConfig, num_tokens: int = 7, seed: int = 3) -> torch.Tensor:
    shape = (made.num_layers, num_tokens, made.input_features)
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def assert_matches_the_formula(made: GateConfig) -> None:
    gates = trained_like(made)
    tokens = inputs(made)
    scores = gates(tokens)
    assert scores.dtype == torch.float32
    expected = plain_scores(gates, tokens.double().numpy())
    assert expected.std() > 0.005, "scores that are all alike would prove little"
    np.testing.assert_allclose(scores.detach().numpy(), expected, rtol=0, atol=1e-5)
    doubled = trained_like(made).double()(tokens).detach().numpy()
    np.testing.assert_allclose(doubled, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("form", BiasForm)
@pytest.mark.parametrize("group_size", range(1, 9))
def test_sink_attention_follows_its_formula_for_every_group_size(group_size: int, form: BiasForm) -> None:
    assert_matches_the_formula(config(group_size=group_size, bias_form=form))


@pytest.mark.parametrize(
    "changes",
    [
        {"gate_dim": 1},
        {"gate_dim": 5, "num_sinks": 1},
        {"gate_dim": 64, "num_sinks": 64, "num_kv_heads": 1},
        {"input_features": 1},
        {"input_features": 577, "num_kv_heads": 3},
        {"num_sinks": 7, "num_kv_heads": 5, "num_layers": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", BiasForm)
def test_sink_attention_follows_its_formula_for_odd_sizes(changes: dict[str, int], form: BiasForm) -> None:
    assert_matches_the_formula(config(bias_form=form, **changes))


@by_variant
def test_every_variant_follows_its_formula(made: GateConfig) -> None:
    assert_matches_the_formula(made)


@by_variant
def test_a_layer_is_a_slice_of_all_layers(made: GateConfig) -> None:
    made = dataclasses.replace(made, num_layers=4)
    gates, tokens = trained_like(made), inputs(made)
    part = gates(tokens[1:3], slice(1, 3))
    torch.testing.assert_close(part, gates(tokens)[1:3], rtol=0, atol=1e-6)


@by_variant
def test_a_token_is_scored_for_itself_alone(made: GateConfig) -> None:
    """Neither neighbours nor positions matter: the scores move with their tokens."""
    gates, tokens = trained_like(made), inputs(made)
    order = torch.tensor([4, 0, 6, 2, 1, 5, 3])
    torch.testing.assert_close(gates(tokens[:, order]), gates(tokens)[:, order], rtol=0, atol=1e-6)


@by_variant
@pytest.mark.parametrize("magnitude", [0.0, 1e-15, 1e4, 1e15])
def test_scores_and_gradients_stay_finite_for_extreme_inputs(made: GateConfig, magnitude: float) -> None:
    gates = trained_like(made)
    scores = gates(inputs(made) * magnitude)
    assert ((scores >= 0) & (scores <= 1)).all()
    torch.nn.functional.binary_cross_entropy(scores, torch.full_like(scores, 0.25)).backward()
    used = [parameter for parameter in gates.parameters() if parameter.numel()]
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in used)


@pytest.mark.parametrize("form", BiasForm)
@pytest.mark.parametrize("weight", [-200.0, 200.0])
def test_logits_beyond_the_exponential_saturate(form: BiasForm, weight: float) -> None:
    made = config(bias_form=form, num_sinks=3)
    gates = trained_like(made)
    assert isinstance(gates, SinkAttentionGates)
    with torch.no_grad():
        gates.sinks.mul_(1e3)
        gates.bias.fill_(weight)
    scores = gates(inputs(made) * 100)
    assert ((scores >= 0) & (scores <= 1)).all()


@by_variant
def test_gradients_are_those_of_the_scores(made: GateConfig) -> None:
    made = dataclasses.replace(made, num_layers=1, input_features=5, num_kv_heads=2)
    gates = trained_like(made).double()
    tokens = inputs(made, num_tokens=2).double()
    names, values = zip(*gates.named_parameters(), strict=True)

    def scores(*parameters: torch.Tensor) -> torch.Tensor:
        changed = dict(zip(names, parameters, strict=True))
        result: torch.Tensor = torch.func.functional_call(gates, changed, (tokens,))
        return result

    assert torch.autograd.gradcheck(scores, values)


@by_variant
def test_training_as_in_the_paper_lowers_the_loss(made: GateConfig) -> None:
    gates, teacher, tokens = new_gates(made, 0), trained_like(made, 5), inputs(made, 256)
    with torch.no_grad():
        targets = teacher(tokens)
    least = torch.nn.functional.binary_cross_entropy(targets, targets).item()
    optimizer = torch.optim.SGD(gates.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy(gates(tokens), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] - least < 0.7 * (losses[0] - least)


def test_new_gates_are_those_of_the_seed() -> None:
    first, again, other = (dict(new_gates(config(), seed).named_parameters()) for seed in (1, 1, 2))
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
    bound = 24**-0.5
    assert not torch.equal(first["q_weight"], other["q_weight"])
    assert 0.9 * bound < first["q_weight"].abs().max() <= bound
    assert first["q_norm"].eq(1).all()
    assert first["k_norm"].eq(1).all()
    assert not first["sinks"].any()
    assert not first["bias"].any()


def test_new_sink_attention_gates_start_near_one_against_its_sinks() -> None:
    scores = new_gates(config(num_sinks=16, gate_dim=16), 0)(inputs(config(), 100))
    assert abs(float(scores.detach().mean()) - 1 / 17) < 0.03


@pytest.mark.parametrize("features", [64, 576, 4096])
def test_the_mlp_has_as_many_parameters_as_sink_attention(features: int) -> None:
    made = config(GateKind.MLP, input_features=features, num_kv_heads=3)
    wanted = parameters_per_layer(GateKind.SINK_ATTENTION, made)
    one_unit = 2 * features + 3
    assert abs(parameters_per_layer(GateKind.MLP, made) - wanted) <= one_unit / 2
    gates = new_gates(made, 0)
    assert sum(parameter[0].numel() for parameter in gates.parameters()) == parameters_per_layer(GateKind.MLP, made)
    assert mlp_width(config(GateKind.MLP, input_features=10_000, gate_dim=1, group_size=1, num_kv_heads=1)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0, expected 1 to 1024"),
        ({"input_features": 1 << 20}, "input_features is 1048576"),
        ({"num_kv_heads": -1}, "num_kv_heads is -1"),
        ({"group_size": 0}, "group_size is 0"),
        ({"gate_dim": 0}, "gate_dim is 0"),
        ({"num_sinks": -1}, "num_sinks is -1, expected 0"),
    ],
)
def test_a_configuration_out_of_bounds_is_refused_by_field(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)
