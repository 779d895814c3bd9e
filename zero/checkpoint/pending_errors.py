"""What lossy messages have not sent yet, in a checkpoint: an error of each rank, and the copy that ranks hold.

    error/<rank>    the worker's error of each rank of the buffer's group, for all elements
    server          the server's error, each rank's part (stage 0)
    copy            the values that forward computes with, where they are not the cast masters (stages 1, 2)

At as many ranks each takes its own error. Else each takes an equal part of their sum, so the error in all
is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ...compression.scheme import PendingError
from ..core.master import Master
from .ranges import COPY, ERROR, SERVER, Catalogue, Copy, SavedFlat, pieces
from .snapshot import Snapshot
from .targets import Target, target_for


@dataclass(frozen=True, eq=False)
class _Plan:
    """What is read for a buffer. error: [world_size * n] of this rank, or parts: [ranks, n] of all."""

    master: Master
    error: Tensor | None
    parts: Tensor | None
    server: Tensor | None
    copy: Tensor | None


@final
class ErrorRestore:
    """Restores the pending errors. `unit`, `steps`, `holds_momentum`: see `PendingError`, of the checkpoint."""

    def __init__(
        self,
        snapshot: Snapshot,
        catalogue: Catalogue,
        unit: float,
        steps: int,
        holds_momentum: bool,
    ) -> None:
        self._snapshot = snapshot
        self._catalogue = catalogue
        self._unit = unit
        self._steps = steps
        self._holds_momentum = holds_momentum
        self._plans: list[_Plan] = []

    def plan(self) -> list[Target]:
        """Targets for all errors and copies, in fresh tensors."""
        targets: list[Target] = []
        for master in self._snapshot.masters:
            if master.grads.reducer.has_pending_error:
                targets += self._plan(master)
        return targets

    def _plan(self, master: Master) -> list[Target]:
        flat = self._snapshot.flats[self._snapshot.number_of(master)]
        layout, device = master.params.layout, master.raw.device
        bounds = layout.shard_range(master.rank)
        saved_keys = {
            key for piece in pieces(flat, 0, flat.numel) for key in self._catalogue.keys_of(piece)
        }
        keys = sorted(key for key in saved_keys if key.startswith(ERROR))
        targets: list[Target] = []

        def read(key: str, start: int, stop: int, into: Tensor) -> Tensor:
            targets.append(target_for(into, self._copies(flat, key, start, stop), is_fresh=True))
            return into

        error = parts = server = copy = None
        everyone = master.grads.group.everyone
        if len(keys) == everyone.world_size:
            key = f"{ERROR}{everyone.rank}"
            error = read(key, 0, layout.numel, torch.empty(layout.numel, device=device))
        elif keys:
            parts = torch.empty((len(keys), layout.shard_numel), device=device)
            for key, row in zip(keys, parts, strict=True):
                read(key, *bounds, row)
        if SERVER in saved_keys:
            server = read(SERVER, *bounds, torch.empty(layout.shard_numel, device=device))
        if COPY in saved_keys and master.is_sharded:
            dtype = master.params.dtype
            copy = read(COPY, *bounds, torch.empty(layout.shard_numel, dtype=dtype, device=device))
        self._plans.append(_Plan(master, error, parts, server, copy))
        return targets

    def _copies(self, flat: SavedFlat, key: str, start: int, stop: int) -> list[Copy]:
        return [
            copy
            for piece in pieces(flat, start, stop)
            for copy in self._catalogue.copies(piece, key)
        ]

    def finish_values(self) -> None:
        """Set the values that forward computes with, where they are close to the masters. After the states."""
        for plan in self._plans:
            plan.master.has_sent_delta = plan.copy is not None
            if plan.copy is not None:
                plan.master.compute.copy_(plan.copy)

    def finish(self) -> None:
        """Set the errors. For all ranks: at another number of ranks each sends its part of them."""
        for plan in self._plans:
            error = plan.error if plan.parts is None else _spread(plan.master, plan.parts)
            pending = None
            if error is not None:
                pending = PendingError(
                    error, plan.server, self._unit, self._steps, self._holds_momentum
                )
            plan.master.grads.reducer.restore(pending)


def _spread(master: Master, parts: Tensor) -> Tensor:
    """An equal part of the sum of the errors `parts` [ranks, n], of all elements."""
    collectives, layout = master.params.collectives, master.params.layout
    full = torch.empty(layout.numel, device=parts.device)
    mean = parts.sum(0).div_(master.grads.group.everyone.world_size)
    collectives.all_gather(full, mean, buffer=master.params.index, kind="access").wait()
    return full


__all__ = ["ErrorRestore"]
