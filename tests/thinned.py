"""Few of all combinations: any two values that meet in one of all still meet in one of the few.

XDS_ALL_CASES=1 in the environment runs all combinations instead.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

RUNS_ALL = os.environ.get("XDS_ALL_CASES") == "1"


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few combinations of one hashable value from each axis, in the order of all; the same on every call.

    Takes the combination with most missing pairs, the first of equals.
    """
    every = list(itertools.product(*axes))
    if RUNS_ALL:
        return every
    pairs = [set(itertools.combinations(enumerate(case), 2)) for case in every]
    missing = set().union(*pairs)
    taken = []
    while missing:
        gains = [len(one & missing) for one in pairs]
        taken.append(gains.index(max(gains)))
        missing -= pairs[taken[-1]]
    return [every[at] for at in sorted(taken)]
