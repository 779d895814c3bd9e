"""Figures of each parameter over all ranks that hold a part of it, for optimizers that use whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ..comm.collectives import Collectives
from ..flat import moved
from .shard_optimizer import Item, Update, World


@dataclass(frozen=True)
class Cuts:
    """An item cut at its parameters: bounds int64 [k + 1], and k names; None for a gap between two.

    starts: the bounds on the host.
    """

    bounds: Tensor
    starts: tuple[int, ...]
    names: tuple[str | None, ...]


@final
class PartTables:
    """Cuts items at their parameters, and adds figures over the ranks."""

    def __init__(self) -> None:
        self._cuts: dict[Item, Cuts] = {}
        self._numbers: dict[str, int] = {}  # rows by parameter
        self._rows_of: dict[Item, Tensor] = {}
        self._own: dict[tuple[Collectives, torch.device], Tensor] = {}

    def cuts_of(self, item: Item) -> Cuts:
        """Where `item` is cut, on the device of its master."""
        cuts = self._cuts.get(item)
        if cuts is None or cuts.bounds.device != item.master.device:  # a master may move
            cuts = self._cuts[item] = _cut(item)
        return cuts

    def rows_of(self, item: Item, world: World) -> Tensor:
        """For each cut of `item` its row in the `table`, int64 on the item's device; for a gap the last one."""
        rows = self._rows_of.get(item)
        if rows is None or rows.device != item.master.device:
            numbers = self._rows(world)
            row_numbers = [
                len(numbers) if name is None else numbers[name] for name in self.cuts_of(item).names
            ]
            rows = moved(torch.tensor(row_numbers, dtype=torch.int64), item.master.device)
            self._rows_of[item] = rows
        return rows

    def table(
        self,
        updates: Sequence[Update],
        figures: Sequence[Tensor],
        world: World,
        join: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The figures of every parameter over all ranks, [parameters + 1, k]; the last row is 0.

        Sends 8 bytes for each parameter, figure and peer. The host waits for no device.

        Args:
            figures: for each update [cuts, k] fp64.
            join: [ranks, parameters, k] -> [parameters, k]; the figures of a rank without a part are 0.
        """
        # every rank holds different parts, so the table has a row for every parameter
        num_rows = len(self._rows(world)) + 1
        device = figures[0].device if figures else world.collectives.device
        width = figures[0].shape[1] if figures else 1
        table = torch.zeros(num_rows, width, dtype=torch.float64, device=device)
        for update, of_update in zip(updates, figures, strict=True):
            # with some masters on the host, figures are in both places
            table.index_add_(0, self.rows_of(update.item, world).to(device), of_update.to(device))
        table[-1].zero_()  # what gaps have added
        sharded = [flat for flat in world.flats if flat.is_sharded]
        for collectives in dict.fromkeys(flat.collectives for flat in sharded):
            own_rows = self._own_rows(collectives, world, device)
            sent = table[own_rows].view(-1).to(collectives.device)
            every = collectives.gather_small(sent).view(collectives.world_size, -1, width)
            table[own_rows] = join(every).to(device)
        return table

    def over_ranks(
        self,
        updates: Sequence[Update],
        figures: Sequence[Tensor],
        world: World,
        join: Callable[[Tensor], Tensor],
    ) -> dict[str, list[float]]:
        """The same on the host, for every parameter of `updates`. Waits for the device."""
        table = self.table(updates, figures, world, join).tolist()
        rows = self._rows(world)
        return {
            part.name: table[rows[part.name]] for update in updates for part in update.item.parts
        }

    def _rows(self, world: World) -> dict[str, int]:
        if not self._numbers:
            names = [part.name for flat in world.flats for part in flat.parts]
            self._numbers = {name: number for number, name in enumerate(names)}
        return self._numbers

    def _own_rows(self, collectives: Collectives, world: World, device: torch.device) -> Tensor:
        """The rows of the parameters in sharded buffers of one group."""
        rows = self._own.get((collectives, device))
        if rows is None:
            flats = [f for f in world.flats if f.is_sharded and f.collectives is collectives]
            numbers = self._rows(world)
            row_numbers = [numbers[part.name] for flat in flats for part in flat.parts]
            rows = self._own[collectives, device] = moved(torch.tensor(row_numbers), device)
        return rows


def _cut(item: Item) -> Cuts:
    bounds: list[int] = [0]
    names: list[str | None] = []
    for part in item.parts:
        if part.start > bounds[-1]:
            names.append(None)
            bounds.append(part.start)
        names.append(part.name)
        bounds.append(part.stop)
    return Cuts(moved(torch.tensor(bounds), item.master.device), tuple(bounds), tuple(names))


__all__ = ["Cuts", "PartTables"]
