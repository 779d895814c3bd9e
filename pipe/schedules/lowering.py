"""From the order of the compute actions to the whole table: messages, then parameters and gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .actions import (
    COMPUTE,
    FLOW_BACK,
    MAKES_GRADIENTS,
    SENDS,
    Action,
    Op,
    Order,
    Placement,
    Table,
    computed,
)

_Channel = tuple[int, int, Op]
"""Sender, receiver, and SEND_F or SEND_B."""


def with_messages(
    orders: Sequence[Sequence[Action]], placement: Placement, num_micro_batches: int
) -> Table:
    """The table of `orders` with a send and a receive for each value that changes its rank.

    A send directly follows the compute action that makes the value. A receive starts one compute action before
    the one that uses the value. It starts earlier where the sender sends in another order: between two ranks,
    the messages of one direction start to be received in the order in which they are sent.
    """
    sent: dict[_Channel, list[Action]] = defaultdict(list)
    for rank, order in enumerate(orders):
        for action in order:
            if (send := _send_after(action, placement)) is not None:
                sent[rank, placement.peer_of(send), send.op].append(send)
    rows = [_with_messages(rank, order, placement, sent) for rank, order in enumerate(orders)]
    return Table(tuple(map(tuple, rows)), placement, num_micro_batches)


def _with_messages(
    rank: int, order: Sequence[Action], placement: Placement, sent: dict[_Channel, list[Action]]
) -> Order:
    starts: dict[Action, int] = {}
    """For each receive the position in `order` of the compute action that it precedes."""
    for position, action in enumerate(order):
        if (receive := _receive_before(action, placement)) is not None:
            starts[receive] = max(0, position - 1)
    first_use = {receive: index for index, receive in enumerate(starts)}
    turn = dict(first_use)  # the order of receives that start at the same position
    for (_, receiver, _), sends in sent.items():
        if receiver == rank:
            _in_sending_order([received(send) for send in sends], starts, turn)
    before: dict[int, Order] = defaultdict(list)
    for receive in sorted(starts, key=lambda r: (starts[r], turn[r], first_use[r])):
        before[starts[receive]].append(receive)
    row: Order = []
    for position, action in enumerate(order):
        row += [*before[position], action]
        if (send := _send_after(action, placement)) is not None:
            row.append(send)
    return row


def _in_sending_order(
    receives: list[Action], starts: dict[Action, int], turn: dict[Action, int]
) -> None:
    """Moves receives forward, so that none starts after the next one of its channel."""
    known = [receive for receive in receives if receive in starts]
    for receive, following in reversed(list(zip(known, known[1:], strict=False))):
        if (starts[following], turn[following]) <= (starts[receive], turn[receive]):
            starts[receive], turn[receive] = starts[following], turn[following] - 1


def received(send: Action) -> Action:
    """The receive that belongs to `send`."""
    if send.op is Op.SEND_F:
        return Action(Op.RECEIVE_F, send.stage + 1, send.micro_batch)
    return Action(Op.RECEIVE_B, send.stage - 1, send.micro_batch)


def _send_after(action: Action, placement: Placement) -> Action | None:
    if action.op is Op.FORWARD and not placement.is_last(action.stage):
        send = Action(Op.SEND_F, action.stage, action.micro_batch)
    elif action.op in FLOW_BACK and not placement.is_first(action.stage):
        send = Action(Op.SEND_B, action.stage, action.micro_batch)
    else:
        return None
    return None if placement.peer_of(send) == placement.rank_of(action.stage) else send


def _receive_before(action: Action, placement: Placement) -> Action | None:
    if action.op is Op.FORWARD and not placement.is_first(action.stage):
        receive = Action(Op.RECEIVE_F, action.stage, action.micro_batch)
    elif action.op in FLOW_BACK and not placement.is_last(action.stage):
        receive = Action(Op.RECEIVE_B, action.stage, action.micro_batch)
    else:
        return None
    return None if placement.peer_of(receive) == placement.rank_of(action.stage) else receive


def with_states(table: Table, *, gathers_each: bool, reduces_each: bool) -> Table:
    """`table` with GATHER and DROP of the parameters and REDUCE of the gradients.

    Args:
        table: a table that has its messages.
        gathers_each: True gathers a stage before each run of its compute actions and drops it after the run.
            False gathers it once, before its first action, and drops it after its last.
        reduces_each: True reduces the gradients of each micro-batch, False those of the whole step.

    After a compute action come its send, DROP and REDUCE, in this order.
    """
    rows = []
    for row, order in zip(table.rows, computed(table.rows), strict=True):
        gathers, drops = _runs(order) if gathers_each else _whole_step(order)
        reduces = _reduces(order, reduces_each)
        rows.append(_with_states(row, gathers, drops, reduces))
    return Table(tuple(rows), table.placement, table.num_micro_batches)


def _runs(order: Order) -> tuple[set[int], set[int]]:
    """The positions in `order` that need a GATHER before them, and a DROP after them: each change of stage."""
    changes = [
        index
        for index in range(len(order) + 1)
        if index in (0, len(order)) or order[index - 1].stage != order[index].stage
    ]
    return set(changes[:-1]), {index - 1 for index in changes[1:]}


def _whole_step(order: Order) -> tuple[set[int], set[int]]:
    first = {action.stage: index for index, action in reversed(list(enumerate(order)))}
    last = {action.stage: index for index, action in enumerate(order)}
    return set(first.values()), set(last.values())


def _reduces(order: Order, each: bool) -> dict[int, int]:
    """The positions in `order` that a REDUCE follows, with its micro-batch."""
    making = [(index, a) for index, a in enumerate(order) if a.op in MAKES_GRADIENTS]
    if each:
        return {index: action.micro_batch for index, action in making}
    last = {action.stage: index for index, action in making}
    return dict.fromkeys(last.values(), -1)


def _with_states(
    row: tuple[Action, ...], gathers: set[int], drops: set[int], reduces: dict[int, int]
) -> tuple[Action, ...]:
    result: Order = []
    after: Order = []
    position = 0
    for action in row:
        if action.op not in SENDS:  # a send stays next to the action that makes its value
            result += after
            after = []
        if action.op not in COMPUTE:
            result.append(action)
            continue
        if position in gathers:
            result.append(Action(Op.GATHER, action.stage))
        if position in drops:
            after.append(Action(Op.DROP, action.stage))
        if position in reduces:
            after.append(Action(Op.REDUCE, action.stage, reduces[position]))
        result.append(action)
        position += 1
    return tuple(result + after)
