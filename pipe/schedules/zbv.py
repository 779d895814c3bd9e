"""ZBV: two chunks in the shape of a V, with split backwards, in the memory of 1F1B.

Sources: Qi et al., Zero Bubble Pipeline Parallelism, 2023, https://arxiv.org/abs/2401.10241, section 6; Qi
et al., Pipeline Parallelism with Controllable Memory, 2024, https://arxiv.org/abs/2405.15362. A rank holds
a stage of each arm of the V: `down` is its stage of the first arm, `up` that of the second. The forward of
a micro-batch ends on the first rank, and its backward starts there at once.
"""

from __future__ import annotations

from .actions import Order, Placement
from .rows import RankOrder


def zbv(placement: Placement, num_micro_batches: int) -> list[Order]:
    """The order of each rank. Any number of micro-batches works; few leave the pipeline partly empty."""
    num_full = max(
        num_micro_batches, 2 * placement.num_ranks - 1
    )  # the least that fills the pipeline
    orders = []
    for rank in range(placement.num_ranks):
        full = _order(placement.num_ranks, rank, num_full)
        orders.append([action for action in full if action.micro_batch < num_micro_batches])
    return orders


def _order(num_ranks: int, rank: int, num_micro_batches: int) -> Order:
    row, down, up = RankOrder(), rank, 2 * num_ranks - 1 - rank
    later = num_ranks - rank
    for _ in range(2 * later - 1):
        row.forward(down)
    for _ in range(rank):
        row.forward(up)
        row.forward(down)
    for _ in range(later):
        row.forward(up)
        row.input_and_weight(up)
    while row.num_forwards(up) < num_micro_batches:
        if row.num_forwards(down) < num_micro_batches:
            row.forward(down)
        row.input_and_weight(down)
        row.forward(up)
        row.input_and_weight(up)
    _drain(row, rank, later, down, up)
    return row.actions


def _drain(row: RankOrder, rank: int, later: int, down: int, up: int) -> None:
    """The inputs' gradients that are left, as early as possible; the weights' fill the waits and the end."""
    for _ in range(rank):
        row.input(down)
        row.input(up)
    for _ in range(later):
        row.input(down)
        row.weight_of(down)
    while row.unweighted:
        row.weight_of(up if any(stage == up for stage, _ in row.unweighted) else down)
