"""The compiled loop against torch's path and against the formulas in plain numpy."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from gates.plain_gates import config, plain_scores, trained_like

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.gates import fused
from sglang_kvtc.gates.model import BiasForm, GateConfig, GateKind, Gates, SinkAttentionGates, new_gates
from sglang_kvtc.gates.score import BACKENDS, DTYPES, GateScorer

LANES = fused._LANES
by_form = pytest.mark.parametrize("form", BiasForm)


def sink_attention(made: GateConfig) -> SinkAttentionGates:
    gates = trained_like(made)
    assert isinstance(gates, SinkAttentionGates)
    return gates


def scale_parameters(gates: Gates, **factors: float) -> None:
    with torch.no_grad():
        for name, factor in factors.items():
            getattr(gates, name).mul_(factor)


def inputs(made: GateConfig, num_tokens: int, seed: int = 3) -> torch.Tensor:
    shape = (made.num_layers, num_tokens, made.input_features)
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def in_double(gates: Gates, tokens: torch.Tensor) -> torch.Tensor:
    doubled = type(gates)(gates.config).double()
    doubled.load_state_dict(gates.state_dict())
    return doubled(tokens).detach()


def by_both(gates: Gates, tokens: torch.Tensor, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The scores of each backend, after a look at which it is."""
    scorers = [GateScorer(gates, dtype, backend) for backend in BACKENDS]
    assert [scorer.backend for scorer in scorers] == list(BACKENDS) == ["numba", "torch"]
    return [scorer.score_layers(tokens) for scorer in scorers]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numba_scores_sink_attention_on_the_cpu_unless_told_otherwise(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config()
    fused._compile()
    calls: list[bool] = []
    right = fused._score

    def counted(*arguments: object) -> None:
        calls.append(True)
        right(*arguments)

    monkeypatch.setattr(fused, "_score", counted)
    monkeypatch.setattr(fused, "_compile", lambda: None)
    for backend, expected, num_calls in ((None, "numba", 2), ("numba", "numba", 2), ("torch", "torch", 0)):
        scorer = GateScorer(trained_like(made), dtype, backend)
        assert scorer.backend == expected
        calls.clear()
        scorer.score_layers(inputs(made, 3))
        assert len(calls) == num_calls, "one call per layer"


@pytest.mark.parametrize("kind", [GateKind.LINEAR, GateKind.MLP])
def test_torch_scores_the_other_kinds_and_numba_refuses_them(kind: GateKind) -> None:
    gates = trained_like(config(kind))
    assert GateScorer(gates, torch.float32).backend == "torch"
    with pytest.raises(ConfigError, match=f"numba scores sink attention, and these gates are {kind}"):
        GateScorer(gates, torch.float32, "numba")


def test_gates_on_another_device_are_refused() -> None:
    with pytest.raises(ConfigError, match="these gates lie on meta"):
        GateScorer(trained_like(config()).to("meta"), torch.float32, "numba")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be scored by 'triton': expected one of numba, torch"):
        GateScorer(trained_like(config()), torch.float32, "triton")


@pytest.mark.parametrize("name", ["q_weight", "q_bias", "q_norm", "sinks", "bias"])
def test_parameters_that_are_not_finite_are_left_to_torch(name: str, caplog: pytest.LogCaptureFixture) -> None:
    gates = sink_attention(config())
    with torch.no_grad():
        getattr(gates, name).view(-1)[1] = float("inf")
    with caplog.at_level(logging.INFO):
        assert GateScorer(gates, torch.float32).backend == "torch"
    assert "not finite" in caplog.text
    with pytest.raises(ConfigError, match="not finite, which numba does not score"):
        GateScorer(gates, torch.float32, "numba")


def test_both_backends_agree_with_plain_numpy_for_odd_shapes() -> None:
    rng = np.random.default_rng(11)
    for case in range(60):
        made = config(
            num_layers=int(rng.integers(1, 4)),
            input_features=int(rng.integers(1, 40)),
            num_kv_heads=int(rng.integers(1, 6)),
            group_size=int(rng.integers(1, 10)),
            gate_dim=int(rng.integers(1, 35)),
            num_sinks=int(rng.choice([0, 1, 2, 7, 16, 33])),
            bias_form=BiasForm(rng.choice(list(BiasForm))),
        )
        gates, tokens = trained_like(made, case), inputs(made, int(rng.integers(1, 4)), case)
        expected = plain_scores(gates, tokens.double().numpy())
        for scores in by_both(gates, tokens):
            np.testing.assert_allclose(scores.numpy(), expected, rtol=0, atol=2e-6, err_msg=str(made))


@by_form
@pytest.mark.parametrize("num_tokens", [0, 1, LANES - 1, LANES, LANES + 1, fused.BLOCK_TOKENS + LANES + 3])
def test_blocks_of_tokens_meet_without_a_seam(form: BiasForm, num_tokens: int) -> None:
    made = config(bias_form=form, gate_dim=5, num_layers=1)
    gates, tokens = sink_attention(made), inputs(made, num_tokens)
    for scores in by_both(gates, tokens):
        assert scores.shape == (1, num_tokens, 2)
        if num_tokens:
            torch.testing.assert_close(scores.double(), in_double(gates, tokens), rtol=0, atol=2e-6)


@by_form
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_sinks", [0, 16])
@pytest.mark.parametrize("steepness", [1, 4, 100])
def test_the_error_is_at_most_twice_that_of_torch_in_the_same_dtype(
    form: BiasForm, dtype: torch.dtype, num_sinks: int, steepness: float
) -> None:
    made = config(bias_form=form, gate_dim=16, num_kv_heads=3, input_features=64, num_sinks=num_sinks)
    gates, tokens = sink_attention(made), inputs(made, 300).to(dtype)
    scale_parameters(gates, q_norm=steepness, bias=steepness)
    assert fused.FusedSinkAttention(gates, dtype)._is_small == (steepness < 100)
    exact = in_double(gates, tokens)
    rounded = type(gates)(made).to(dtype)
    rounded.load_state_dict(gates.state_dict())
    allowed = 2 * (rounded(tokens).detach().double() - exact).abs().max()
    assert (GateScorer(gates, dtype, "numba").score_layers(tokens).double() - exact).abs().max() <= allowed


@by_form
def test_sums_with_and_without_their_maximum_meet_at_the_limit(form: BiasForm) -> None:
    """Sinks as long as the unguarded sum allows, and a little longer: both are right, neither overflows."""
    made = config(bias_form=form, group_size=2, num_layers=1)
    tokens = inputs(made, 200)
    for factor, is_small in ((0.999, True), (1.001, False)):
        gates = sink_attention(made)
        (_, _, _, sinks, _, _), *_ = fused.FusedSinkAttention(gates, torch.float32)._parameters
        length = float(np.linalg.norm(sinks, axis=-1).max())
        scale_parameters(gates, sinks=factor * fused._LARGEST_EXPONENT / length)
        assert fused.FusedSinkAttention(gates, torch.float32)._is_small == is_small
        for scores in by_both(gates, tokens):
            torch.testing.assert_close(scores.double(), in_double(gates, tokens), rtol=0, atol=5e-5)


@by_form
@pytest.mark.parametrize(
    "factors",
    [
        {"sinks": 1e6},
        {"bias": 1e6},
        {"bias": -1e30},
        {"q_norm": 1e15, "k_norm": 1e15},
        {"q_norm": 1e-15},
        {"k_norm": 1e20},
        {"q_weight": 1e15},
        {"sinks": 1e4, "bias": 1e4, "k_norm": 1e4},
    ],
    ids=str,
)
def test_no_parameter_takes_a_score_out_of_its_range(form: BiasForm, factors: dict[str, float]) -> None:
    made = config(bias_form=form)
    gates, tokens = sink_attention(made), inputs(made, 150)
    scale_parameters(gates, **factors)
    ours, by_torch = by_both(gates, tokens)
    assert ((ours >= 0) & (ours <= 1)).all()
    # Where exponents are huge, a rounding of one of them decides between 0 and 1; few tokens come so near.
    assert ((ours - by_torch).abs() < 1e-3).float().mean() > 0.97


def test_saturated_scores_are_zero_and_one() -> None:
    made = config(group_size=7, num_sinks=3)
    gates, tokens = sink_attention(made), inputs(made, 20)
    with torch.no_grad():
        gates.bias.fill_(1e4)
    assert by_both(gates, tokens)[0].eq(1).all()
    with torch.no_grad():
        gates.bias.fill_(-1e4)
    assert by_both(gates, tokens)[0].le(1e-37).all()


@by_form
@pytest.mark.parametrize("steepness", [1, 100])
def test_nan_and_infinity_stay_with_their_token(form: BiasForm, steepness: float) -> None:
    made = config(bias_form=form)
    gates, tokens = sink_attention(made), inputs(made, 140)
    scale_parameters(gates, sinks=steepness)
    spoiled = tokens.clone()
    spoiled[:, 5, 2] = float("nan")
    spoiled[:, 130] = float("inf")
    clean, scores = by_both(gates, tokens)[0], by_both(gates, spoiled)
    kept = [token for token in range(140) if token not in (5, 130)]
    for result in scores:
        assert result[:, [5, 130]].isnan().all()
    torch.testing.assert_close(scores[0][:, kept], clean[:, kept], rtol=0, atol=1e-6)


@by_form
@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e15, 1e18, 1e30])
def test_inputs_of_any_size_give_scores(form: BiasForm, magnitude: float) -> None:
    made = config(bias_form=form)
    scores = GateScorer(trained_like(made), torch.float32, "numba").score_layers(inputs(made, 9) * magnitude)
    assert ((scores >= 0) & (scores <= 1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_and_out_may_have_any_strides(dtype: torch.dtype) -> None:
    made = config(num_layers=3)
    scorer = GateScorer(trained_like(made), dtype, "numba")
    wide = inputs(made, 2 * LANES).to(dtype)
    expected = scorer.score_layers(wide[:, ::2].contiguous())
    buffer = torch.full((2, LANES + 2, 3), -1.0)
    out = buffer[:, 1:-1].permute(2, 1, 0)
    for strided in (wide[:, ::2], wide.transpose(1, 2).contiguous().transpose(1, 2)[:, ::2]):
        assert not strided.is_contiguous()
        assert scorer.score_layers(strided, out=out) is out
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-3 if dtype is torch.bfloat16 else 1e-5)
    assert buffer[:, [0, -1]].eq(-1).all()
    column = torch.full((LANES, 4), -1.0)
    assert scorer.score(2, wide[2, ::2], out=column[:, 1:3]).data_ptr() == column[:, 1:].data_ptr()
    torch.testing.assert_close(column[:, 1:3], expected[2], rtol=0, atol=1e-3 if dtype is torch.bfloat16 else 1e-5)
    assert column[:, [0, 3]].eq(-1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_shapes_are_refused_before_anything_is_read_or_written(backend: str) -> None:
    made = config()
    scorer, tokens = GateScorer(trained_like(made), torch.float32, backend), inputs(made, 4)
    for wrong in (tokens[:1], tokens[..., 1:], tokens[0], torch.cat([tokens, tokens])):
        with pytest.raises(ConfigError, match=r"inputs are torch\.float32 .*, expected \[2, 'tokens', 24\]"):
            scorer.score_layers(wrong)
    for out in (torch.zeros(2, 3, 2), torch.zeros(2, 4, 1), torch.zeros(2, 4, 2, dtype=torch.float64)):
        with pytest.raises(ConfigError, match=r"out is .*, expected torch\.float32 \[2, 4, 2\]"):
            scorer.score_layers(tokens, out=out)
        assert out.eq(0).all()
    for layer in (-1, 2):
        with pytest.raises(ConfigError, match=rf"there is no layer {layer}, expected 0 to 1"):
            scorer.score(layer, tokens[0])


def test_threads_may_share_a_scorer() -> None:
    made = config(num_layers=4, num_kv_heads=3, input_features=64)
    scorer = GateScorer(new_gates(made, 5), torch.bfloat16)
    batches = [inputs(made, 100 + 40 * number, number).bfloat16() for number in range(8)]
    expected = [scorer.score_layers(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for scores, alone in zip(pool.map(scorer.score_layers, batches), expected, strict=True):
                assert torch.equal(scores, alone)


def test_scores_can_be_taken_in_inference_mode_and_from_inputs_with_gradients() -> None:
    made = config()
    scorer, tokens = GateScorer(trained_like(made), torch.float32), inputs(made, 4)
    expected = scorer.score_layers(tokens)
    with torch.inference_mode():
        assert torch.equal(scorer.score_layers(tokens * 1), expected)
    scores = scorer.score_layers(tokens.requires_grad_())
    assert torch.equal(scores, expected)
    assert not scores.requires_grad


def test_a_folder_without_a_cache_costs_no_more_than_a_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise RuntimeError("no locator available")

    fresh = fused._compiled(fused._score.py_func)
    monkeypatch.setattr(fresh, "enable_caching", refuse)
    monkeypatch.setattr(fused, "_score", fresh)
    made = config()
    with caplog.at_level(logging.INFO):
        scorer = GateScorer(trained_like(made), torch.float32)
    assert scorer.backend == "numba"
    assert "compiled anew in every process: no locator available" in caplog.text
    assert scorer.score_layers(inputs(made, 3)).isfinite().all()
