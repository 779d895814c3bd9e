"""Finds the name that somebody may have meant by a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LIKENESS = 0.75  # of difflib: "lmab" is that near to "lamb"


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The name that is nearest to `name`, without regard to case; none where no name is near.

    >>> nearest("stge", ["stage", "storage"]), nearest("lr", ["backend"])
    (['stage'], [])
    """
    folded = {each.casefold(): each for each in names}
    return [folded[one] for one in get_close_matches(name.casefold(), folded, 1, LIKENESS)]


__all__ = ["nearest"]
