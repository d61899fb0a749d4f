"""Principal components of calibration rows: exact from a covariance, or randomized from a sample of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_kvtc.codec.transform import weigh

ITERATIONS = 8
"""Power iterations of the randomized PCA (KVTC appendix B.1)."""
BLOCK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class PrincipalComponents:
    """mean: f64[p]. basis: f32[p, r], orthonormal columns by falling variance. variances: f64[r]. All on the CPU.

    total_variance: mean squared norm of a centred row, which the variances of all p components add up to. With weights,
    components and variances are those of weighted rows, and the mean is that of rows without them.
    """

    mean: torch.Tensor
    basis: torch.Tensor
    variances: torch.Tensor
    total_variance: float


def exact_pca(
    mean: torch.Tensor, covariance: torch.Tensor, rank: int, weights: torch.Tensor | None = None
) -> PrincipalComponents:
    """The first `rank` components of a covariance matrix.

    mean: f64[p]. covariance: f32[p, p], on any device. weights: as `codec.transform.weigh` takes them, on the CPU. The
    eigendecomposition runs in fp32, twice as fast as fp64 and still a thousand times finer than the fp16 in which a
    basis is stored.
    """
    if weights is not None:
        blocks = weights.to(covariance)
        covariance = weigh(weigh(covariance, blocks).T, blocks)
    _, vectors = torch.linalg.eigh(covariance)
    basis = _fix_signs(vectors.flip(1)[:, :rank].contiguous())
    # Rayleigh quotients: the variance a stored direction really has, whatever rounding did to the eigenvalue.
    variances = ((covariance @ basis) * basis).sum(dim=0, dtype=torch.float64).clamp(min=0)
    total_variance = float(covariance.diagonal().sum(dtype=torch.float64))
    return PrincipalComponents(mean.cpu(), basis.cpu(), variances.cpu(), total_variance)


def randomized_pca(
    rows: torch.Tensor,
    rank: int,
    *,
    seed: int,
    device: torch.device,
    weights: torch.Tensor | None = None,
    iterations: int = ITERATIONS,
    on_iteration: Callable[[int], object] = lambda count: None,
) -> PrincipalComponents:
    """The first `rank` components of `rows` by randomized subspace iteration (Halko et al. 2011, algorithm 4.4).

    rows: float[n, p], in any dtype and on the CPU; blocks of them are moved to `device`, so that device memory holds
    two p x rank matrices and no copy of the rows. weights: as `codec.transform.weigh` takes them, on the CPU. Cost is
    4 n p rank FLOP per iteration.
    """
    num_rows, num_features = rows.shape
    rank = min(rank, num_features, num_rows - 1)
    oversampled = oversampled_rank(rank, num_features, num_rows)
    blocks_of_weights = None if weights is None else weights.to(device)
    blocks = rows.split(BLOCK_ROWS)
    mean = sum((block.sum(dim=0, dtype=torch.float64) for block in blocks), torch.zeros(())) / num_rows
    offset = mean.float().to(device)

    def centred(block: torch.Tensor) -> torch.Tensor:
        rows = block.to(device).float() - offset
        return rows if blocks_of_weights is None else weigh(rows, blocks_of_weights)

    total_variance = sum(float(centred(block).square().sum(dtype=torch.float64)) for block in blocks) / num_rows

    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(num_features, oversampled, generator=generator).to(device)
    for _ in range(iterations):
        basis = torch.linalg.qr(basis).Q
        image = torch.zeros_like(basis)
        for block in blocks:
            rows_of_block = centred(block)
            image.addmm_(rows_of_block.T, rows_of_block @ basis)
        basis = image
        on_iteration(1)
    basis = torch.linalg.qr(basis).Q
    # Rotate inside the subspace so that its columns are the principal directions of the projected rows.
    gram = torch.zeros(oversampled, oversampled, device=device, dtype=torch.float64)
    for block in blocks:
        coefficients = centred(block) @ basis
        gram += coefficients.T @ coefficients
    variances, vectors = torch.linalg.eigh(gram / num_rows)
    basis = basis @ vectors.flip(1)[:, :rank].float()
    variances = variances.flip(0)[:rank].clamp(min=0)
    return PrincipalComponents(mean, _fix_signs(basis).cpu(), variances.cpu(), total_variance)


def oversampled_rank(rank: int, num_features: int, num_rows: int) -> int:
    """Columns that a randomized PCA iterates on to find `rank` components."""
    return min(rank + max(rank // 10, 10), num_features, num_rows)


def block_diagonal(groups: Sequence[PrincipalComponents], rank: int) -> PrincipalComponents:
    """One basis out of those of feature groups that follow each other: the `rank` components of largest variance.

    A component is zero outside of its own group, so the columns stay orthonormal (KVTC appendix B.10).
    """
    variances = torch.cat([group.variances for group in groups])
    order = variances.argsort(descending=True, stable=True)[:rank]
    column_of = torch.full(variances.shape, -1)
    column_of[order] = torch.arange(len(order))
    basis = torch.zeros(sum(len(group.mean) for group in groups), len(order))
    row, component = 0, 0
    for group in groups:
        num_rows, num_components = group.basis.shape
        columns = column_of[component : component + num_components]
        basis[row : row + num_rows, columns[columns >= 0]] = group.basis[:, columns >= 0]
        row, component = row + num_rows, component + num_components
    return PrincipalComponents(
        torch.cat([group.mean for group in groups]),
        basis,
        variances[order],
        sum(group.total_variance for group in groups),
    )


def _fix_signs(basis: torch.Tensor) -> torch.Tensor:
    """Make the largest entry of every column positive: eigenvectors are unique up to their sign."""
    largest = basis.gather(0, basis.abs().argmax(dim=0, keepdim=True))
    return basis * torch.where(largest < 0, -1.0, 1.0)
