"""When each action of a table runs, if every action takes a known time.

The simulation needs neither torch nor processes. It finds tables that can never finish.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from .actions import (
    FLOW_BACK,
    MAKES_GRADIENTS,
    SENDS,
    Action,
    DeadlockError,
    Op,
    ScheduleError,
    Table,
)
from .lowering import received

MOST_WAITS = 8
"""A message names no more ranks that wait."""


@final
@dataclass(frozen=True)
class Costs:
    """Seconds of one compute action on one virtual stage, and of one message. BACKWARD takes input + weight."""

    forward: float
    input: float
    weight: float
    message: float = 0.0

    def divided(self, num_chunks: int) -> Costs:
        """The costs of one of `num_chunks` equal chunks; a message stays as long."""
        return Costs(
            self.forward / num_chunks,
            self.input / num_chunks,
            self.weight / num_chunks,
            self.message,
        )

    def of(self, op: Op) -> float:
        """Seconds that `op` keeps its rank busy; a message keeps none."""
        return {
            Op.FORWARD: self.forward,
            Op.INPUT: self.input,
            Op.WEIGHT: self.weight,
            Op.BACKWARD: self.input + self.weight,
        }.get(op, 0.0)


@final
@dataclass(frozen=True)
class Simulation:
    """The times of a table, in seconds: `starts[rank][i]` and `ends[rank][i]` of `table.rows[rank][i]`."""

    table: Table
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def makespan_seconds(self) -> float:
        """The seconds from the start of the step to the end of its last action."""
        return max((end for row in self.ends for end in row), default=0.0)

    def busy_seconds(self, rank: int) -> float:
        """The seconds in which `rank` computes."""
        return sum(self.ends[rank]) - sum(self.starts[rank])

    def bubble_of(self, rank: int) -> float:
        """The part of the step in which `rank` does not compute, 0 to 1."""
        return 1 - self.busy_seconds(rank) / self.makespan_seconds

    @property
    def bubble(self) -> float:
        """The part of the step in which the busiest rank does not compute."""
        return min(self.bubble_of(rank) for rank in range(len(self.table.rows)))

    def peak_activations(self, rank: int) -> int:
        """The most micro-batches, counted for each chunk, between FORWARD and the gradient of their weights."""
        held = peak = 0
        for action in self.table.rows[rank]:
            held += (action.op is Op.FORWARD) - (action.op in MAKES_GRADIENTS)
            peak = max(peak, held)
        return peak


def simulate(table: Table, costs: Costs | Sequence[Costs]) -> Simulation:
    """Runs `table`, which has its messages, in simulated time.

    Args:
        table: the actions of a step.
        costs: the same for every virtual stage, or one for each.

    A send takes no time of its rank. Its message starts when both sides have started it, and arrives
    `costs.message` of the sender later. A compute action starts when its rank has ended the action before, and
    its values have arrived.

    Raises:
        ScheduleError: there is not one cost for each stage.
        DeadlockError: an action waits for a value that is never made or never sent.
    """
    num_stages = table.placement.num_stages
    by_stage = (costs,) * num_stages if isinstance(costs, Costs) else tuple(costs)
    if len(by_stage) != num_stages:
        raise ScheduleError(
            f"costs are given for {len(by_stage)} stages, but the table has {num_stages}; give one for each"
        )
    return _Run(table, by_stage).finish()


@final
class _Run:
    def __init__(self, table: Table, costs: tuple[Costs, ...]) -> None:
        self._table, self._costs = table, costs
        self._seconds = [{op: cost.of(op) for op in Op} for cost in costs]
        num_ranks = len(table.rows)
        self._starts: list[list[float]] = [[] for _ in range(num_ranks)]
        self._ends: list[list[float]] = [[] for _ in range(num_ranks)]
        self._clocks = [0.0] * num_ranks
        self._done: dict[Action, float] = {}
        """Actions that have run, and the second at which they ended."""
        self._waiting: dict[Action, list[int]] = defaultdict(list)
        """Ranks that wait until the action has run."""

    def finish(self) -> Simulation:
        ready = list(range(len(self._table.rows)))
        while ready:
            ready += self._advance(ready.pop())
        if self._waiting:
            raise DeadlockError(self._complaint())
        return Simulation(
            self._table, tuple(map(tuple, self._starts)), tuple(map(tuple, self._ends))
        )

    def _advance(self, rank: int) -> list[int]:
        """Runs the actions of `rank` until one has to wait; returns the ranks that need not wait any more."""
        row = self._table.rows[rank]
        woken: list[int] = []
        while (position := len(self._starts[rank])) < len(row):
            action, start = row[position], self._clocks[rank]
            for value in self._needs(action):
                if value not in self._done:
                    self._waiting[value].append(rank)
                    return woken
                start = max(start, self._arrival(value))
            end = start + self._seconds[action.stage][action.op]
            self._starts[rank].append(start)
            self._ends[rank].append(end)
            self._clocks[rank] = self._done[action] = end
            woken += self._waiting.pop(action, [])
        return woken

    def _needs(self, action: Action) -> list[Action]:
        """What must have run before `action`, the receive first where there is one."""
        op, stage, micro_batch = action.op, action.stage, action.micro_batch
        placement = self._table.placement
        if op is Op.FORWARD:
            return [] if stage == 0 else self._values(Op.RECEIVE_F, action, stage - 1)
        if op in FLOW_BACK:
            needs = [Action(Op.FORWARD, stage, micro_batch)]
            last = stage == placement.num_stages - 1
            return needs if last else needs + self._values(Op.RECEIVE_B, action, stage + 1)
        if op is Op.WEIGHT:
            return [Action(Op.INPUT, stage, micro_batch)]
        if op is Op.SEND_F:
            return [Action(Op.FORWARD, stage, micro_batch)]
        if op is Op.SEND_B:
            return [self._maker(stage, micro_batch)]
        return []

    def _values(self, receive: Op, action: Action, neighbour: int) -> list[Action]:
        """What brings the values of stage `neighbour`: a message, or on the same rank what computes them."""
        placement, micro_batch = self._table.placement, action.micro_batch
        if placement.rank_of(neighbour) == placement.rank_of(action.stage):
            made = (
                Action(Op.FORWARD, neighbour, micro_batch)
                if receive is Op.RECEIVE_F
                else self._maker(neighbour, micro_batch)
            )
            return [made]
        send = Op.SEND_F if receive is Op.RECEIVE_F else Op.SEND_B
        return [Action(receive, action.stage, micro_batch), Action(send, neighbour, micro_batch)]

    def _maker(self, stage: int, micro_batch: int) -> Action:
        """What computes the gradient of the inputs: a whole backward, or the first part of a split one."""
        whole = Action(Op.BACKWARD, stage, micro_batch)
        return whole if whole in self._done else Action(Op.INPUT, stage, micro_batch)

    def _arrival(self, value: Action) -> float:
        """The second from which a compute action of the receiver can use `value`."""
        if value.op in SENDS:
            posted = self._done[received(value)]
            return max(posted, self._done[value]) + self._costs[value.stage].message
        return self._done[value]

    def _complaint(self) -> str:
        waits = []
        for value, ranks in self._waiting.items():
            for rank in ranks:
                action = self._table.rows[rank][len(self._starts[rank])]
                waits.append((rank, f"rank {rank} waits in {action} for {self._described(value)}"))
        text = ", ".join(text for _, text in sorted(waits)[:MOST_WAITS])
        return f"the schedule can never finish: {text}; change the order of these actions"

    def _described(self, value: Action) -> str:
        if value.op in SENDS:
            what = "outputs" if value.op is Op.SEND_F else "gradient"
            rank = self._table.placement.rank_of(value.stage)
            return f"the {what} of micro-batch {value.micro_batch} from stage {value.stage} on rank {rank}"
        return f"its own {value}"
