"""Gathers for ranks that run unequal numbers of forwards: they ask before each, and the idle ones serve.

    round 1   rank 0 wants unit 4      rank 1 wants unit 4      both get it
    round 2   rank 0 wants unit 5      rank 1 is done           rank 1 gives its shard of unit 5
    round 3   rank 0 is done           rank 1 is done           over

In each round every rank says what it wants; the lowest number is served, and whoever requested that goes on.
So ranks may call different units in different order, as often as they like, until all are done.
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
    """The asking and serving of one rank. All ranks have one at the same time."""

    def __init__(self, units: Sequence[Unit], collectives: Collectives) -> None:
        self._units = list(units)
        self._numbers = {id(unit): number for number, unit in enumerate(units)}
        self._collectives = collectives

    def gather(self, unit: Unit) -> None:
        """`unit` is gathered on return; meanwhile the others are served."""
        for flat in unit.params:
            flat.wait()
        if unit.is_unsharded:
            return
        while self._round(self._numbers[id(unit)]) != self._numbers[id(unit)]:
            pass

    def finish(self) -> None:
        """Serve until every rank is done."""
        while self._round(NOTHING) != NOTHING:
            pass

    def _round(self, requested: int) -> int:
        """The unit that was served, or NOTHING. Sends 8 bytes and a shard to each rank that wants one."""
        asked = torch.tensor([requested], dtype=torch.int64, device=self._collectives.device)
        table = self._collectives.gather_small(asked, what="unequal forwards").view(-1).tolist()
        requests = [number for number in table if number != NOTHING]
        if not requests:
            return NOTHING
        chosen: int = min(requests)
        receivers = [rank for rank, number in enumerate(table) if number == chosen]
        for flat in self._units[chosen].params:
            if flat.may_be_resharded:
                flat.serve(receivers)
        return chosen


__all__ = ["Rounds"]
