"""Zero bubble, ZB-H1: 1F1B whose weight gradients fill the wait at the end of the step.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, https://arxiv.org/abs/2401.10241, section 2.
Stage s delays s weight gradients, so every stage holds the activations of at most p micro-batches: as many
as the first stage of 1F1B. The bubble lasts (p - 1) * (F + I - W) instead of (p - 1) * (F + I + W).
"""

from __future__ import annotations

from .actions import Order, Placement
from .rows import RankOrder


def zero_bubble(placement: Placement, num_micro_batches: int) -> list[Order]:
    """The order of each rank."""
    orders = []
    for rank in range(placement.num_ranks):
        row = RankOrder()
        num_warm_up = min(placement.num_ranks - 1 - rank, num_micro_batches)
        for _ in range(num_warm_up):
            row.forward(rank)
        for micro_batch in range(num_micro_batches):
            if row.num_forwards(rank) < num_micro_batches:
                row.forward(rank)
            row.input(rank)
            if micro_batch >= rank:
                row.weight()
        while row.unweighted:
            row.weight()
        orders.append(row.actions)
    return orders
