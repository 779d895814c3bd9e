"""What a rank meets over with the equal ranks of other groups: its elements of each master, by fragment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from ...ops.comm.collectives import Bounds, Collectives
from ...ops.flat import cut
from ...outer.schedule import fragment_of
from ...zero.core.master import Master
from ...zero.core.unit import Unit


@final
@dataclass(frozen=True, eq=False)
class OuterPart:
    """The elements [start, stop) of a master that this rank meets over.

    holders: the ranks of the group with the same elements of the master, and the part of each of them; None:
    this rank alone. begin: of the part in the fragment.
    """

    master: Master
    start: int
    stop: int
    begin: int
    holders: Collectives | None = None
    bounds: Bounds = ()

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def place(self) -> slice:
        """In the tensors of the fragment."""
        return slice(self.begin, self.begin + self.numel)


def outer_parts(
    units: Sequence[Unit], masters: Sequence[Master], fragments: int
) -> list[list[OuterPart]]:
    """The parts of each fragment, one after the other in it."""
    unit_of = {id(params): number for number, unit in enumerate(units) for params in unit.params}
    found: list[list[OuterPart]] = [[] for _ in range(fragments)]
    for master in masters:
        parts = found[fragment_of(unit_of[id(master.params)], fragments)]
        parts.append(_part_of(master, parts[-1].place().stop if parts else 0))
    return found


def _part_of(master: Master, begin: int) -> OuterPart:
    """This rank's part of a master: an equal one where ranks of the group have the same elements."""
    group, numel = master.params.group, master.raw.numel()
    holders = group.collectives
    if master.is_sharded:
        if group.levels is None or group.levels.across.world_size == 1:
            return OuterPart(master, 0, numel, begin)
        holders = group.levels.across
    elif holders.world_size == 1:
        return OuterPart(master, 0, numel, begin)
    bounds = cut(numel, holders.world_size)
    return OuterPart(master, *bounds[holders.rank], begin, holders, bounds)


__all__ = ["OuterPart", "outer_parts"]
