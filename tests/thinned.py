"""Few of all combinations: any two values that meet in one of all still meet in one of the few.

XDS_ALL_CASES=1 in the environment runs all combinations instead.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

RUNS_ALL = os.environ.get("XDS_ALL_CASES") == "1"
Case = TypeVar("Case")


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few combinations of one value from each axis; values are hashable."""
    return few_of(itertools.product(*axes), tuple)


def few_of(cases: Iterable[Case], values: Callable[[Case], tuple[Any, ...]]) -> list[Case]:
    """Few of `cases` in their order; `values` gives the value of each axis of a case.

    The same on every call. Takes the case with most missing pairs, the first of equals.
    """
    every = list(cases)
    if RUNS_ALL:
        return every
    pairs = [set(itertools.combinations(enumerate(values(case)), 2)) for case in every]
    missing = set().union(*pairs)
    taken = []
    while missing:
        gains = [len(one & missing) for one in pairs]
        taken.append(gains.index(max(gains)))
        missing -= pairs[taken[-1]]
    return [every[at] for at in sorted(taken)]
