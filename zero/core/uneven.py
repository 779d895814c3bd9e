"""Gathers units for ranks that run unequal numbers of forwards, in rounds of requests.

    round 1   rank 0 requests unit 4   rank 1 requests unit 4   both get it
    round 2   rank 0 requests unit 5   rank 1 is done           rank 1 sends its shard of unit 5
    round 3   rank 0 is done           rank 1 is done           end

In each round every rank sends its request. The unit with the lowest number is gathered, and the ranks that
requested it continue. So ranks may call different units in different order and number until all are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from ...ops.comm.collectives import Collectives
from .unit import Unit

NOTHING = -1


@final
class Rounds:
    """The requests of one rank, and its part in those of others. All ranks have one at the same time."""

    def __init__(self, units: Sequence[Unit], collectives: Collectives) -> None:
        """collectives: of all ranks that hold a part of some unit, among them those of each flat buffer."""
        self._units = list(units)
        self._numbers = {id(unit): number for number, unit in enumerate(units)}
        self._collectives = collectives

    def gather(self, unit: Unit) -> None:
        """Gather `unit`; until then, take part in the gathers of other ranks."""
        for flat in unit.params:
            flat.wait()
        if unit.is_unsharded:
            return
        while self._round(self._numbers[id(unit)]) != self._numbers[id(unit)]:
            pass

    def finish(self) -> None:
        """Take part in the gathers of other ranks until every rank is done."""
        while self._round(NOTHING) != NOTHING:
            pass

    def _round(self, requested: int) -> int:
        """Gather one unit; returns its number or NOTHING. Sends 8 bytes to each rank, a shard to requesters."""
        own = torch.tensor([requested], dtype=torch.int64, device=self._collectives.device)
        table = self._collectives.gather_small(own, what="unequal forwards").view(-1).tolist()
        requests = [number for number in table if number != NOTHING]
        if not requests:
            return NOTHING
        chosen: int = min(requests)
        members = self._collectives.members
        wanted = {members[rank] for rank, number in enumerate(table) if number == chosen}
        for flat in self._units[chosen].params:
            if flat.may_be_resharded:  # ranks of slices are some of those that ask
                ranks = enumerate(flat.collectives.members)
                flat.serve([rank for rank, member in ranks if member in wanted])
        return chosen


__all__ = ["Rounds"]
