"""The schedule that a config asks for: by name or "auto", with the tables of its steps."""

from __future__ import annotations

from typing import final

from .actions import Op, Placement, Table
from .build import build_table, choose
from .simulation import Costs

AUTO = "auto"
EQUAL_COSTS = Costs(1.0, 1.0, 1.0)


@final
class SchedulePlan:
    """Makes the tables of one engine.

    "auto" takes the schedule with the shortest simulated step, where forward, the gradient of the inputs and
    that of the weights take equal times and messages none.
    """

    def __init__(
        self, schedule: str, stages: int, chunks: int, num_micro_batches: int, num_layers: int
    ) -> None:
        """
        Args:
            schedule: a name, or "auto".
            stages: ranks of the pipeline. chunks: of each rank; 0: the schedule's own number.
            num_micro_batches: of a step, for "auto".
            num_layers: of the model: "auto" takes no schedule with more stages.

        Raises:
            ScheduleError: the schedule cannot work with these numbers.
        """
        self._stages = stages
        self._chunks = chunks
        self._tables: dict[int, Table] = {}  # by the number of micro-batches
        if schedule == AUTO:
            schedule = choose(EQUAL_COSTS, stages, num_micro_batches, num_layers, chunks)
        self._schedule = schedule
        table = self.table(num_micro_batches)
        self.placement: Placement = table.placement
        self.splits_backward = any(a.op is Op.WEIGHT for row in table.rows for a in row)

    def table(self, num_micro_batches: int) -> Table:
        """The table of a training step, with its messages.

        Raises:
            ScheduleError: the schedule cannot run so many micro-batches.
        """
        found = self._tables.get(num_micro_batches)
        if found is None:
            found = build_table(self._schedule, self._stages, num_micro_batches, self._chunks)
            self._tables[num_micro_batches] = found
        return found


__all__ = ["SchedulePlan"]
