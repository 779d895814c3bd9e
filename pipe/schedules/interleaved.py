"""Interleaved 1F1B: several chunks a rank, so that a smaller part of the model fills and drains the pipeline.

Source: Narayanan et al., Megatron-LM, 2021, https://arxiv.org/abs/2104.04473, section 2.2.2. The bubble of
v chunks is (p - 1) / (v * m + p - 1) where m is a multiple of p. Unlike in the paper, any m >= p works: the
rounds then have more than p micro-batches, and differ by at most one.
"""

from __future__ import annotations

from .actions import Action, Op, Order, Placement


def interleaved_1f1b(placement: Placement, num_micro_batches: int) -> list[Order]:
    """The order of each rank."""
    rounds = _rounds(placement.num_ranks, num_micro_batches)
    orders = []
    for rank in range(placement.num_ranks):
        stages = placement.stages_of(rank)
        forwards = [Action(Op.FORWARD, s, m) for r in rounds for s in stages for m in r]
        backwards = [Action(Op.BACKWARD, s, m) for r in rounds for s in reversed(stages) for m in r]
        later_ranks = placement.num_ranks - 1 - rank
        num_warm_up = (placement.num_chunks - 1) * len(rounds[0]) + 2 * later_ranks
        num_warm_up = min(num_warm_up, len(forwards))
        order = forwards[:num_warm_up]
        for forward, backward in zip(forwards[num_warm_up:], backwards, strict=False):
            order += [forward, backward]
        orders.append(order + backwards[len(forwards) - num_warm_up :])
    return orders


def _rounds(num_ranks: int, num_micro_batches: int) -> list[range]:
    """Consecutive micro-batches that pass one chunk before the next: at least p each, the long ones first."""
    num_rounds = max(1, num_micro_batches // num_ranks)
    size, num_longer = divmod(num_micro_batches, num_rounds)
    starts = [size * i + min(i, num_longer) for i in range(num_rounds + 1)]
    return [range(start, end) for start, end in zip(starts, starts[1:], strict=False)]
