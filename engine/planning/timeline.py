"""The schedule of a pipeline in simulated time, and the activations that each rank holds in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import nn

from ...pipe.cut.costs import sum_of
from ...pipe.schedules.actions import MAKES_GRADIENTS, Op, Table
from ...pipe.schedules.simulation import Costs, Simulation, simulate


@final
@dataclass(frozen=True)
class Timeline:
    """One step.

    costs: multiplications of each virtual stage relative to the mean; equal where they are not known.
    run: with these costs. bubble: the part of the step in which the busiest rank waits.
    equal_bubble: the same where all stages are equally fast.
    """

    table: Table
    costs: tuple[float, ...]
    run: Simulation
    bubble: float
    equal_bubble: float


def timeline(table: Table, costs: Sequence[float]) -> Timeline:
    """Simulate `table`: forward, gradient of inputs and gradient of weights take a stage's cost each.

    Messages take no time.
    """
    mean = sum(costs) / len(costs)
    relative = tuple(cost / mean if mean else 1.0 for cost in costs)
    run = simulate(table, [Costs(cost, cost, cost) for cost in relative])
    equal = simulate(table, Costs(1.0, 1.0, 1.0))
    return Timeline(table, relative, run, run.bubble, equal.bubble)


def operations(
    blocks: Mapping[int, Sequence[nn.Module]], first: Sequence[nn.Module], last: Sequence[nn.Module]
) -> list[float]:
    """Multiplications by parameters for a token, on each virtual stage; see `size_of`.

    first, last: modules outside of the blocks that run on the first and on the last stage.
    """
    found = {stage: float(sum_of(own).operations) for stage, own in sorted(blocks.items())}
    found[min(found)] += sum_of(first).operations
    found[max(found)] += sum_of(last).operations
    return list(found.values())


def peak_bytes(table: Table, rank: int, held: Mapping[int, int]) -> int:
    """The most bytes of activations on a pipeline rank.

    held: virtual stage -> bytes that one micro-batch keeps from its forward to its gradients of the weights.
    """
    now = peak = 0
    for action in table.rows[rank]:
        if action.op is Op.FORWARD:
            now += held[action.stage]
        elif action.op in MAKES_GRADIENTS:
            now -= held[action.stage]
        peak = max(peak, now)
    return peak


__all__ = ["Timeline", "operations", "peak_bytes", "timeline"]
