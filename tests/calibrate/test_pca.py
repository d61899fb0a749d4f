"""Exact and randomized principal components against a plain fp64 SVD of the centred rows."""

import pytest
import torch

from sglang_kvtc.calibrate.pca import ITERATIONS, PrincipalComponents, block_diagonal, exact_pca, randomized_pca

NUM_ROWS, NUM_FEATURES = 600, 96


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    """Rows with a falling spectrum, as KV has, and a mean that is large beside it."""
    generator = torch.Generator().manual_seed(0)
    spectrum = torch.arange(1, NUM_FEATURES + 1) ** -1.0
    mixing = torch.linalg.qr(torch.randn(NUM_FEATURES, NUM_FEATURES, generator=generator)).Q
    return torch.randn(NUM_ROWS, NUM_FEATURES, generator=generator) * spectrum @ mixing + 5.0


def exact(rows: torch.Tensor, rank: int = NUM_FEATURES) -> PrincipalComponents:
    mean = rows.double().mean(dim=0)
    centred = rows.double() - mean
    return exact_pca(mean, (centred.T @ centred / len(rows)).float(), rank)


def lost_variance(rows: torch.Tensor, found: PrincipalComponents) -> float:
    """Share of the variance that projecting on the basis and back loses."""
    centred = rows.double() - found.mean
    basis = found.basis.double()
    return float((centred - centred @ basis @ basis.T).square().sum() / centred.square().sum())


def least_lost_variance(rows: torch.Tensor, rank: int) -> float:
    """What the best basis of this rank loses (Eckart and Young)."""
    energy = torch.linalg.svdvals(rows.double() - rows.double().mean(dim=0)).square()
    return float(energy[rank:].sum() / energy.sum())


def excess(rank: int) -> float:
    """How many times the least loss a randomized basis may lose (Halko et al. 2011, section 10.4).

    With q iterations the excess factor of the error norm is the (2q+1)-th root of at most 1 + sqrt(rank) +
    sqrt(features), squared here because variances are squared norms.
    """
    return (1 + rank**0.5 + NUM_FEATURES**0.5) ** (2 / (2 * ITERATIONS + 1))


def test_exact_components_have_the_variances_of_the_svd(rows: torch.Tensor) -> None:
    singular = torch.linalg.svdvals(rows.double() - rows.double().mean(dim=0))
    found = exact(rows)
    expected = singular.square() / NUM_ROWS
    resolution = torch.finfo(torch.float32).eps * NUM_FEATURES * expected[0]
    torch.testing.assert_close(found.variances, expected, atol=float(resolution), rtol=0)
    assert found.total_variance == pytest.approx(float(expected.sum()))


@pytest.mark.parametrize("rank", [1, 8, 32, NUM_FEATURES])
def test_exact_basis_is_orthonormal_and_loses_least(rows: torch.Tensor, rank: int) -> None:
    found = exact(rows, rank)
    resolution = torch.finfo(torch.float32).eps * NUM_FEATURES
    torch.testing.assert_close(found.basis.T @ found.basis, torch.eye(rank), atol=resolution, rtol=0)
    assert lost_variance(rows, found) <= least_lost_variance(rows, rank) + resolution


@pytest.mark.parametrize("rank", [1, 8, 32])
def test_randomized_basis_loses_hardly_more_than_the_best(rows: torch.Tensor, rank: int) -> None:
    found = randomized_pca(rows, rank, seed=0, device=torch.device("cpu"))
    best = least_lost_variance(rows, rank)
    assert best <= lost_variance(rows, found) <= best * excess(rank)
    assert found.total_variance == pytest.approx(exact(rows).total_variance)
    assert bool((found.variances.diff() <= 0).all())


def test_randomized_pca_reads_half_precision_rows_and_never_exceeds_their_rank(rows: torch.Tensor) -> None:
    few = rows[:10].bfloat16()
    found = randomized_pca(few, 50, seed=0, device=torch.device("cpu"))
    assert found.basis.shape == (NUM_FEATURES, 9)
    assert lost_variance(few, found) < torch.finfo(torch.float32).eps


def test_signs_are_fixed_and_seeds_reproduce(rows: torch.Tensor) -> None:
    first, second = (randomized_pca(rows, 8, seed=3, device=torch.device("cpu")) for _ in range(2))
    assert torch.equal(first.basis, second.basis)
    for found in (first, exact(rows)):
        largest = found.basis.gather(0, found.basis.abs().argmax(dim=0, keepdim=True))
        assert bool((largest > 0).all())


def test_the_randomized_pca_iterates_as_often_as_the_paper() -> None:
    assert ITERATIONS == 8


@pytest.fixture(scope="module")
def weights() -> torch.Tensor:
    """Symmetric, positive definite matrices of 3 layers with 2 heads of 16 channels."""
    generator = torch.Generator().manual_seed(7)
    axes = torch.linalg.qr(torch.randn(3, 2, 16, 16, generator=generator)).Q
    return axes @ torch.diag(torch.logspace(-1, 1, 16)) @ axes.mT


@pytest.mark.parametrize("rank", [8, NUM_FEATURES])
def test_weights_give_the_components_of_weighted_rows(rows: torch.Tensor, weights: torch.Tensor, rank: int) -> None:
    centred = rows.double() - rows.double().mean(dim=0)
    weighted = (centred.view(-1, 6, 1, 16) @ weights.double().flatten(0, 1)).flatten(1)
    energy = torch.linalg.svdvals(weighted).square() / NUM_ROWS
    covariance = (centred.T @ centred / NUM_ROWS).float()
    for found in (
        exact_pca(centred.mean(dim=0), covariance, rank, weights),
        randomized_pca(rows, rank, seed=0, device=torch.device("cpu"), weights=weights),
    ):
        # fp32 products of rows with weights, whose squares are the variances.
        resolution = torch.finfo(torch.float32).eps * NUM_FEATURES * float(energy[0])
        assert found.total_variance == pytest.approx(float(energy.sum()), abs=resolution * NUM_FEATURES)
        lost = weighted - weighted @ found.basis.double() @ found.basis.double().T
        best = float(energy[rank:].sum())
        assert best - resolution <= float(lost.square().sum()) / NUM_ROWS <= best * excess(rank) + resolution
    torch.testing.assert_close(found.mean, rows.double().mean(dim=0))


@pytest.mark.parametrize("sizes", [(32, 32, 32), (64, 32), (NUM_FEATURES,)], ids=str)
@pytest.mark.parametrize("rank", [1, 20, NUM_FEATURES])
def test_components_of_groups_merge_into_one_orthonormal_basis(
    rows: torch.Tensor, sizes: tuple[int, ...], rank: int
) -> None:
    parts = rows.split(sizes, dim=1)
    found = block_diagonal([exact(part, rank) for part in parts], rank)
    assert found.basis.shape == (NUM_FEATURES, rank)
    resolution = torch.finfo(torch.float32).eps * NUM_FEATURES
    torch.testing.assert_close(found.basis.T @ found.basis, torch.eye(rank), atol=resolution, rtol=0)
    assert bool((found.variances.diff() <= 0).all())
    assert found.total_variance == pytest.approx(exact(rows).total_variance)
    # No column reaches into two groups, and the variance of each is the one that it says.
    reached = [part.abs().amax(dim=0) > 0 for part in found.basis.split(sizes)]
    assert bool((torch.stack(reached).sum(dim=0) == 1).all())
    coefficients = (rows.double() - found.mean) @ found.basis.double()
    scale = torch.finfo(torch.float32).eps * NUM_FEATURES * float(found.variances[0])
    torch.testing.assert_close(coefficients.square().mean(dim=0), found.variances, atol=scale, rtol=0)
    # The kept ones are the largest of all groups.
    everything = torch.cat([exact(part).variances for part in parts]).sort(descending=True).values
    torch.testing.assert_close(found.variances, everything[:rank], atol=scale, rtol=0)


def test_one_group_of_all_features_is_the_plain_pca(rows: torch.Tensor) -> None:
    plain, merged = exact(rows, 20), block_diagonal([exact(rows, 20)], 20)
    assert torch.equal(merged.basis, plain.basis)
    assert torch.equal(merged.variances, plain.variances)
    assert torch.equal(merged.mean, plain.mean)
