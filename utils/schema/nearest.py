"""Finds the names that somebody may have meant by a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable

MOST_EDITS = 2
SHORT = 4  # in a name of at most so many characters two edits make any other name


def edits(first: str, second: str, most: int = MOST_EDITS) -> int:
    """How many characters are added, dropped, replaced or swapped with their neighbour; at most `most` + 1.

    >>> edits("AdmaW", "AdamW"), edits("stge", "stage"), edits("lr", "backend")
    (1, 1, 3)
    """
    if abs(len(first) - len(second)) > most:
        return most + 1
    before: list[int] = []
    row = list(range(len(second) + 1))
    for at, char in enumerate(first):
        above, before, row = before, row, [at + 1]
        for place, other in enumerate(second):
            found = min(before[place + 1] + 1, row[place] + 1, before[place] + (char != other))
            is_swap = at and place and char == second[place - 1] and first[at - 1] == other
            row.append(min(found, above[place - 1] + 1) if is_swap else found)
        if min(row) > most:
            return most + 1
    return row[-1]


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The names with the fewest edits, without regard to case; none if every one needs more than two."""
    most = MOST_EDITS if len(name) > SHORT else 1
    found: dict[int, list[str]] = {}
    for each in names:
        found.setdefault(edits(name.casefold(), each.casefold(), most), []).append(each)
    least = min(found, default=most + 1)
    return sorted(found[least]) if least <= most else []
