"""Streaming statistics: what they hold, scaled, merged, and taken up again where they were left."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_kvtc.calibrate.statistics import Covariance, Reservoir, SideStatistics
from sglang_kvtc.errors import ConfigError

CPU = torch.device("cpu")


def random_rows(count: int, num_features: int, offset: float = 0.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, num_features, generator=torch.Generator().manual_seed(seed)) + offset


def covariance_of(*parts: torch.Tensor) -> Covariance:
    moments = Covariance(parts[0].shape[1], CPU)
    for part in parts:
        moments.add(part)
    return moments


def expected_moments(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = rows.double().mean(dim=0)
    centred = rows.double() - mean
    return mean, centred.T @ centred / len(rows)


def assert_moments(found: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> None:
    """Every product of two fp32 deviations is rounded, and the sums of a block, and the result."""
    mean, covariance = expected_moments(rows)
    eps = torch.finfo(torch.float32).eps
    resolution = eps * 2048**0.5 * max(float(covariance.diagonal().max()), 1.0)
    torch.testing.assert_close(found[0], mean, atol=eps * max(float(rows.abs().max()), 1.0), rtol=0)
    torch.testing.assert_close(found[1].double(), covariance, atol=resolution, rtol=0)


@pytest.mark.parametrize("sizes", [[1], [5, 2043, 7], [2048], [5000], [300] * 20], ids=str)
def test_covariance_in_blocks_equals_the_covariance_of_all_rows(sizes: list[int]) -> None:
    # An offset a thousand times the spread, which a plain sum of squares in fp32 would drown in.
    rows = random_rows(sum(sizes), 24, offset=1000)
    assert_moments(covariance_of(*rows.split(sizes)).moments(), rows)


def test_covariance_of_many_features_is_whole_on_both_sides_of_the_diagonal() -> None:
    rows = random_rows(300, 1700)
    assert_moments(covariance_of(rows).moments(), rows)


def test_moments_can_be_asked_for_again_and_rows_added_after_it() -> None:
    rows = random_rows(500, 8, offset=3)
    moments = covariance_of(rows[:300])
    first = moments.moments()
    assert all(torch.equal(ours, again) for ours, again in zip(first, moments.moments(), strict=True))
    moments.add(rows[300:])
    assert moments.num_rows == 500
    assert_moments(moments.moments(), rows)


def test_covariance_of_nothing_asks_for_more_tokens() -> None:
    with pytest.raises(ConfigError, match="--tokens"):
        Covariance(4, CPU).moments()


@pytest.mark.parametrize("sizes", [(100, 5000), (5000, 100), (0, 40), (40, 0), (2048, 2048)])
def test_merged_covariances_are_those_of_all_rows(sizes: tuple[int, int]) -> None:
    # Two texts of different means: the blocks were shifted by different vectors.
    rows = torch.cat([random_rows(sizes[0], 1050, offset=10, seed=1), random_rows(sizes[1], 1050, offset=-5, seed=2)])
    first, second = (covariance_of(part) for part in rows.split(sizes))
    first.merge(second)
    assert first.num_rows == sum(sizes)
    assert_moments(first.moments(), rows)


def held_bytes(part: object) -> int:
    return sum(
        value.nbytes for name, value in vars(part).items() if isinstance(value, torch.Tensor) and name != "_shift"
    )


def test_covariance_memory_does_not_grow_with_the_rows_and_is_what_was_planned() -> None:
    moments = Covariance(16, CPU)
    for count in (4096, 40960):
        moments.add(torch.zeros(count, 16))
        assert held_bytes(moments) == Covariance.planned_bytes(16)


@pytest.mark.parametrize("pca_rows", [None, 50])
def test_planned_bytes_are_those_of_the_tensors(pca_rows: int | None) -> None:
    statistics = SideStatistics.empty(32, pca_rows, seed=0, device=CPU)
    found = held_bytes(statistics.moments) + held_bytes(statistics.allocation)
    assert found == SideStatistics.planned_bytes(32, pca_rows)


def test_reservoir_keeps_all_rows_until_it_is_full() -> None:
    reservoir = Reservoir(10, 1, torch.float32, seed=0)
    reservoir.add(torch.arange(4.0)[:, None])
    reservoir.add(torch.arange(4.0, 8.0)[:, None])
    assert reservoir.rows.flatten().tolist() == list(range(8))


def sample_of(numbers: torch.Tensor, capacity: int, seed: int, part: int = 33) -> Reservoir:
    reservoir = Reservoir(capacity, 1, torch.float32, seed)
    for rows in numbers[:, None].split(part):
        reservoir.add(rows)
    return reservoir


def assert_uniform(counts: np.ndarray, trials: int, share: float) -> None:
    """Each count is binomial; six standard deviations hold for 200 of them at once."""
    deviation = (trials * share * (1 - share)) ** 0.5
    assert np.abs(counts - trials * share).max() < 6 * deviation


def test_reservoir_samples_all_rows_alike() -> None:
    counts = np.zeros(200)
    trials = 2000
    for seed in range(trials):
        kept = sample_of(torch.arange(200.0), 20, seed).rows.flatten().long().numpy()
        assert len(set(kept.tolist())) == 20
        counts[kept] += 1
    assert_uniform(counts, trials, 0.1)


@pytest.mark.parametrize(("first", "capacities"), [(150, (20, 20)), (12, (20, 20)), (190, (20, 20)), (60, (20, 10))])
def test_merged_reservoirs_sample_the_rows_of_both_alike(first: int, capacities: tuple[int, int]) -> None:
    counts = np.zeros(200)
    trials = 400
    size = min(capacities)
    for seed in range(trials):
        reservoir = sample_of(torch.arange(float(first)), capacities[0], seed)
        reservoir.merge(sample_of(torch.arange(float(first), 200.0), capacities[1], trials + seed))
        kept = reservoir.rows.flatten().long().numpy()
        assert len(set(kept.tolist())) == size
        counts[kept] += 1
    assert_uniform(counts, trials, size / 200)


def test_reservoirs_that_kept_everything_merge_to_everything() -> None:
    merged = Reservoir(30, 1, torch.float32, seed=0)
    for numbers in (torch.arange(12.0), torch.arange(12.0, 30.0)):
        merged.merge(sample_of(numbers, 20, seed=0))
    assert merged.rows.flatten().tolist() == list(range(30))
    assert merged.num_rows == 30


@pytest.mark.parametrize("pca_rows", [None, 70])
@pytest.mark.parametrize("stop", [0, 30, 2048, 3000])
def test_statistics_taken_up_again_are_the_same_to_the_bit(pca_rows: int | None, stop: int) -> None:
    rows = random_rows(5000, 12, offset=4)

    def add(statistics: SideStatistics, part: torch.Tensor) -> None:
        for piece in part.split(250):
            statistics.moments.add(piece)
            statistics.allocation.add(piece[:3])

    whole, before, after = (SideStatistics.empty(12, pca_rows, seed=5, device=CPU) for _ in range(3))
    add(whole, rows[:stop])
    add(whole, rows[stop:])
    add(before, rows[:stop])
    after.restore({name: tensor.clone() for name, tensor in before.tensors().items()})
    add(after, rows[stop:])
    expected, found = whole.tensors(), after.tensors()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_statistics_of_an_exact_and_a_randomized_pca_do_not_merge() -> None:
    exact, randomized = (SideStatistics.empty(4, pca_rows, seed=0, device=CPU) for pca_rows in (None, 5))
    with pytest.raises(ConfigError, match="cannot be merged"):
        exact.merge(randomized)
