"""DualPipeV: two chunks in the shape of a V; a forward of one is next to a backward of the other.

Source: DeepSeek, https://github.com/deepseek-ai/DualPipe, the eight steps of DualPipeV. `down` is the
rank's stage of the first arm of the V, `up` that of the second. A forward and its paired backward run one
after the other here, not at the same time.
"""

from __future__ import annotations

from .actions import Order, Placement
from .rows import RankOrder


def dualpipev(placement: Placement, num_micro_batches: int) -> list[Order]:
    """The order of each rank, for at least two micro-batches a rank."""
    orders = []
    for rank in range(placement.num_ranks):
        row = RankOrder()
        _fill(row, placement, rank)
        num_pairs = num_micro_batches - 2 * placement.num_ranks + rank + 1
        _overlap(row, placement, rank, num_pairs)
        _drain(row, placement, rank)
        orders.append(row.actions)
    return orders


def _fill(row: RankOrder, placement: Placement, rank: int) -> None:
    """Steps 1 to 3: forwards until the first gradients arrive."""
    down, up = placement.stages_of(rank)
    later_ranks = placement.num_ranks - 1 - rank
    for _ in range(2 * later_ranks):
        row.forward(down)
    for _ in range(rank + 1):
        row.forward(down)
        row.forward(up)
    for _ in range(later_ranks):
        row.input(up)
        row.weight()
        row.forward(up)


def _overlap(row: RankOrder, placement: Placement, rank: int, num_pairs: int) -> None:
    """Steps 4 and 5: pairs of a forward and a backward, until no forward is left."""
    down, up = placement.stages_of(rank)
    for pair in range(num_pairs + placement.num_ranks - 1 - rank):
        if pair < num_pairs:
            row.forward(down)
        row.backward(up)
        row.forward(up)
        row.backward(down)


def _drain(row: RankOrder, placement: Placement, rank: int) -> None:
    """Steps 6 to 8: the backwards that are left; the second half of them is split."""
    down, up = placement.stages_of(rank)
    num_whole = rank + 1  # of the 2 * (rank + 1) backwards of step 6
    for position in range(2 * (rank + 1)):
        stage = down if position % 2 else up
        (row.backward if position < num_whole else row.input)(stage)
    for _ in range(placement.num_ranks - 1 - rank):
        row.weight()
        row.input(down)
    while row.unweighted:
        row.weight()
