"""Few cases in which every two values of every two settings meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

Case = Mapping[str, Any]


def pairs_of(case: Case) -> set[tuple[Any, ...]]:
    """Every two settings of a case with their values, in the order of its settings."""
    return set(itertools.combinations(case.items(), 2))


def pairwise(
    settings: Mapping[str, tuple[Any, ...]], allowed: Callable[[Case], bool]
) -> list[dict[str, Any]]:
    """Few cases in which every allowed pair of values meets: the best of random candidates, again and again."""
    missing = {
        pair
        for a, b in itertools.combinations(settings, 2)
        for pair in itertools.product([(a, v) for v in settings[a]], [(b, v) for v in settings[b]])
        if allowed(dict(pair))
    }
    rng = random.Random(0)
    cases = []
    while missing:
        wanted = dict(min(missing, key=repr))
        candidates = []
        while len(candidates) < 200:
            case = {name: wanted.get(name, rng.choice(values)) for name, values in settings.items()}
            if allowed(case):
                candidates.append(case)
        best = max(candidates, key=lambda case: len(pairs_of(case) & missing))
        cases.append(best)
        missing -= pairs_of(best)
    return cases
