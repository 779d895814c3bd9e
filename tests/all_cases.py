"""Test helper: a balanced half of a long matrix; XDS_ALL_CASES=1 runs all of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product
from typing import Any

ALL = os.environ.get("XDS_ALL_CASES") == "1"


def balanced(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every second combination, as the squares of one colour on a chess board: each pair of values occurs
    where there are three axes or more, and each value in any case."""
    numbered = [list(enumerate(axis)) for axis in axes]
    return [
        tuple(value for _, value in case)
        for case in product(*numbered)
        if ALL or sum(number for number, _ in case) % 2 == 0
    ]
