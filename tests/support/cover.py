"""A pairwise cover: few cases with a meeting of every two values, unless a rule forbids it.

A fault of two options, such as a schedule and a tied embedding, then shows in some case. The method is the greedy one
of Cohen, Dalal, Fredman and Patton, "The AETG System" (IEEE Transactions on Software Engineering, 1997).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

Case = Mapping[str, Any]
"""A value for each factor, or for some of them."""
Pair = tuple[tuple[str, Any], tuple[str, Any]]
"""Two factors with a value each, in the order of their names."""


@dataclass(frozen=True)
class Rule:
    """Values not allowed to meet, and why. `allows` gets a value of each of `factors`, in this order."""

    reason: str
    factors: tuple[str, ...]
    allows: Callable[..., bool]


@dataclass(frozen=True)
class Space:
    """All cases allowed by the rules. Factors of many rules come first: a search then ends early."""

    factors: Mapping[str, Sequence[Any]]
    rules: Sequence[Rule]

    def allows(self, case: Case, newest: str = "") -> bool:
        """Whether all rules allow `case`. A rule counts if all its factors have a value there. `newest`: the factor
        without which all rules are known to allow it."""
        rules = [rule for rule in self.rules if not newest or newest in rule.factors]
        decided = [rule for rule in rules if all(factor in case for factor in rule.factors)]
        return all(rule.allows(*(case[factor] for factor in rule.factors)) for rule in decided)

    def complete(self, case: Case, missing_pairs: set[Pair], draw: random.Random) -> Case | None:
        """`case` with a value for each other factor. Each in turn gets the value with most of `missing_pairs` among the
        factors before it, by `draw` if there are several. None if the rules allow no such case."""
        return self._completed(case, missing_pairs, draw) if self.allows(case) else None

    def _completed(self, case: Case, missing_pairs: set[Pair], draw: random.Random) -> Case | None:
        factor = next((factor for factor in self.factors if factor not in case), None)
        if factor is None:
            return case
        choices = []
        for value in self.factors[factor]:
            met = sum(pair_of((factor, value), other) in missing_pairs for other in case.items())
            choices.append((-met, draw.random(), value))
        for _, _, value in sorted(choices, key=lambda choice: choice[:2]):
            larger = {**case, factor: value}
            found = self._completed(larger, missing_pairs, draw) if self.allows(larger, factor) else None
            if found is not None:
                return found
        return None

    def pairs(self) -> tuple[set[Pair], set[Pair]]:
        """The pairs of some case, and the pairs of none."""
        draw = random.Random(0)
        allowed: set[Pair] = set()
        forbidden: set[Pair] = set()
        for first, second in combinations(self.factors, 2):
            for one in self.factors[first]:
                for other in self.factors[second]:
                    pair = pair_of((first, one), (second, other))
                    if pair in allowed:
                        continue
                    found = self.complete(dict(pair), set(), draw)
                    if found is None:
                        forbidden.add(pair)
                    else:
                        allowed |= pairs_of(found)
        return allowed, forbidden


def pair_of(one: tuple[str, Any], other: tuple[str, Any]) -> Pair:
    return (one, other) if one[0] < other[0] else (other, one)


def pairs_of(case: Case) -> set[Pair]:
    return {pair_of(one, other) for one, other in combinations(case.items(), 2)}


def cover(space: Space, seed: int, cost: Callable[[Case], float], candidates: int = 16) -> list[Case]:
    """Cases with every pair of `space`, the same ones for the same seed. Each of some candidates begins with a missing
    pair; the case with most missing pairs for its cost comes next."""
    draw = random.Random(seed)
    missing, _ = space.pairs()
    cases = []
    while missing:
        order = sorted(missing, key=repr)  # a set's own order changes between processes
        found = [space.complete(dict(pair), missing, draw) for pair in draw.choices(order, k=candidates)]
        case = max(found, key=lambda case: len(pairs_of(case) & missing) / cost(case))
        cases.append(case)
        missing -= pairs_of(case)
    return cases
