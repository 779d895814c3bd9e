"""What the design says of messages, as rules on what ranks have started. Pure functions over recorded logs.

- All ranks of a group start the same collectives in the same order (docs/design/collectives.md). NCCL knows no
  other order. What one rank sends to another is received in the order of sending (docs/design/pipeline.md).
- Stage 3: the next unit is gathered while the present one computes, in forward and in backward
  (docs/design/units-and-stages.md, "Order": the actual use decides, the last pass is a hint).
- Stages 0 to 3: a unit's gradients are reduced when they are complete, so before backward of earlier layers.
- `tp_overlap_comm`: the sum of an input's gradients travels while the gradients of the weights are computed.
- The stream of the computation waits for a message where its result is needed, not where it is started.

A log is that of `host_cuda.take_log`: "op STREAM NAME" for each launch, "wait STREAM", "sync REASON",
"start NUMBER NAME NUMEL" and "take NUMBER" of messages, "mark TEXT" of a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Started = Sequence[tuple[str, int]]
COMPUTATION = "op 0 "  # of the stream of the computation


@dataclass(frozen=True)
class Message:
    """start, take: lines of the log. take: where the computation waits for it; the end, where it never does."""

    name: str
    numel: int
    start: int
    take: int


def messages_of(log: Sequence[str]) -> list[Message]:
    """In the order of their starts."""
    takes: dict[str, int] = {}
    for at, line in enumerate(log):
        if line.startswith("take "):
            takes.setdefault(line.removeprefix("take "), at)
    found = []
    for at, line in enumerate(log):
        if line.startswith("start "):
            _, number, name, numel = line.split()
            found.append(Message(name, int(numel), at, takes.get(number, len(log))))
    return found


def launches(log: Sequence[str], first: int, end: int) -> list[str]:
    """Ops of the computation in the lines [first, end)."""
    lines = (line for line in log[first:end] if line.startswith(COMPUTATION))
    return [line.removeprefix(COMPUTATION) for line in lines]


def beside(log: Sequence[str], message: Message) -> list[str]:
    """Ops that run while the message is on its way."""
    return launches(log, message.start, message.take)


def line_of(log: Sequence[str], mark: str) -> int:
    """Where a test has written `mark`, the last time."""
    return len(log) - 1 - list(reversed(log)).index(f"mark {mark}")


def other_orders(by_rank: Sequence[Mapping[tuple[int, ...], Started]]) -> list[str]:
    """What differs between ranks that share a group. by_rank: for the members of each group what was started.

    An all_to_all may have other sizes on other ranks.
    """
    found = []
    for members in sorted({members for groups in by_rank for members in groups}):
        starts = [by_rank[rank][members] for rank in members]
        rows = [_collectives(started) for started in starts]
        for rank, row in zip(members[1:], rows[1:], strict=True):
            if row != rows[0]:
                found.append(
                    f"group {members}: rank {rank} and rank {members[0]}: {_first(row, rows[0])}"
                )
        for one, started in enumerate(starts):
            for other, answered in enumerate(starts):
                sent, received = (
                    _with_peer(started, "send", other),
                    _with_peer(answered, "receive", one),
                )
                if sent != received:
                    pair = f"rank {members[one]} sends to {members[other]}"
                    found.append(f"group {members}: {pair}: {_first(sent, received)}")
    return found


def _collectives(started: Started) -> list[tuple[str, int]]:
    plain = [(name, numel) for name, numel in started if " " not in name]
    return [(name, 0 if name == "all_to_all" else numel) for name, numel in plain]


def _with_peer(started: Started, name: str, peer: int) -> list[int]:
    return [numel for found, numel in started if found == f"{name} {peer}"]


def _first(one: Sequence[object], other: Sequence[object]) -> str:
    """The first difference of two sequences."""
    at = next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), -1
    )
    at = min(len(one), len(other)) if at < 0 else at
    return f"message {at} is {[*one[at : at + 1]]} and {[*other[at : at + 1]]}"


def late_gathers(log: Sequence[str], units: Sequence[tuple[str, int]], direction: str) -> list[str]:
    """Units whose gather begins after the first op of the unit before, or is waited for before its last op.

    units: name and elements of a shard, in the order of use. The first one has none before it.
    direction: "forward" or "backward", as in the marks "begin forward NAME" and "end forward NAME".
    """
    found = []
    for (before, _), (name, numel) in zip(units, units[1:], strict=False):
        begin, end = (line_of(log, f"{word} {direction} {before}") for word in ("begin", "end"))
        own = line_of(log, f"begin {direction} {name}")
        gathers = [m for m in messages_of(log[:own]) if (m.name, m.numel) == ("all_gather", numel)]
        if not gathers or launches(log, begin, gathers[-1].start):
            found.append(f"{direction}: {name} is not gathered before {before} computes")
        elif gathers[-1].take < end:
            found.append(f"{direction}: {name} is waited for while {before} computes")
    return found


def late_reductions(log: Sequence[str], units: Sequence[tuple[str, int]]) -> list[str]:
    """Units whose gradients are not reduced before backward of the next one, or are waited for before its end.

    units: name and elements of all gradients, in the order of backward.
    """
    found = []
    all_of = messages_of(log)
    for (name, numel), (following, _) in zip(units, units[1:], strict=False):
        begin, end = (line_of(log, f"{word} backward {following}") for word in ("begin", "end"))
        own = [m for m in all_of if m.name == "reduce_scatter" and m.numel == numel]
        if not own or launches(log, begin, own[-1].start):
            found.append(f"gradients of {name} are not reduced before backward of {following}")
        elif own[-1].take < end:
            found.append(f"gradients of {name} are waited for in backward of {following}")
    return found


def not_beside(log: Sequence[str], name: str, numel: int, ops: Iterable[str]) -> list[str]:
    """Messages of this name and size that travel while none of `ops` runs."""
    wanted = {*ops}
    own = [m for m in messages_of(log) if (m.name, m.numel) == (name, numel)]
    return [f"{name} at line {m.start}" for m in own if not wanted & {*beside(log, m)}]
