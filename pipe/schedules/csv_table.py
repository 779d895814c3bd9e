"""Reads a table from a CSV file in the format of torch.distributed.pipelining.

One line for each rank; a cell is a stage, an action and a micro-batch: 0F0, 1B3, 2I4, 2W4. Empty cells do
nothing. A pair (0F4;7B2)OVERLAP_F_B runs its actions one after the other. Cells of torch's tables with
messages, such as 1SEND_F0, 2RECV_F0, 0UNSHARD, 0RESHARD and 0REDUCE_GRAD, are read and dropped: xds adds
its own.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ...utils.quoting import printable, quoted
from ...utils.small_files import read_small_text
from .actions import (
    COMPUTE,
    FLOW_BACK,
    MAKES_GRADIENTS,
    Action,
    DeadlockError,
    Op,
    Order,
    Placement,
    ScheduleError,
    Table,
)
from .lowering import with_messages
from .simulation import Costs, simulate

MOST_TABLE_BYTES = 16 << 20  # 1,000 ranks with 1,000 micro-batches: 13 MB
_CELL = re.compile(r"([0-9]{1,9})([A-Z_]+?)([0-9]{0,9})")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_COMPUTE = {op.value: op for op in Op if op in COMPUTE}
_MESSAGES = frozenset({"SEND_F", "RECV_F", "SEND_B", "RECV_B"})
_WHOLE_STEP = frozenset({"UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"})
_PARTS = (
    ("forward", frozenset({Op.FORWARD})),
    ("gradient of the inputs", FLOW_BACK),
    ("gradient of the weights", MAKES_GRADIENTS),
)


def load_table(path: str | Path, num_ranks: int, num_micro_batches: int) -> Table:
    """The table in the file `path`, for these numbers of pipeline ranks and micro-batches.

    Raises:
        ScheduleError: the file cannot be read, a cell is wrong, or the table is for other numbers.
        DeadlockError: the ranks of the table would wait for each other forever.
    """
    source = f"pipeline.schedule: {printable(str(path))}"
    try:
        text = read_small_text(path, MOST_TABLE_BYTES)
    except OSError as error:
        raise ScheduleError(
            f"{source} cannot be read ({error.strerror}); name a CSV file of text"
        ) from None
    table = read_table(text, source)
    if table.placement.num_ranks != num_ranks:
        raise ScheduleError(
            f"{source} has {table.placement.num_ranks} lines, one for each rank, but pipeline.stages is "
            f"{num_ranks}; the two must be equal"
        )
    if table.num_micro_batches != num_micro_batches:
        raise ScheduleError(
            f"{source} has {table.num_micro_batches} micro-batches, but gradient_accumulation_steps is "
            f"{num_micro_batches}; the two must be equal"
        )
    return table


def read_table(text: str, source: str = "the table") -> Table:
    """The table, with messages, whose compute actions are in `text`. `source` starts every error message."""
    orders = _orders(text, source)
    try:
        placement = _placement(orders)
        num_micro_batches = 1 + max(action.micro_batch for order in orders for action in order)
        num_actions = sum(map(len, orders))
        if num_micro_batches > num_actions:  # refused here, before a list of all of them is made
            raise ScheduleError(
                f"micro-batch {num_micro_batches - 1} is in the table but not all before it; "
                "number them from 0"
            )
        check_complete(orders, placement, num_micro_batches)
        table = with_messages(orders, placement, num_micro_batches)
        simulate(table, Costs(1, 1, 1))
    except DeadlockError as error:
        raise DeadlockError(f"{source}: {error}") from None
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from None
    return table


def _orders(text: str, source: str) -> list[Order]:
    try:
        lines = list(csv.reader(io.StringIO(text.rstrip())))
    except csv.Error as error:
        raise ScheduleError(f"{source} is no CSV file: {error}") from None
    orders = []
    for row, line in enumerate(lines, 1):
        order: Order = []
        for column, cell in enumerate(line, 1):
            try:
                order += _actions(cell.strip())
            except ScheduleError as error:
                raise ScheduleError(f"{source}, row {row}, column {column}: {error}") from None
        if not order:
            raise ScheduleError(f"{source}, row {row}: rank {row - 1} computes nothing")
        orders.append(order)
    if not orders:
        raise ScheduleError(f"{source} is empty; write one line of actions for each rank")
    return orders


def _actions(cell: str) -> Order:
    """The compute actions of a cell."""
    if pair := _PAIR.fullmatch(cell):
        parts = [part.strip() for part in pair[1].split(";")]
        actions = [action for part in parts if "(" not in part for action in _actions(part)]
        if len(actions) != len(parts):
            raise ScheduleError(
                f"{quoted(cell)} has a part that computes nothing; write (0F4;7B2)OVERLAP_F_B"
            )
        return actions
    if not cell:
        return []
    match = _CELL.fullmatch(cell)
    name = match[2] if match else ""
    if match and name in _WHOLE_STEP:
        return []
    if match and name in {*_COMPUTE, *_MESSAGES}:
        if not match[3]:
            raise ScheduleError(f"{quoted(cell)} has no micro-batch; write it last, as in 0F1")
        stage, micro_batch = int(match[1]), int(match[3])
        return [Action(_COMPUTE[name], stage, micro_batch)] if name in _COMPUTE else []
    raise ScheduleError(
        f"{quoted(cell)} is no action; write stage, action and micro-batch, as in 0F1 or 2B0"
    )


def _placement(orders: Sequence[Order]) -> Placement:
    """The placement that `orders` follow: consecutive stages on consecutive ranks, or a V of two chunks."""
    held = [sorted({action.stage for action in order}) for order in orders]
    num_ranks = len(orders)
    stages = sorted(stage for row in held for stage in row)
    if stages != list(range(len(stages))) or len(stages) % num_ranks:
        raise ScheduleError(
            f"the stages of the ranks are {_listed(held)}; each of the stages 0 to n must be on one rank, "
            "and each rank must have as many stages"
        )
    num_chunks = len(stages) // num_ranks
    for placement in _placements(num_ranks, num_chunks):
        if held == [sorted(placement.stages_of(rank)) for rank in range(num_ranks)]:
            return placement
    raise ScheduleError(
        f"the stages of the ranks are {_listed(held)}; stage s must be on rank s % {num_ranks}, or, with two "
        f"stages a rank, rank r must have the stages r and {2 * num_ranks - 1} - r"
    )


def _placements(num_ranks: int, num_chunks: int) -> list[Placement]:
    loop = Placement(num_ranks, num_chunks)
    return [loop, Placement(num_ranks, 2, is_v=True)] if num_chunks == 2 else [loop]


def _listed(held: Sequence[Sequence[int]]) -> str:
    text = ", ".join("+".join(map(str, row[:8])) for row in held[:16])
    return text if len(text) <= 200 else text[:200] + " ..."


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
