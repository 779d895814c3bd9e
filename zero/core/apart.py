"""Brings the ranks together where their optimizer lets them step alone for a while.

A script's write to a parameter in between is not lost: then the ranks take the exact mean of their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Protocol, final

import torch

from ...ops.optim.shard_optimizer import ShardOptimizer
from .frozen import FrozenValues, frozen_ids
from .master import Master
from .sharded_model import ShardedModel

Ids = Set[int]  # of parameters


class KeepFrozen(Protocol):
    """Saves the values and states of the parameters `ids`."""

    def __call__(self, masters: Sequence[Master], ids: Ids) -> FrozenValues: ...


@final
class Apart:
    """The masters of ranks whose `optimizer` may let them be apart.

    Ranks come together before a step in which other parameters are frozen than in the step before. So what is
    frozen does not change while they are apart. A parameter that a script has frozen since then still holds a
    different value on each rank, and takes the common one.
    """

    def __init__(
        self,
        optimizer: ShardOptimizer,
        model: ShardedModel,
        masters: Sequence[Master],
        keep_frozen: KeepFrozen,
    ) -> None:
        self._optimizer = optimizer
        self._model = model
        self._masters = masters
        self._keep_frozen = keep_frozen
        self._frozen: Ids = self._frozen_now()  # in the last step

    def synchronise(self) -> None:
        """Bring the ranks together, if they are apart. For all ranks."""
        if self._optimizer.is_apart:
            self._model.agree_on_edits()
            self.join_written()
        if self._optimizer.is_apart:
            self._change(self._optimizer.synchronise)

    def before_step(self) -> None:
        """Bring the ranks together, if the step must not start from different values. For all ranks."""
        self.join_written()
        frozen = self._frozen_now()
        if self._optimizer.is_apart and frozen != self._frozen:
            self._change(self._optimizer.synchronise)
        self._frozen = frozen

    def join_written(self) -> None:
        """The same, if a script has written to parameters. After the ranks agreed on that."""
        if self._optimizer.is_apart and self._model.was_edited:
            for master in self._masters:
                master.take_edits()
            self._change(self._optimizer.average_exactly)

    @torch.no_grad()
    def _change(self, change: Callable[[], None]) -> None:
        kept = self._keep_frozen(self._masters, self._frozen)
        change()
        kept.restore()
        for master in self._masters:
            master.write_compute()

    def _frozen_now(self) -> Ids:
        return set().union(*(frozen_ids(master.params) for master in self._masters))


__all__ = ["Apart", "Ids"]
