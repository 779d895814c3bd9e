"""Locates the elements of a parameter in DeepSpeed's files. Pure arithmetic.

    ZeRO 1, 2   a group's parameters in one row, the row divided into equal parts, one per rank
                row      |--- a ---|- b -|.|-------- c --------|..|       . = alignment
                ranks    |------- 0 -------|-------- 1 -----------|
    ZeRO 3      every parameter divided into equal parts; a rank has its parts in one row over all sub-groups
                rank 0   | a0 | b0 | c0 |       rank 1   | a1 | b1 | c1.|

Stage 0 has no shards and no names: names are determined from order, shapes and, if available, values.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ....ops.flat import numel_of, overlap

Shape = tuple[int, ...]
MAX_WAYS = 4096  # states that the search for names keeps at a time


@dataclass(frozen=True)
class Place:
    """Elements [start, stop) of a parameter are elements [at, ...) of flat tensor `part` of `rank`."""

    rank: int
    part: int
    start: int
    stop: int
    at: int


def places_in_rows(
    shapes: Sequence[Mapping[str, Shape]],
    paddings: Sequence[Sequence[int]] | None,
    part_numels: Sequence[int],
    world_size: int,
) -> dict[str, list[Place]]:
    """ZeRO 1 and 2.

    Args:
        shapes: of each group, in the order of its row. paddings: elements after each parameter of a row.
        part_numels: of each group, the length of a rank's part.
    """
    found: dict[str, list[Place]] = {}
    for group, members in enumerate(shapes):
        at, length = 0, part_numels[group]
        for number, (name, shape) in enumerate(members.items()):
            stop = at + numel_of(shape)
            found[name] = []
            for rank in range(world_size):
                low, high = overlap((rank * length, (rank + 1) * length), (at, stop))
                if low < high:
                    place = Place(rank, group, low - at, high - at, low - rank * length)
                    found[name].append(place)
            at = stop + (0 if paddings is None else paddings[group][number])
    return found


def places_in_parts(
    shapes: Mapping[str, Shape], part_numels: Sequence[int], world_size: int
) -> dict[str, list[Place]]:
    """ZeRO 3. `part_numels`: the length of each sub-group on a rank, the same on every rank."""
    begins = [0, *accumulate(part_numels)]
    found: dict[str, list[Place]] = {}
    row = 0
    for name, shape in shapes.items():
        numel = numel_of(shape)
        length = -(-numel // world_size)
        found[name] = []
        first_part = max(bisect_right(begins, row) - 1, 0)
        past_part = bisect_left(begins, row + length)
        for rank in range(world_size):
            first, last = min(rank * length, numel), min((rank + 1) * length, numel)
            for part in range(first_part, min(past_part, len(part_numels))):
                low = max(row, begins[part])
                high = min(row + last - first, begins[part + 1])
                if low < high:
                    start = first + low - row
                    at = low - begins[part]
                    found[name].append(Place(rank, part, start, start + high - low, at))
        row += length
    return found


def order_names(
    names: Sequence[str], groups: Sequence[int], fits: Callable[[str, int, int], bool]
) -> list[list[str]] | None:
    """The names of the groups' members, if only their order is known.

    Args:
        names: in the order of the model.
        groups: the number of members of each group. Members follow the model's order; names may be left over.
        fits: (name, group number, member number) -> whether the name can be that member.
    Returns:
        names by group and member; None if no assignment fits, or several do.
    """
    spare = len(names) - sum(groups)
    # by (members named so far in each group): the number of ways, and the first one
    ways: dict[tuple[int, ...], tuple[int, tuple[tuple[int, str], ...]]] = {
        (0,) * len(groups): (1, ())
    }
    for index, name in enumerate(names):
        following: dict[tuple[int, ...], tuple[int, tuple[tuple[int, str], ...]]] = {}

        def reach(state: tuple[int, ...], count: int, path: tuple[tuple[int, str], ...]) -> None:
            before = following.get(state, (0, path))  # noqa: B023
            following[state] = (before[0] + count, before[1])  # noqa: B023

        for state, (count, path) in ways.items():
            for group, done in enumerate(state):
                if done < groups[group] and fits(name, group, done):
                    after = (*state[:group], done + 1, *state[group + 1 :])
                    reach(after, count, (*path, (group, name)))
            if index - sum(state) < spare:
                reach(state, count, path)
        if len(following) > MAX_WAYS:
            return None
        ways = following
    count, path = ways.get(tuple(groups), (0, ()))
    if count != 1:
        return None
    return [[name for group, name in path if group == number] for number in range(len(groups))]
