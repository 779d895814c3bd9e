"""Whether the orders of a step are complete: each forward once, each gradient once, each on its own rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .actions import FLOW_BACK, MAKES_GRADIENTS, Action, Op, Placement, ScheduleError

_PARTS = (
    ("forward", frozenset({Op.FORWARD})),
    ("gradient of the inputs", FLOW_BACK),
    ("gradient of the weights", MAKES_GRADIENTS),
)


def check_complete(
    orders: Sequence[Sequence[Action]], placement: Placement, num_micro_batches: int
) -> None:
    """Raises ScheduleError at the first action that is missing, repeated or on the wrong rank.

    BACKWARD counts as the gradient of the inputs and as that of the weights. Actions that compute nothing are
    ignored. `simulate` finds actions that wait forever.
    """
    for rank, order in enumerate(orders):
        counts = {name: Counter[tuple[int, int]]() for name, _ in _PARTS}
        for action in order:
            for name, ops in _PARTS:
                if action.op in ops:
                    counts[name][action.stage, action.micro_batch] += 1
        wanted = {(s, m) for s in placement.stages_of(rank) for m in range(num_micro_batches)}
        for name, count in counts.items():
            for stage, micro_batch in sorted(wanted | count.keys()):
                times = count[stage, micro_batch]
                expected = int((stage, micro_batch) in wanted)
                if times != expected:
                    raise ScheduleError(
                        f"rank {rank} computes the {name} of micro-batch {micro_batch} on stage {stage} "
                        f"{_times(times)}; it must do so {_times(expected)}"
                    )


def _times(number: int) -> str:
    return {0: "never", 1: "once"}.get(number, f"{number} times")
