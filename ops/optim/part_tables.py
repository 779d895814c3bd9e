"""Figures of each parameter over all ranks that hold a part of it, for optimizers that use whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from .shard_optimizer import Item, Update, World


@dataclass(frozen=True)
class Cuts:
    """An item cut at its parameters: bounds int64 [k + 1], and k names; None for a gap between two."""

    bounds: Tensor
    names: tuple[str | None, ...]


@final
class PartTables:
    """Cuts items at their parameters, and adds figures over the ranks."""

    def __init__(self) -> None:
        self._cuts: dict[Item, Cuts] = {}

    def cuts_of(self, item: Item) -> Cuts:
        """Where `item` is cut, on the device of its master."""
        cuts = self._cuts.get(item)
        if cuts is None or cuts.bounds.device != item.master.device:  # a master may move
            cuts = self._cuts[item] = _cut(item)
        return cuts

    def over_ranks(
        self,
        updates: Sequence[Update],
        figures: Sequence[Tensor],
        world: World,
        join: Callable[[Tensor], Tensor],
    ) -> dict[str, list[float]]:
        """For every parameter of `updates` its figures over all ranks. Sends 8 bytes for each and peer.

        Args:
            figures: for each update [cuts, k] fp64.
            join: [ranks, parameters, k] -> [parameters, k]; the figures of a rank without a part are 0.
        """
        # every rank holds different parts, so the table has a row for every parameter
        names = [part.name for flat in world.flats for part in flat.parts]
        rows = {name: at for at, name in enumerate(names)}
        device = figures[0].device if figures else world.collectives.device
        width = figures[0].shape[1] if figures else 1
        table = torch.zeros(len(rows), width, dtype=torch.float64, device=device)
        held: set[str] = set()
        for update, found in zip(updates, figures, strict=True):
            here = self.cuts_of(update.item).names
            inside = [(at, rows[name]) for at, name in enumerate(here) if name is not None]
            if inside:
                ours, theirs = zip(*inside, strict=True)
                to = torch.tensor(theirs, device=device)
                # with some masters on the host, figures are in both places
                table.index_add_(0, to, found.to(device)[torch.tensor(ours, device=device)])
            held.update(part.name for part in update.item.parts)
        sharded = [flat for flat in world.flats if flat.is_sharded]
        for collectives in dict.fromkeys(flat.collectives for flat in sharded):
            flats = [flat for flat in sharded if flat.collectives is collectives]
            own = torch.tensor(
                [rows[part.name] for flat in flats for part in flat.parts], device=device
            )
            sent = table[own].view(-1).to(collectives.device)
            every = collectives.gather_small(sent).view(collectives.world_size, -1, width)
            table[own] = join(every).to(device)
        found_rows = table.tolist()
        return {name: found_rows[rows[name]] for name in held}


def _cut(item: Item) -> Cuts:
    bounds: list[int] = [0]
    names: list[str | None] = []
    for part in item.parts:
        if part.start > bounds[-1]:
            names.append(None)
            bounds.append(part.start)
        names.append(part.name)
        bounds.append(part.stop)
    return Cuts(torch.tensor(bounds, device=item.master.device), tuple(names))


__all__ = ["Cuts", "PartTables"]
