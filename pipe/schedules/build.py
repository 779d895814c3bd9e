"""Every schedule by its name, and the table of one for given numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from .actions import Action, Op, Order, Placement, ScheduleError, Table
from .lowering import with_messages
from .orders import (
    dualpipev,
    gpipe,
    interleaved_1f1b,
    one_forward_one_backward,
    zbv,
    zero_bubble,
)
from .simulation import Costs, simulate


@final
@dataclass(frozen=True)
class PipelineSchedule:
    """A named order and the numbers that it works for."""

    name: str
    orders: Callable[[Placement, int], list[Order]]
    num_chunks: tuple[int, ...] = (1,)
    """The chunks a rank can have, the default first; a last 0 allows any larger number."""
    is_v: bool = False
    micro_batches_a_rank: int = 1
    """The least number of micro-batches, for each rank. 0: one micro-batch is enough for all ranks."""

    def placement(self, num_ranks: int, num_chunks: int = 0) -> Placement:
        """The placement of the stages; 0 chunks take the schedule's own number."""
        num_chunks = num_chunks or self.num_chunks[0]
        more = self.num_chunks[-1] == 0 and num_chunks > self.num_chunks[0]
        if num_chunks not in self.num_chunks and not more:
            least = "at least " if self.num_chunks[-1] == 0 else ""
            raise ScheduleError(
                f"{self.name} has {least}{self.num_chunks[0]} chunks a rank, not {num_chunks}; "
                "set pipeline.chunks to that or leave it out"
            )
        return Placement(num_ranks, num_chunks, self.is_v)

    def check(self, num_ranks: int, num_micro_batches: int) -> None:
        """Raises ScheduleError where the schedule cannot run this number of micro-batches."""
        least = max(1, self.micro_batches_a_rank * num_ranks)
        if num_micro_batches < least:
            raise ScheduleError(
                f"{self.name} on {num_ranks} pipeline ranks needs at least {least} micro-batches, not "
                f"{num_micro_batches}; raise gradient_accumulation_steps, or set pipeline.schedule to gpipe"
            )


_ALL = (
    PipelineSchedule("gpipe", gpipe, micro_batches_a_rank=0),
    PipelineSchedule("1f1b", one_forward_one_backward),
    PipelineSchedule("interleaved_1f1b", interleaved_1f1b, num_chunks=(2, 0)),
    PipelineSchedule("zero_bubble", zero_bubble),
    PipelineSchedule("zbv", zbv, num_chunks=(2,), is_v=True),
    PipelineSchedule("dualpipev", dualpipev, num_chunks=(2,), is_v=True, micro_batches_a_rank=2),
)
SCHEDULES: dict[str, PipelineSchedule] = {schedule.name: schedule for schedule in _ALL}


def named(schedule: str) -> PipelineSchedule:
    """The schedule of this name."""
    if schedule not in SCHEDULES:
        raise ScheduleError(
            f"pipeline.schedule is {schedule!r}; it must be one of {', '.join(SCHEDULES)}"
        )
    return SCHEDULES[schedule]


def build_table(
    schedule: str, num_ranks: int, num_micro_batches: int, num_chunks: int = 0
) -> Table:
    """The table of a step, with its messages.

    Args:
        schedule: a name of `SCHEDULES`.
        num_ranks: pipeline ranks.
        num_micro_batches: micro-batches of a step.
        num_chunks: virtual stages a rank; 0 takes the schedule's own number.

    Raises:
        ScheduleError: the schedule is unknown or cannot work with these numbers.
    """
    chosen = named(schedule)
    placement = chosen.placement(num_ranks, num_chunks)
    chosen.check(num_ranks, num_micro_batches)
    orders = [_joined(order) for order in chosen.orders(placement, num_micro_batches)]
    return with_messages(orders, placement, num_micro_batches)


def build_forward_table(placement: Placement, num_micro_batches: int) -> Table:
    """The table of an evaluation: forwards alone, of any number of micro-batches, with their messages."""
    if num_micro_batches < 1:
        raise ScheduleError(f"{num_micro_batches} micro-batches are no step; at least 1 is needed")
    round_size = placement.num_ranks
    orders = []
    for rank in range(placement.num_ranks):
        order = []
        for start in range(0, num_micro_batches, round_size):
            batches = range(start, min(start + round_size, num_micro_batches))
            order += [
                Action(Op.FORWARD, stage, micro_batch)
                for stage in placement.stages_of(rank)
                for micro_batch in batches
            ]
        orders.append(order)
    return with_messages(orders, placement, num_micro_batches)


def _joined(order: Order) -> Order:
    """`order` where INPUT and WEIGHT of the first stage, one directly after the other, are one BACKWARD.

    The first stage sends no gradient, so no other rank gains from the split.
    """
    result: Order = []
    for action in order:
        split = Action(Op.INPUT, 0, action.micro_batch)
        if action.op is Op.WEIGHT and action.stage == 0 and result[-1] == split:
            result[-1] = Action(Op.BACKWARD, 0, action.micro_batch)
        else:
            result.append(action)
    return result


def choose(
    costs: Costs | Sequence[Costs],
    num_ranks: int,
    num_micro_batches: int,
    max_stages: int | None = None,
    num_chunks: int = 0,
) -> str:
    """The name of the schedule with the shortest step; of equal ones that with the least activations.

    Args:
        costs: seconds of all virtual stages of a rank together, the same for every rank or one for each. A
            chunk takes an equal share of its rank's.
        num_ranks: pipeline ranks.
        num_micro_batches: micro-batches of a step. Schedules that cannot run this number are left out.
        max_stages: those with more virtual stages are left out; None: any number.
        num_chunks: virtual stages a rank; those that cannot have so many are left out. 0: their own number.
    """
    by_rank = (costs,) * num_ranks if isinstance(costs, Costs) else tuple(costs)
    if len(by_rank) != num_ranks:
        raise ScheduleError(
            f"costs are given for {len(by_rank)} ranks, but the pipeline has {num_ranks}; give one for each"
        )
    found: dict[str, tuple[float, float]] = {}
    for name, schedule in SCHEDULES.items():
        if num_micro_batches < max(1, schedule.micro_batches_a_rank * num_ranks):
            continue
        try:
            table = build_table(name, num_ranks, num_micro_batches, num_chunks)
        except ScheduleError:  # another number of chunks
            continue
        if max_stages is not None and table.placement.num_stages > max_stages:
            continue
        placement = table.placement
        ranks = map(placement.rank_of, range(placement.num_stages))
        run = simulate(table, [by_rank[rank].divided(placement.num_chunks) for rank in ranks])
        peak = max(run.peak_activations(rank) for rank in range(num_ranks))
        found[name] = run.makespan_seconds, peak / placement.num_chunks
    if not found:  # more ranks than layers: the cut says so
        return "interleaved_1f1b" if num_chunks > 1 else "1f1b"
    shortest = min(seconds for seconds, _ in found.values()) * (1 + 1e-9)
    equal = [name for name, (seconds, _) in found.items() if seconds <= shortest]
    return min(equal, key=lambda name: found[name][1])
