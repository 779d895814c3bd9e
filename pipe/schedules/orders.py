"""The orders in which the ranks of a pipeline compute: one function a schedule, which returns one order a rank.

Each function says its source, with its bubble: the share of a step in which a rank waits. There are p ranks and
m micro-batches; stages are counted from 0.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import final

from .actions import Action, Op, Order, Placement


@final
class RankOrder:
    """The order of one rank under construction. Each call adds the next micro-batch of that stage."""

    def __init__(self) -> None:
        self.actions: Order = []
        self.pending_weights: deque[tuple[int, int]] = deque()
        """Stage and micro-batch of every INPUT whose WEIGHT has not been added, the oldest first."""
        self._next: Counter[tuple[str, int]] = Counter()

    def forward(self, stage: int) -> None:
        self._add(Op.FORWARD, stage)

    def input(self, stage: int) -> None:
        self.pending_weights.append((stage, self._add(Op.INPUT, stage)))

    def backward(self, stage: int) -> None:
        self._add(Op.BACKWARD, stage)

    def weight(self) -> None:
        """Adds the oldest WEIGHT that is left, if any."""
        if self.pending_weights:
            self.actions.append(Action(Op.WEIGHT, *self.pending_weights.popleft()))

    def weight_of(self, stage: int) -> None:
        """Adds the oldest WEIGHT that is left of `stage`."""
        oldest = next(entry for entry in self.pending_weights if entry[0] == stage)
        self.pending_weights.remove(oldest)
        self.actions.append(Action(Op.WEIGHT, *oldest))

    def input_and_weight(self, stage: int) -> None:
        """INPUT, and the WEIGHT of the same micro-batch directly after it."""
        micro_batch = self._add(Op.INPUT, stage)
        self.actions.append(Action(Op.WEIGHT, stage, micro_batch))

    def num_forwards(self, stage: int) -> int:
        """How many forwards of `stage` the row has."""
        return self._next["forward", stage]

    def _add(self, op: Op, stage: int) -> int:
        key = ("forward" if op is Op.FORWARD else "backward", stage)
        micro_batch = self._next[key]
        self._next[key] += 1
        self.actions.append(Action(op, stage, micro_batch))
        return micro_batch


def gpipe(placement: Placement, num_micro_batches: int) -> list[Order]:
    """GPipe: all forwards, then all backwards. Any number of micro-batches works.

    Source: Huang et al., GPipe, 2018, https://arxiv.org/abs/1811.06965, section 2.2. All micro-batches are in
    flight at once. The bubble is (p - 1) / (m + p - 1).
    """
    ops = (Op.FORWARD, Op.BACKWARD)
    return [
        [Action(op, rank, micro_batch) for op in ops for micro_batch in range(num_micro_batches)]
        for rank in range(placement.num_ranks)
    ]


def one_forward_one_backward(placement: Placement, num_micro_batches: int) -> list[Order]:
    """1F1B: each stage alternates one forward and one backward once its first gradient can arrive.

    Source: Narayanan et al., PipeDream-Flush, 2020, https://arxiv.org/abs/2006.09503. Stage s of p has min(m, p
    - s) micro-batches in flight. The bubble is that of GPipe, (p - 1) / (m + p - 1).
    """
    orders = []
    for rank in range(placement.num_ranks):
        row, num_warm_up = _warmed_up(placement.num_ranks, rank, num_micro_batches)
        for _ in range(num_micro_batches - num_warm_up):
            row.forward(rank)
            row.backward(rank)
        for _ in range(num_warm_up):
            row.backward(rank)
        orders.append(row.actions)
    return orders


def _warmed_up(num_ranks: int, rank: int, num_micro_batches: int) -> tuple[RankOrder, int]:
    """The forwards of a rank before its first gradient can arrive, and how many they are."""
    row, num_forwards = RankOrder(), min(num_ranks - 1 - rank, num_micro_batches)
    for _ in range(num_forwards):
        row.forward(rank)
    return row, num_forwards


def interleaved_1f1b(placement: Placement, num_micro_batches: int) -> list[Order]:
    """Interleaved 1F1B: several chunks a rank, so that a smaller part of the model fills the pipeline.

    Source: Narayanan et al., Megatron-LM, 2021, https://arxiv.org/abs/2104.04473, section 2.2.2. The bubble of
    v chunks is (p - 1) / (v * m + p - 1) where m is a multiple of p. Unlike in the paper, any m >= p works: the
    rounds then have more than p micro-batches, and differ by at most one.
    """
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


def zero_bubble(placement: Placement, num_micro_batches: int) -> list[Order]:
    """Zero bubble, ZB-H1: 1F1B whose weight gradients fill the wait at the end of the step.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, https://arxiv.org/abs/2401.10241, section 2.
    Stage s delays s weight gradients, so every stage holds the activations of at most p micro-batches: as many
    as the first stage of 1F1B. The bubble lasts (p - 1) * (F + I - W) instead of (p - 1) * (F + I + W).
    """
    orders = []
    for rank in range(placement.num_ranks):
        row, _ = _warmed_up(placement.num_ranks, rank, num_micro_batches)
        for micro_batch in range(num_micro_batches):
            if row.num_forwards(rank) < num_micro_batches:
                row.forward(rank)
            row.input(rank)
            if micro_batch >= rank:
                row.weight()
        while row.pending_weights:
            row.weight()
        orders.append(row.actions)
    return orders


def zbv(placement: Placement, num_micro_batches: int) -> list[Order]:
    """ZBV: two chunks in the shape of a V, with split backwards, in the memory of 1F1B.

    Any number of micro-batches works; few leave the pipeline partly empty.

    Sources: Qi et al., Zero Bubble Pipeline Parallelism, 2023, https://arxiv.org/abs/2401.10241, section 6; Qi
    et al., Pipeline Parallelism with Controllable Memory, 2024, https://arxiv.org/abs/2405.15362. A rank holds
    a stage of each arm of the V: `down` is its stage of the first arm, `up` that of the second. The forward of
    a micro-batch ends on the first rank, and its backward starts there at once.
    """
    least_to_fill = 2 * placement.num_ranks - 1
    num_full = max(num_micro_batches, least_to_fill)
    orders = []
    for rank in range(placement.num_ranks):
        full = _zbv_order(placement.num_ranks, rank, num_full)
        orders.append([action for action in full if action.micro_batch < num_micro_batches])
    return orders


def _zbv_order(num_ranks: int, rank: int, num_micro_batches: int) -> Order:
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
    _zbv_drain(row, rank, later, down, up)
    return row.actions


def _zbv_drain(row: RankOrder, rank: int, later: int, down: int, up: int) -> None:
    """The inputs' gradients that are left, as early as possible; the weights' fill the waits and the end."""
    for _ in range(rank):
        row.input(down)
        row.input(up)
    for _ in range(later):
        row.input(down)
        row.weight_of(down)
    while row.pending_weights:
        row.weight_of(up if any(stage == up for stage, _ in row.pending_weights) else down)


def dualpipev(placement: Placement, num_micro_batches: int) -> list[Order]:
    """DualPipeV: two chunks in the shape of a V; a forward of one is next to a backward of the other.

    It needs at least two micro-batches a rank.

    Source: DeepSeek, https://github.com/deepseek-ai/DualPipe, the eight steps of DualPipeV. `down` is the
    rank's stage of the first arm of the V, `up` that of the second. A forward and its paired backward run one
    after the other here, not at the same time.
    """
    orders = []
    for rank in range(placement.num_ranks):
        row = RankOrder()
        _dualpipev_fill(row, placement, rank)
        num_pairs = num_micro_batches - 2 * placement.num_ranks + rank + 1
        _dualpipev_overlap(row, placement, rank, num_pairs)
        _dualpipev_drain(row, placement, rank)
        orders.append(row.actions)
    return orders


def _dualpipev_fill(row: RankOrder, placement: Placement, rank: int) -> None:
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


def _dualpipev_overlap(row: RankOrder, placement: Placement, rank: int, num_pairs: int) -> None:
    """Steps 4 and 5: pairs of a forward and a backward, until no forward is left."""
    down, up = placement.stages_of(rank)
    for pair in range(num_pairs + placement.num_ranks - 1 - rank):
        if pair < num_pairs:
            row.forward(down)
        row.backward(up)
        row.forward(up)
        row.backward(down)


def _dualpipev_drain(row: RankOrder, placement: Placement, rank: int) -> None:
    """Steps 6 to 8: the backwards that are left; the second half of them is split."""
    down, up = placement.stages_of(rank)
    num_whole = rank + 1  # of the 2 * (rank + 1) backwards of step 6
    for position in range(2 * (rank + 1)):
        stage = down if position % 2 else up
        (row.backward if position < num_whole else row.input)(stage)
    for _ in range(placement.num_ranks - 1 - rank):
        row.weight()
        row.input(down)
    while row.pending_weights:
        row.weight()
