"""A row under construction: it counts the micro-batches of each stage."""

from __future__ import annotations

from collections import Counter, deque
from typing import final

from .actions import Action, Op, Order


@final
class RankOrder:
    """The order of one rank. Each call adds the next micro-batch of that stage."""

    def __init__(self) -> None:
        self.actions: Order = []
        self.unweighted: deque[tuple[int, int]] = deque()
        """Stage and micro-batch of every INPUT whose WEIGHT has not been added, the oldest first."""
        self._next: Counter[tuple[str, int]] = Counter()

    def forward(self, stage: int) -> None:
        self._add(Op.FORWARD, stage)

    def input(self, stage: int) -> None:
        self.unweighted.append((stage, self._add(Op.INPUT, stage)))

    def backward(self, stage: int) -> None:
        self._add(Op.BACKWARD, stage)

    def weight(self) -> None:
        """Adds the oldest WEIGHT that is left, if any."""
        if self.unweighted:
            self.actions.append(Action(Op.WEIGHT, *self.unweighted.popleft()))

    def weight_of(self, stage: int) -> None:
        """Adds the oldest WEIGHT that is left of `stage`."""
        oldest = next(entry for entry in self.unweighted if entry[0] == stage)
        self.unweighted.remove(oldest)
        self.actions.append(Action(Op.WEIGHT, *oldest))

    def input_and_weight(self, stage: int) -> None:
        """INPUT, and the WEIGHT of the same micro-batch directly after it."""
        micro_batch = self._add(Op.INPUT, stage)
        self.actions.append(Action(Op.WEIGHT, stage, micro_batch))

    def num_forwards(self, stage: int) -> int:
        """How many forwards of `stage` the row has."""
        return self._next["forward", stage]

    def _add(self, op: Op, stage: int) -> int:
        key = ("forward" if op is Op.FORWARD else "backward", stage)
        micro_batch = self._next[key]
        self._next[key] += 1
        self.actions.append(Action(op, stage, micro_batch))
        return micro_batch
