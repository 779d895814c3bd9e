"""Brings the ranks together where their optimizer lets them step alone for a while.

A script's write to a parameter in between is not lost: then the ranks take the exact mean of their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch

from ...ops.optim.shard_optimizer import ShardOptimizer
from .frozen import FrozenValues
from .master import Master
from .sharded_model import ShardedModel


@final
class Apart:
    """The masters of ranks whose `optimizer` may let them be apart."""

    def __init__(
        self,
        optimizer: ShardOptimizer,
        model: ShardedModel,
        masters: Sequence[Master],
        keep_frozen: Callable[[Sequence[Master]], FrozenValues],
    ) -> None:
        """keep_frozen: saves the values and states that an update must not change."""
        self._optimizer = optimizer
        self._model = model
        self._masters = masters
        self._keep_frozen = keep_frozen

    def synchronise(self) -> None:
        """Bring the ranks together, if they are apart. For all ranks."""
        if self._optimizer.is_apart:
            self._model.agree_on_edits()
            self.join_written()
        if self._optimizer.is_apart:
            self._change(self._optimizer.synchronise)

    def join_written(self) -> None:
        """The same, if a script has written to parameters. After the ranks agreed on that."""
        if self._optimizer.is_apart and self._model.was_edited:
            for master in self._masters:
                master.take_edits()
            self._change(self._optimizer.average_exactly)

    @torch.no_grad()
    def _change(self, change: Callable[[], None]) -> None:
        kept = self._keep_frozen(self._masters)
        change()
        kept.restore()
        for master in self._masters:
            master.write_compute()


__all__ = ["Apart"]
