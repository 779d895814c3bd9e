"""A group of ranks in two levels: blocks of neighbours, such as the ranks of one host, and the rest.

rank = block * L + place     0 1 | 2 3     inside   0 1 / 2 3     the ranks of a block
                                           across   0 2 / 1 3     the same place in every block
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, final

from .collectives import Collectives


@final
@dataclass(frozen=True, eq=False)
class Levels:
    """A group, and the two groups that it consists of. Either may be this rank alone."""

    whole: Collectives
    inside: Collectives
    across: Collectives


class Split(Protocol):
    """Opens the levels of a group, with blocks of `length` ranks. For all ranks of the mesh."""

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """The ranks of this group and of all like it, among all ranks: what they decide, all decide alike."""

    def __call__(self, length: int) -> Levels: ...


def block_length(hosts: Sequence[int]) -> int:
    """The number of ranks on every host; 1 where hosts have unequal numbers, or ranks are not in order.

    hosts: for each rank of a group, the number of its host.

    >>> block_length([7, 7, 3, 3])
    2
    """
    starts = [0] + [at for at, (a, b) in enumerate(pairwise(hosts), 1) if a != b]
    length = len(hosts) // len(starts) if hosts else 1
    is_even = all(start == at * length for at, start in enumerate(starts))
    in_order = len(set(hosts)) == len(starts)
    return length if is_even and in_order and length * len(starts) == len(hosts) else 1


__all__ = ["Levels", "Split", "block_length"]
