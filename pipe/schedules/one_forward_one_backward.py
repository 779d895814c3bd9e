"""1F1B: each stage alternates one forward and one backward once its first gradient can arrive.

Source: Narayanan et al., PipeDream-Flush, 2020, https://arxiv.org/abs/2006.09503. Stage s of p has min(m, p
- s) micro-batches in flight. The bubble is that of GPipe, (p - 1) / (m + p - 1).
"""

from __future__ import annotations

from .actions import Order, Placement
from .rows import RankOrder


def one_forward_one_backward(placement: Placement, num_micro_batches: int) -> list[Order]:
    """The order of each rank."""
    orders = []
    for rank in range(placement.num_ranks):
        row = RankOrder()
        num_warm_up = min(placement.num_ranks - 1 - rank, num_micro_batches)
        for _ in range(num_warm_up):
            row.forward(rank)
        for _ in range(num_micro_batches - num_warm_up):
            row.forward(rank)
            row.backward(rank)
        for _ in range(num_warm_up):
            row.backward(rank)
        orders.append(row.actions)
    return orders
