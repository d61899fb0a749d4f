"""Principal components of calibration rows: exact from a covariance, or randomized from a sample of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ITERATIONS = 8
"""Power iterations of the randomized PCA (KVTC appendix B.1)."""
_BLOCK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class PrincipalComponents:
    """mean: f64[p]. basis: f32[p, r], orthonormal columns by falling variance. variances: f64[r]. All on the CPU.

    total_variance: mean squared norm of a centred row, which the variances of all p components add up to.
    """

    mean: torch.Tensor
    basis: torch.Tensor
    variances: torch.Tensor
    total_variance: float


def exact_pca(mean: torch.Tensor, covariance: torch.Tensor, rank: int) -> PrincipalComponents:
    """The first `rank` components of a covariance matrix.

    mean: f64[p]. covariance: f64[p, p], on any device. The eigendecomposition runs in fp32, twice as fast as fp64 and
    still a thousand times finer than the fp16 in which a basis is stored.
    """
    _, vectors = torch.linalg.eigh(covariance.float())
    basis = _fix_signs(vectors.flip(1)[:, :rank].contiguous())
    # Rayleigh quotients: the variance a stored direction really has, whatever rounding did to the eigenvalue.
    variances = ((covariance.float() @ basis) * basis).sum(dim=0, dtype=torch.float64).clamp(min=0)
    return PrincipalComponents(mean.cpu(), basis.cpu(), variances.cpu(), float(covariance.trace()))


def randomized_pca(
    rows: torch.Tensor,
    rank: int,
    *,
    seed: int,
    device: torch.device,
    iterations: int = ITERATIONS,
    on_iteration: Callable[[int], object] = lambda count: None,
) -> PrincipalComponents:
    """The first `rank` components of `rows` by randomized subspace iteration (Halko et al. 2011, algorithm 4.4).

    rows: float[n, p], in any dtype and on the CPU; blocks of them are moved to `device`, so that device memory holds
    two p x rank matrices and no copy of the rows. Cost is 4 n p rank FLOP per iteration.
    """
    num_rows, num_features = rows.shape
    rank = min(rank, num_features, num_rows - 1)
    oversampled = min(rank + max(rank // 10, 10), num_features, num_rows)
    blocks = rows.split(_BLOCK_ROWS)
    mean = sum((block.sum(dim=0, dtype=torch.float64) for block in blocks), torch.zeros(())) / num_rows
    offset = mean.float().to(device)
    total_variance = sum(float((block.double() - mean).square().sum()) for block in blocks) / num_rows

    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(num_features, oversampled, generator=generator).to(device)
    for _ in range(iterations):
        basis = torch.linalg.qr(basis).Q
        image = torch.zeros_like(basis)
        for block in blocks:
            centred = block.to(device).float() - offset
            image.addmm_(centred.T, centred @ basis)
        basis = image
        on_iteration(1)
    basis = torch.linalg.qr(basis).Q
    # Rotate inside the subspace so that its columns are the principal directions of the projected rows.
    gram = torch.zeros(oversampled, oversampled, device=device, dtype=torch.float64)
    for block in blocks:
        coefficients = (block.to(device).float() - offset) @ basis
        gram += coefficients.T @ coefficients
    variances, vectors = torch.linalg.eigh(gram / num_rows)
    basis = basis @ vectors.flip(1)[:, :rank].float()
    variances = variances.flip(0)[:rank].clamp(min=0)
    return PrincipalComponents(mean, _fix_signs(basis).cpu(), variances.cpu(), total_variance)


def _fix_signs(basis: torch.Tensor) -> torch.Tensor:
    """Make the largest entry of every column positive: eigenvectors are unique up to their sign."""
    largest = basis.gather(0, basis.abs().argmax(dim=0, keepdim=True))
    return basis * torch.where(largest < 0, -1.0, 1.0)
