from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
import torch
from eviction.plain_selection import plain_keep_mask, plain_mass_pairs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.eviction.budget import Budget, Scope
from sglang_kvtc.eviction.select import keep_mask, kept_counts, mass_pairs

INFINITY = float("inf")
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 24), st.integers(1, 4))
POOLS = (
    (0.0, 0.25, 0.5, 1.0),
    (0.5,),
    (-INFINITY, -1e-45, -0.0, 0.0, 1e-45, INFINITY),
    (0.1, float("nan"), 0.9),
)


def distinct_scores(*shape: int, seed: int = 0) -> torch.Tensor:
    """No two alike: a permutation of an even grid in (0, 1)."""
    count = torch.Size(shape).numel()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return ((order + 0.5) / count).float().view(shape)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores f32[L, n, H], mostly with many ties, and the pairs that exist."""
    shape = draw(SHAPES)
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    pool = draw(st.sampled_from((None, *POOLS)))
    if pool is None:
        scores = torch.rand(shape, generator=rng)
    else:
        scores = torch.tensor(pool)[torch.randint(len(pool), shape, generator=rng)]
    share_alive = draw(st.sampled_from([None, 0.0, 0.3, 0.9]))
    return scores, None if share_alive is None else torch.rand(shape, generator=rng) < share_alive


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    size: dict[str, Any] = draw(
        st.one_of(
            st.builds(lambda value: {"keep_fraction": value}, st.sampled_from([0.01, 0.2, 0.29, 0.3, 0.5, 0.7, 1.0])),
            st.builds(lambda value: {"keep_tokens": value}, st.integers(1, 30)),
            st.builds(
                lambda mass, least, most: {"keep_mass": mass, "least_fraction": least, "most_fraction": most},
                st.sampled_from([0.1, 0.5, 0.9, 1.0]),
                st.sampled_from([0.05, 0.3]),
                st.sampled_from([0.3, 0.8, 1.0]),
            ),
        )
    )
    return Budget(
        **size,
        scope=draw(st.sampled_from(list(Scope))),
        sink_tokens=draw(st.integers(0, 3)),
        window_tokens=draw(st.integers(0, 5)),
        min_tokens=draw(st.integers(0, 6)),
        safeguard=draw(st.sampled_from(["auto", 0.0, 0.35, 1.0])),
        allow_extreme=True,
    )


def in_units(counts: torch.Tensor, scope: Scope) -> list[int]:
    """Sums over the units of the scope of counts i64[L, H]."""
    sums = {Scope.GLOBAL: counts.sum().view(1), Scope.LAYER: counts.sum(dim=1), Scope.HEAD: counts.flatten()}
    return sums[scope].tolist()


@settings(max_examples=500)
@given(cases(), budgets())
@example((torch.full((2, 5, 2), 0.5), None), Budget(keep_fraction=0.55, sink_tokens=0, window_tokens=0, min_tokens=0))
@example((distinct_scores(2, 20, 3), None), Budget(keep_fraction=0.44, safeguard=1.0, window_tokens=0, min_tokens=0))
def test_the_mask_is_that_of_plain_sorting(case: tuple[torch.Tensor, torch.Tensor | None], budget: Budget) -> None:
    scores, alive = case
    scores_before, alive_before = scores.clone(), None if alive is None else alive.clone()
    mask = keep_mask(scores, budget, alive)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, plain_keep_mask(scores, budget, alive))
    assert torch.equal(scores.view(torch.int32), scores_before.view(torch.int32))
    assert alive is None or alive_before is None or torch.equal(alive, alive_before)


@given(cases(), budgets())
def test_the_count_is_the_one_told_beforehand(case: tuple[torch.Tensor, torch.Tensor | None], budget: Budget) -> None:
    scores = case[0].nan_to_num(0.5)
    kept = int(keep_mask(scores, budget).sum())
    if budget.keep_mass is None:
        assert kept == budget.target_pairs(*scores.shape)
    else:
        assert kept <= budget.target_pairs(*scores.shape)


@given(cases(), budgets())
def test_protected_and_unknown_pairs_stay_and_absent_ones_do_not_return(
    case: tuple[torch.Tensor, torch.Tensor | None], budget: Budget
) -> None:
    scores, alive = case
    exists = torch.ones(scores.shape, dtype=torch.bool) if alive is None else alive
    mask = keep_mask(scores, budget, alive)
    assert not (mask & ~exists).any()
    forced = scores.isnan()
    forced[:, : budget.sink_tokens] = True
    assert isinstance(budget.window_tokens, int)
    forced[:, max(0, scores.shape[1] - budget.window_tokens) :] = True
    assert mask[forced & exists].all()
    assert (kept_counts(mask) >= kept_counts(exists).clamp(max=budget.min_tokens)).all()
    # No pair that could have stayed was dropped: every unit is full or has all of its pairs.
    if budget.keep_tokens is not None:
        heads = {Scope.GLOBAL: scores.shape[0] * scores.shape[2], Scope.LAYER: scores.shape[2], Scope.HEAD: 1}
        places = budget.keep_tokens * heads[budget.scope]
        units = zip(in_units(kept_counts(mask), budget.scope), in_units(kept_counts(exists), budget.scope), strict=True)
        assert all(kept >= min(places, there) for kept, there in units)


@given(
    cases(), budgets(), st.sampled_from([(0.2, 0.21), (0.3, 0.5), (0.45, 1.0)]), st.tuples(*[st.integers(1, 25)] * 2)
)
def test_a_smaller_budget_keeps_a_subset(
    case: tuple[torch.Tensor, torch.Tensor | None],
    budget: Budget,
    fractions: tuple[float, float],
    tokens: tuple[int, int],
) -> None:
    scores, alive = case
    for field, values in (("keep_fraction", fractions), ("keep_tokens", sorted(tokens))):
        sizes = dict.fromkeys(("keep_fraction", "keep_tokens", "keep_mass"))
        small, large = (
            keep_mask(scores, msgspec.structs.replace(budget, **{**sizes, field: value}), alive) for value in values
        )
        assert not (small & ~large).any()


@given(cases(), budgets())
def test_evicting_again_changes_nothing(case: tuple[torch.Tensor, torch.Tensor | None], budget: Budget) -> None:
    scores, alive = case
    once = keep_mask(scores, budget, alive)
    assert torch.equal(keep_mask(scores, budget, once), once)


@pytest.mark.parametrize("scope", list(Scope))
def test_heads_are_treated_alike(scope: Scope) -> None:
    scores = distinct_scores(3, 60, 4)
    budget = Budget(keep_fraction=0.3, scope=scope, window_tokens=5, min_tokens=7, safeguard=0.0)
    permutation = torch.tensor([2, 0, 3, 1])
    mask = keep_mask(scores, budget)
    assert torch.equal(keep_mask(scores[:, :, permutation], budget), mask[:, :, permutation])
    assert torch.equal(keep_mask(scores[[2, 0, 1]], budget), mask[[2, 0, 1]])


@pytest.mark.parametrize("scope", list(Scope))
def test_only_the_order_of_the_scores_counts(scope: Scope) -> None:
    scores = distinct_scores(2, 50, 3)
    budget = Budget(keep_fraction=0.4, scope=scope, window_tokens=6)
    expected = keep_mask(scores, budget)
    for changed in (scores * 1e-30, scores - 5, scores.double().log().float()):
        assert torch.equal(keep_mask(changed, budget), expected)


def test_among_equals_later_tokens_then_lower_layers_then_lower_heads_win() -> None:
    scores = torch.full((2, 6, 3), 0.25)
    bare: dict[str, Any] = {"sink_tokens": 0, "window_tokens": 0, "min_tokens": 0}
    mask = keep_mask(scores, Budget(keep_fraction=0.45, **bare))
    # 0.45 x 36 pairs = 16: the last two tokens whole, of the one before all of layer 0 and one head of layer 1.
    assert mask[:, 4:].all()
    assert mask[:, 3].tolist() == [[True, True, True], [True, False, False]]
    assert not mask[:, :3].any()
    # 0.25 x 36 pairs = 9: the last token whole, then three pairs of the one before.
    fewer = keep_mask(scores, Budget(keep_fraction=0.25, **bare))
    assert fewer[:, 4:].tolist() == [[[True] * 3, [True] * 3], [[False] * 3, [True] * 3]]
    assert int(fewer.sum()) == 9
    by_layer = keep_mask(scores, Budget(keep_fraction=0.45, scope=Scope.LAYER, safeguard=0.0, **bare))
    assert by_layer[:, 3:].sum(dim=(1, 2)).tolist() == [8, 8]
    assert by_layer[:, 3].tolist() == [[True, True, False]] * 2
    by_head = keep_mask(scores, Budget(keep_fraction=0.45, scope=Scope.HEAD, **bare))
    assert by_head.tolist() == [[[token >= 4] * 3 for token in range(6)]] * 2


@pytest.mark.parametrize("scope", list(Scope))
def test_both_zeros_are_one_score(scope: Scope) -> None:
    scores = torch.tensor([0.0, -0.0, 0.0, -0.0, -1e-45, -INFINITY]).view(1, 6, 1)
    budget = Budget(keep_tokens=2, scope=scope, sink_tokens=0, window_tokens=0, min_tokens=0)
    assert keep_mask(scores, budget).flatten().tolist() == [False, False, True, True, False, False]


def test_b_ev_06_heads_keep_different_tokens() -> None:
    num_tokens = 64
    tokens = torch.arange(num_tokens)
    liked = torch.stack([tokens % 4 == head for head in range(4)], dim=1).expand(2, -1, -1)
    scores = torch.where(liked, 0.9, 0.1)
    for scope in Scope:
        budget = Budget(keep_fraction=0.25, scope=scope, sink_tokens=0, window_tokens=0)
        mask = keep_mask(scores, budget)
        assert torch.equal(mask, liked)
        # Disjoint sets: no token is dropped by all heads of a layer, and yet three quarters of the pairs are free.
        assert mask.sum(dim=2).unique().tolist() == [1]
        assert (~mask).sum() == 3 * mask.sum()


def test_budgets_differ_by_scope_as_documented() -> None:
    """Layer 1 scores below layer 0, and head 1 below head 0: who competes with whom decides what they keep."""
    scores = distinct_scores(1, 100, 1).expand(2, 100, 2).clone()
    scores[1] -= 10
    scores[:, :, 1] -= 2
    bare: dict[str, Any] = {"sink_tokens": 0, "window_tokens": 0, "min_tokens": 5}
    counts = {
        scope: kept_counts(keep_mask(scores, Budget(keep_fraction=0.4, scope=scope, **bare))).tolist()
        for scope in Scope
    }
    assert counts[Scope.GLOBAL] == [[100, 50], [5, 5]]
    assert counts[Scope.LAYER] == [[72, 8], [72, 8]]  # a fifth of the even share of 40
    assert counts[Scope.HEAD] == [[40, 40], [40, 40]]
    guarded = keep_mask(scores, Budget(keep_fraction=0.4, safeguard=0.5, **bare))
    assert kept_counts(guarded).tolist() == [[100, 20], [20, 20]]


def test_later_evictions_rank_old_and_new_pairs_together() -> None:
    """Generation: 128 tokens come, then the budget is restored from what was kept before and what is new."""
    budget = Budget(keep_tokens=160, window_tokens=128, min_tokens=0)
    scores = distinct_scores(2, 768, 3)
    alive = torch.zeros(2, 256, 3, dtype=torch.bool)
    alive[:] = keep_mask(scores[:, :256], budget)
    for length in range(384, 769, 128):
        grown = torch.cat([alive, torch.ones(2, 128, 3, dtype=torch.bool)], dim=1)
        now = scores[:, :length].clone()
        now[~grown] = INFINITY  # the score of a pair that is gone must not matter
        alive = keep_mask(now, budget, grown)
        assert int(alive.sum()) == 160 * 2 * 3
        assert not (alive & ~grown).any()
        # Dropped pairs score below every kept pair outside of sinks and window.
        inner = slice(4, length - 128)
        dropped = scores[:, inner][(grown & ~alive)[:, inner]]
        assert dropped.max() < scores[:, inner][alive[:, inner]].min()


def test_unknown_scores_are_kept_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    scores = torch.rand(2, 40, 3, generator=torch.Generator().manual_seed(0))
    scores[0, 10:30, 1] = float("nan")
    budget = Budget(keep_fraction=0.2, window_tokens=2, sink_tokens=1, min_tokens=0)
    alive = torch.ones(2, 40, 3, dtype=torch.bool)
    alive[0, 12, 1] = False
    with caplog.at_level(logging.WARNING):
        mask = keep_mask(scores, budget, alive)
    assert mask[0, 10:30, 1].tolist() == [token != 12 for token in range(10, 30)]
    # 20 NaNs less an absent pair and 3 protected tokens of 6 heads are 37 pairs: below the budget of 48.
    assert int(mask.sum()) == 48
    assert "19 of 240 scores are NaN" in caplog.text
    # Where they exceed the budget, exactly they and the protected pairs stay.
    scores[:, 5:] = float("nan")
    assert int(keep_mask(scores, budget).sum()) == 2 * 36 * 3


@given(
    st.integers(0, 2**31),
    st.integers(1, 60),
    st.sampled_from([0.05, 0.3, 0.9, 0.999, 1.0]),
    st.sampled_from([0, 4, 16]),
)
def test_the_mass_is_reached_by_the_least_number_of_pairs(seed: int, size: int, keep_mass: float, power: int) -> None:
    scores = torch.rand(2, size, 2, generator=torch.Generator().manual_seed(seed)).pow(power)
    steps = (scores.double() * 65536).long().flatten().tolist()
    assert mass_pairs(scores, keep_mass) == plain_mass_pairs(steps, keep_mass)


def test_a_concentrated_context_keeps_less() -> None:
    rng = torch.Generator().manual_seed(3)
    even = 0.5 + 0.1 * torch.rand(4, 500, 2, generator=rng)
    peaked = torch.rand(4, 500, 2, generator=rng).pow(8)
    budget = Budget(keep_mass=0.8, least_fraction=0.2, most_fraction=0.9, window_tokens=20)
    kept_even, kept_peaked = (keep_mask(scores, budget).float().mean().item() for scores in (even, peaked))
    assert 0.75 < kept_even < 0.8
    assert 0.2 <= kept_peaked < 0.35
    assert mass_pairs(torch.full((3, 10, 2), 0.25), 0.5) == 30
    assert mass_pairs(torch.zeros(3, 10, 2), 0.5) == 0


def test_the_mass_is_counted_as_documented() -> None:
    # Three pairs of one step each: half of the mass, 1.5 steps, takes two of them.
    assert mass_pairs(torch.full((1, 3, 1), 1 / 65536), 0.5) == 2
    # Below one step there is no mass; above 1 and below 0 scores are clamped.
    scores = torch.tensor([1e-6, -7.0, 1.0, INFINITY, -INFINITY, float("nan")]).view(1, 6, 1)
    assert mass_pairs(scores, 1.0) == 3
    alive = torch.tensor([True, True, True, True, True, False]).view(1, 6, 1)
    assert mass_pairs(scores, 1.0, alive) == 2


def test_mass_of_evicted_pairs_still_counts() -> None:
    scores = torch.rand(2, 300, 2, generator=torch.Generator().manual_seed(5)).pow(6)
    budget = Budget(keep_mass=0.9, least_fraction=0.15, window_tokens=8)
    alive = keep_mask(scores, budget)
    for _ in range(3):
        again = keep_mask(scores, budget, alive)
        assert torch.equal(again, alive)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_scores_rank_by_their_value(dtype: torch.dtype) -> None:
    scores = distinct_scores(2, 80, 3).to(dtype)
    for scope in Scope:
        budget = Budget(keep_fraction=0.3, scope=scope, window_tokens=4)
        assert torch.equal(keep_mask(scores, budget), plain_keep_mask(scores.float(), budget))


def test_strided_scores_and_ones_with_a_gradient_are_read_in_place() -> None:
    scores = distinct_scores(3, 4, 50).transpose(1, 2).requires_grad_()
    budget = Budget(keep_fraction=0.3, window_tokens=4)
    assert torch.equal(keep_mask(scores, budget), plain_keep_mask(scores.detach(), budget))


def test_a_large_context_has_exact_counts_under_ties() -> None:
    """Scores of 256 values, where each threshold is shared by thousands of pairs."""
    scores = torch.randint(256, (4, 20_000, 4), generator=torch.Generator().manual_seed(1)) / 256
    for scope in Scope:
        budget = Budget(keep_fraction=0.37, scope=scope)
        mask = keep_mask(scores, budget)
        assert int(mask.sum()) == budget.target_pairs(4, 20_000, 4)
        assert mask[:, -4096:].all()
        # Whatever stays scores at least as much as whatever goes, in the same unit.
        inner_scores, inner_mask = scores[:, 4:-4096], mask[:, 4:-4096]
        least = inner_scores.where(inner_mask, 2.0)
        most = inner_scores.where(~inner_mask, -1.0)
        dims = {Scope.GLOBAL: (0, 1, 2), Scope.LAYER: (1, 2), Scope.HEAD: (1,)}[scope]
        assert (least.amin(dims) >= most.amax(dims)).all()


@pytest.mark.parametrize("shape", [(0, 5, 2), (3, 0, 2), (3, 5, 0)])
def test_nothing_is_kept_of_nothing(shape: tuple[int, int, int]) -> None:
    for budget in (Budget(keep_fraction=0.3), Budget(keep_mass=0.5)):
        assert keep_mask(torch.empty(shape), budget).shape == shape
        assert kept_counts(keep_mask(torch.empty(shape), budget)).shape == (shape[0], shape[2])


@pytest.mark.parametrize(
    ("scores", "alive", "message"),
    [
        (torch.zeros(5, 2), None, r"float32\[5, 2\]: expected"),
        (torch.zeros(1, 5, 2, dtype=torch.float64), None, "float64"),
        (torch.zeros(1, 5, 2, dtype=torch.int64), None, "int64"),
        (torch.zeros(1, 5, 2), torch.ones(1, 5, 1, dtype=torch.bool), r"bool\[1, 5, 1\]: expected .* \[1, 5, 2\]"),
        (torch.zeros(1, 5, 2), torch.ones(1, 5, 2), "alive is torch.float32"),
        (torch.zeros(1, 5, 2), torch.ones(1, 5, 2, dtype=torch.bool, device="meta"), "alive is on meta"),
    ],
)
def test_wrong_tensors_are_refused(scores: torch.Tensor, alive: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        keep_mask(scores, Budget(keep_fraction=0.3), alive)
    with pytest.raises(ConfigError, match=message):
        mass_pairs(scores, 0.5, alive)
