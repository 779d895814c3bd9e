"""GPipe: all forwards, then all backwards.

Source: Huang et al., GPipe, 2018, https://arxiv.org/abs/1811.06965, section 2.2. All micro-batches are in
flight at once. The bubble is (p - 1) / (m + p - 1).
"""

from __future__ import annotations

from .actions import Action, Op, Order, Placement


def gpipe(placement: Placement, num_micro_batches: int) -> list[Order]:
    """The order of each rank; any number of micro-batches works."""
    ops = (Op.FORWARD, Op.BACKWARD)
    return [
        [Action(op, rank, micro_batch) for op in ops for micro_batch in range(num_micro_batches)]
        for rank in range(placement.num_ranks)
    ]
