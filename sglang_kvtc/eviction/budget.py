"""How many KV pairs eviction leaves, and where: exact counts that can be known before any score is.

A KV pair is the K and V of one token in one layer and one KV head; a context of n tokens has L x n x H of them. A
budget counts every pair that stays, protected ones included, as in Fast KVzip (arXiv 2601.17668), where pairs go until
the size of the whole cache is the budget.
"""

from __future__ import annotations

import enum
from fractions import Fraction
from typing import Literal

import msgspec

from sglang_kvtc.config import NonNegativeInt, PositiveInt
from sglang_kvtc.errors import ConfigError

MAX_EVICTION = 0.85
"""Largest share of the pairs that may be evicted without `allow_extreme`. Answers break down suddenly near 0.9 (arXiv
2603.01426: hallucinations rise sharply), while retrieval with KVzip's own scores was still whole at 0.8 in our
measurements."""

LONG_CONTEXT_TOKENS = 16_384
LONG_CONTEXT_WINDOW = 4_096
SHORT_CONTEXT_WINDOW_PERCENT = 2
LEAST_WINDOW = 128
DECODE_WINDOW = 128
"""Window to set for evictions during generation, where one falls due every 128 tokens."""


class Scope(enum.StrEnum):
    """Which pairs compete for the same places, that is, what the threshold on the scores is common to.

    GLOBAL: all pairs of the context, so that layers and heads keep different amounts (the paper's choice).
    LAYER: each layer keeps the same number; its heads compete (Ada-KV, arXiv 2407.11550).
    HEAD: each head of each layer keeps the same number.
    """

    GLOBAL = "global"
    LAYER = "layer"
    HEAD = "head"


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many pairs stay. Exactly one of the first three says how many; the rest says where.

    keep_fraction: share of all L x n x H pairs, in (0, 1]. It is taken as the decimal number it is written as, and
        counts are rounded down: 0.29 of 100 pairs is 29, although the nearest double lies below 0.29.
    keep_tokens: pairs per head on average, at least 1: a fixed size for long generations. Shorter contexts stay whole.
    keep_mass: a share that adapts to the context, in (0, 1]: K / (L n H), where K is the least number of pairs whose
        scores, largest first, add up to `keep_mass` of the sum of all scores (see select.mass_pairs). The share is then
        clamped to [least_fraction, most_fraction], which have no effect otherwise.
    scope: see Scope. GLOBAL keeps a whole number of pairs of the context, LAYER of each layer, HEAD of each head: the
        share is rounded down once, in that unit.
    sink_tokens: first tokens, always kept.
    window_tokens: last tokens, always kept. "auto" is 4096, and in contexts below 16,384 tokens 2 percent of the
        context (rounded down) but at least 128. Use DECODE_WINDOW during generation.
    min_tokens: pairs every head keeps at least, its best ones, protected ones included; no head is starved by a
        threshold it shares. The default lies below the protection of any usual window: it acts where that is turned
        off, and keeps a head from being emptied. It was not tuned.
    safeguard: share alpha in [0, 1] of the even share that every head keeps at least where heads compete. Of T pairs
        for G heads, floor(alpha T) are dealt out evenly, first heads first when that does not come out even; each head
        fills its part with its best pairs. "auto" is 0.2 in LAYER (Ada-KV's value) and 0 in GLOBAL. In HEAD every head
        has its full share anyway.
    allow_extreme: permits more than MAX_EVICTION.

    Sinks, window, `min_tokens` and `safeguard` are forced. The total kept in a unit is its share of the budget exactly,
    unless the forced pairs alone are more: then exactly those are kept. A smaller `keep_fraction` or `keep_tokens`, all
    else equal, keeps a subset.

    Raises ConfigError, naming the field and the fix; so does msgspec.convert as a ValidationError.
    """

    keep_fraction: float | None = None
    keep_tokens: PositiveInt | None = None
    keep_mass: float | None = None
    least_fraction: float = 0.2
    most_fraction: float = 0.6
    scope: Scope = Scope.GLOBAL
    sink_tokens: NonNegativeInt = 4
    window_tokens: NonNegativeInt | Literal["auto"] = "auto"
    min_tokens: NonNegativeInt = 8
    safeguard: float | Literal["auto"] = "auto"
    allow_extreme: bool = False

    def __post_init__(self) -> None:
        """Check every field: Python does not hold them to their types."""
        sizes = {name: getattr(self, name) for name in ("keep_fraction", "keep_tokens", "keep_mass")}
        chosen = [name for name, value in sizes.items() if value is not None]
        if len(chosen) != 1:
            raise ConfigError(
                f"a budget is one of keep_fraction, keep_tokens and keep_mass, got {' and '.join(chosen) or 'none'}: "
                "set exactly one"
            )
        if self.keep_tokens is not None:
            _check_count("keep_tokens", self.keep_tokens, 1)
        for name in ("keep_fraction", "keep_mass", "least_fraction", "most_fraction"):
            value = getattr(self, name)
            if value is not None:
                _check_number(name, value)
                if value <= 0:
                    raise ConfigError(f"{name} is {value}: expected a number above 0, since it is a share that stays")
        if self.least_fraction > self.most_fraction:
            raise ConfigError(
                f"least_fraction is {self.least_fraction}, above most_fraction, {self.most_fraction}: exchange them"
            )
        for name in ("sink_tokens", "min_tokens"):
            _check_count(name, getattr(self, name), 0)
        if self.window_tokens != "auto":
            _check_count("window_tokens", self.window_tokens, 0, " or 'auto'")
        if self.safeguard != "auto":
            _check_number("safeguard", self.safeguard, " or 'auto'")
        if not isinstance(self.scope, Scope):
            raise ConfigError(f"scope is {self.scope!r}: expected one of Scope.{', Scope.'.join(Scope.__members__)}")
        if self.keep_fraction is not None:
            self._check_eviction("keep_fraction", self.keep_fraction, as_written(self.keep_fraction))
        elif self.keep_mass is not None:
            self._check_eviction("least_fraction", self.least_fraction, as_written(self.least_fraction))

    def check_context(self, num_tokens: int) -> None:
        """Check the budget against the longest context it will serve, which `keep_tokens` can only be judged with.

        Raises ConfigError when more than MAX_EVICTION of such a context would go and `allow_extreme` is not set.
        """
        if self.keep_tokens is not None and num_tokens > 0:
            where = f"{self.keep_tokens} of {num_tokens} tokens of context"
            self._check_eviction("keep_tokens", where, Fraction(self.keep_tokens, num_tokens))

    def _check_eviction(self, name: str, written: object, kept: Fraction) -> None:
        if not self.allow_extreme and 1 - kept > as_written(MAX_EVICTION):
            raise ConfigError(
                f"{name} is {written}, which evicts {float(1 - kept):.3g} of the KV pairs: above {MAX_EVICTION} "
                "answers break down suddenly; keep more or set allow_extreme"
            )

    def protected(self, num_tokens: int) -> tuple[int, int]:
        """Tokens of a context of `num_tokens` that every head keeps: how many first and how many last ones.

        They do not overlap: their sum is at most `num_tokens`.
        """
        if self.window_tokens != "auto":
            window = self.window_tokens
        elif num_tokens >= LONG_CONTEXT_TOKENS:
            window = LONG_CONTEXT_WINDOW
        else:
            window = max(LEAST_WINDOW, num_tokens * SHORT_CONTEXT_WINDOW_PERCENT // 100)
        sinks = min(self.sink_tokens, num_tokens)
        return sinks, min(window, num_tokens - sinks)

    def fraction(self, num_tokens: int, mass_share: Fraction | None = None) -> Fraction:
        """The share of the pairs of a context of `num_tokens` that this budget is, exactly; above 1 for keep_tokens of
        a shorter context.

        mass_share: K / (L n H) of this context, for keep_mass; without it the share is the most it can be.
        """
        if self.keep_fraction is not None:
            return as_written(self.keep_fraction)
        if self.keep_tokens is not None:
            return Fraction(self.keep_tokens, max(1, num_tokens))
        most = as_written(self.most_fraction)
        return most if mass_share is None else min(most, max(as_written(self.least_fraction), mass_share))

    def unit_pairs(self, num_layers: int, num_tokens: int, num_kv_heads: int, share: Fraction) -> int:
        """Pairs that `share` gives each unit of the scope (the context, a layer, or a head), before what is forced."""
        heads = {Scope.GLOBAL: num_layers * num_kv_heads, Scope.LAYER: num_kv_heads, Scope.HEAD: 1}[self.scope]
        return min(heads * num_tokens, int(share * heads * num_tokens))

    def head_floors(self, num_layers: int, num_kv_heads: int, unit_pairs: int) -> list[list[int]]:
        """Pairs that each head keeps at least, by layer and head: the larger of `min_tokens` and the safeguard."""
        if self.scope is Scope.HEAD:
            return [[self.min_tokens] * num_kv_heads] * num_layers
        alpha = (0.2 if self.scope is Scope.LAYER else 0.0) if self.safeguard == "auto" else self.safeguard
        heads = num_kv_heads * (num_layers if self.scope is Scope.GLOBAL else 1)
        # Dealt out from a total, so that one pair more of budget never forces more than one pair: else a larger budget
        # could drop pairs that a smaller one keeps.
        each, left = divmod(int(as_written(alpha) * unit_pairs), heads)
        of_heads = [max(self.min_tokens, each + (head < left)) for head in range(heads)]
        if self.scope is Scope.LAYER:
            return [of_heads] * num_layers
        return [of_heads[start : start + num_kv_heads] for start in range(0, heads, num_kv_heads)]

    def target_pairs(self, num_layers: int, num_tokens: int, num_kv_heads: int) -> int:
        """Pairs kept of a context of which nothing is evicted yet: what keep_mask leaves, for admission control.

        For keep_mass it is the most that can be left. Pairs whose score is NaN are kept on top where they exceed the
        budget (see select.keep_mask).
        """
        if min(num_layers, num_tokens, num_kv_heads) <= 0:
            return 0
        pairs = self.unit_pairs(num_layers, num_tokens, num_kv_heads, self.fraction(num_tokens))
        protected = sum(self.protected(num_tokens))
        forced = [
            [min(num_tokens, max(protected, floor)) for floor in floors]
            for floors in self.head_floors(num_layers, num_kv_heads, pairs)
        ]
        match self.scope:
            case Scope.GLOBAL:
                return max(pairs, sum(map(sum, forced)))
            case Scope.LAYER:
                return sum(max(pairs, sum(of_layer)) for of_layer in forced)
            case Scope.HEAD:
                return sum(max(pairs, of_head) for of_layer in forced for of_head in of_layer)


def as_written(number: float) -> Fraction:
    """The decimal number that `number` is written as, instead of the double nearest to it: 0.3 is 3/10."""
    return Fraction(repr(float(number)))


def _check_count(name: str, value: object, least: int, otherwise: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}: expected a whole number of tokens, at least {least}{otherwise}")


def _check_number(name: str, value: object, otherwise: str = "") -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value!r}: expected a number between 0 and 1{otherwise}")
