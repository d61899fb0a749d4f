"""Fits of one side: under weights, in groups of layers, and again from the same statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from calibrate.side_rows import GEOMETRY, fitted, rows_of, statistics_of

from sglang_kvtc.artifact.schema import Group, SideBasis, SidePlan
from sglang_kvtc.calibrate.fit import SideFit
from sglang_kvtc.codec.allocate import allocate, error_table, side_plan
from sglang_kvtc.codec.transform import SideTransform
from sglang_kvtc.types import Side

NUM_FEATURES = GEOMETRY.features(Side.K)


def random_weights() -> np.ndarray:
    """Symmetric, positive definite f32[layers, heads, 16, 16], of condition 100."""
    axes = torch.linalg.qr(torch.randn(4, 2, 16, 16, generator=torch.Generator().manual_seed(3))).Q
    return (axes @ torch.diag(torch.logspace(-1, 1, 16)) @ axes.mT).numpy()


WEIGHTS = random_weights()


def weighted(rows: torch.Tensor) -> torch.Tensor:
    """Rows in fp64 times the weights, head by head."""
    blocks = torch.from_numpy(WEIGHTS).double().flatten(0, 1)
    return (rows.double().view(-1, 8, 1, 16) @ blocks).flatten(1)


def assert_equal(found: SideFit, expected: SideFit) -> None:
    assert (found.weights is None) == (expected.weights is None)
    for name in ("mean", "basis", "variances"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert (found.total_variance, found.sample_variance) == (expected.total_variance, expected.sample_variance)


@pytest.mark.parametrize("pca_rows", [None, 500], ids=["exact", "randomized"])
def test_one_collection_is_fitted_under_several_weights(pca_rows: int | None) -> None:
    statistics = statistics_of(rows_of(Side.K), pca_rows)
    plain = fitted(statistics)
    under = fitted(statistics, weights=WEIGHTS)
    assert_equal(fitted(statistics), plain)
    assert_equal(fitted(statistics_of(rows_of(Side.K), pca_rows), weights=WEIGHTS), under)
    assert plain.weights is None
    assert under.weights is WEIGHTS
    np.testing.assert_array_equal(under.mean, plain.mean)


@pytest.mark.parametrize("group_features", [0, NUM_FEATURES // 2])
@pytest.mark.parametrize("pca_rows", [None, 700], ids=["exact", "randomized"])
def test_weights_are_fitted_as_if_the_centred_rows_had_been_multiplied_by_them(
    pca_rows: int | None, group_features: int
) -> None:
    rows = rows_of(Side.K)
    found = fitted(statistics_of(rows, pca_rows), weights=WEIGHTS, group_features=group_features)
    # A reservoir keeps bf16 rows, and the weights come after that rounding.
    kept = (rows if pca_rows is None else rows.bfloat16().float())[200:]
    centred = weighted(kept.double() - kept.double().mean(dim=0))
    parts = centred.split(group_features or NUM_FEATURES, dim=1)
    energy = torch.cat([torch.linalg.svdvals(part) for part in parts]).square().sort(descending=True).values / len(
        centred
    )
    # fp32 sums of products of fp32 rows, whose squares are the variances.
    resolution = NUM_FEATURES * torch.finfo(torch.float32).eps * float(energy[0])
    np.testing.assert_allclose(found.variances, energy.numpy(), rtol=0, atol=resolution)
    assert found.total_variance == pytest.approx(float(energy.sum()), abs=resolution * NUM_FEATURES**0.5)
    sample = weighted(rows[:200] - torch.from_numpy(found.mean))
    assert found.sample_variance == pytest.approx(float(sample.square().sum(dim=1).mean()), rel=NUM_FEATURES * 2**-24)
    # All components are there, and a basis in fp16 keeps norms to half a unit in the last place.
    inside = np.square(found.coefficients, dtype=np.float64).sum(axis=1).mean()
    assert inside == pytest.approx(found.sample_variance, rel=2**-10)


def best_plan(fit: SideFit, budget: int) -> SidePlan:
    table = error_table(fit.coefficients)
    return side_plan(table, allocate(table, budget), fit.sample_variance)


def lost(rows: torch.Tensor, basis: SideBasis, fit: SideFit, budget: int) -> torch.Tensor:
    """Mean squared error of each feature when the kept components are not quantised."""
    transform = SideTransform(basis, best_plan(fit, budget), GEOMETRY.num_layers, torch.float32)
    features = transform.empty_features(len(rows))
    transform.centre(range(4), rows.view(len(rows), 4, 2, 16).transpose(0, 1).clone(), features)
    coefficients = transform.empty_coefficients(len(rows))
    coefficients[: transform.num_components] = transform.project(features)
    return (transform.reconstruct(coefficients.T.contiguous(), range(4)).flatten(1) - rows).square().mean(dim=0)


def test_layers_of_larger_weight_lose_less_and_decoding_undoes_the_weights() -> None:
    rows = rows_of(Side.K)
    statistics = statistics_of(rows)
    # The first two layers matter more than the other two.
    factor = np.array([8, 8, 1, 1], np.float32)[:, None, None, None]
    weights = factor * np.broadcast_to(np.eye(16, dtype=np.float32), (4, 2, 16, 16))
    budget = 4 * NUM_FEATURES
    errors = []
    for fit in (fitted(statistics), fitted(statistics, weights=weights)):
        basis = fit.side_basis([best_plan(fit, budget)])
        errors.append(lost(rows[:200], basis, fit, budget).view(2, -1).sum(dim=1))
    plain, under = errors
    assert under[0] < plain[0]
    assert under[1] > plain[1]
    # In the metric of the weights the fit under them is the better one.
    assert 64 * under[0] + under[1] < 64 * plain[0] + plain[1]


@pytest.mark.parametrize("pca_rows", [None, 700], ids=["exact", "randomized"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_groups_of_layers_have_bases_of_their_own_in_one_of_the_same_shape(layers: int, pca_rows: int | None) -> None:
    statistics = statistics_of(rows_of(Side.K), pca_rows)
    per_layer = NUM_FEATURES // GEOMETRY.num_layers
    found = fitted(statistics, group_features=layers * per_layer)
    plain = fitted(statistics)
    assert found.basis.shape == plain.basis.shape
    product = found.basis.astype(np.float64).T @ found.basis
    # Two columns of fp16 entries, each off by half a unit in the last place.
    np.testing.assert_allclose(product, np.eye(NUM_FEATURES), atol=2**-10, rtol=0)
    group_of_row = np.arange(NUM_FEATURES) // (layers * per_layer)
    for column in found.basis.T:
        assert len(set(group_of_row[column != 0])) == 1
    assert (np.diff(found.variances) <= 0).all()
    # Fewer layers share less: the first components hold less of the variance (KVTC appendix B.10).
    assert found.variances[:20].sum() < plain.variances[:20].sum()
    budget = 2 * NUM_FEATURES
    assert best_plan(found, budget).predicted_error > best_plan(plain, budget).predicted_error


@pytest.mark.parametrize("pca_rows", [None, 700], ids=["exact", "randomized"])
def test_one_group_of_all_layers_is_the_plain_pca(pca_rows: int | None) -> None:
    statistics = statistics_of(rows_of(Side.K), pca_rows)
    assert_equal(fitted(statistics, group_features=NUM_FEATURES), fitted(statistics))


def test_the_rank_caps_all_groups_together() -> None:
    found = fitted(statistics_of(rows_of(Side.K)), group_features=NUM_FEATURES // 4, rank=10)
    assert found.basis.shape == (NUM_FEATURES, 10)
    assert len(found.variances) == 10


def test_a_basis_ends_at_the_last_component_that_a_plan_codes() -> None:
    fit = fitted(statistics_of(rows_of(Side.K)))
    plans = [SidePlan((Group(0, 16, 3),), 0.1), SidePlan((Group(2, 16, 2), Group(20, 1, 4)), 0.1)]
    basis = fit.side_basis(plans)
    np.testing.assert_array_equal(basis.basis, fit.basis[:, :21])
    np.testing.assert_array_equal(basis.variances, fit.variances[:21])
    assert fit.side_basis([SidePlan((), 1.0)]).basis.shape == (NUM_FEATURES, 1)
