"""Every collective that is timed: its tensors, its call, and its expected result.

Values are integers that every dtype represents exactly. Each summand is 0 on all ranks but one. So a correct
sum is exact at any number of ranks, and a sum that omits a rank or counts one twice is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ...ops.comm import raw_collectives as raw
from ...ops.comm.collectives import Collectives
from ...ops.comm.handles import Handle
from .plan import MESSAGES

_CHUNK_NUMEL = 1 << 20  # limits the additional memory of the check
_SMALL_BYTES = 64 * 1024  # gather_small is for small tensors
Check = Callable[[], bool]
Maker = Callable[["RankContext", int], "Case"]


@final
@dataclass(frozen=True)
class RankContext:
    """This rank's place in its group. `numel` is always that of the full tensor, a multiple of world_size."""

    collectives: Collectives
    group: Any
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return self.collectives.rank

    @property
    def world_size(self) -> int:
        return self.collectives.world_size

    def empty(self, numel: int) -> Tensor:
        """Uninitialized, on this rank's device: memory that peers read in place, where they can."""
        return self.collectives.empty(numel, self.dtype)


@final
@dataclass(frozen=True)
class Case:
    """fill: write the inputs and clear the outputs. call: run the op once. is_right: check the outputs."""

    fill: Callable[[], None]
    call: Callable[[], None]
    is_right: Check


@final
@dataclass(frozen=True)
class Pattern:
    """The values of a tensor of equal parts. Each depends on its index in the part and on the part's number.

    rank: if given, keep every `world_size`-th value, starting at `rank`, and write 0 elsewhere.
    """

    parts: Sequence[int]
    rank: int | None = None
    world_size: int = 1

    def _chunks(self, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        numel = tensor.numel() // len(self.parts)
        for context, part in enumerate(self.parts):
            for start in range(0, numel, _CHUNK_NUMEL):
                stop = min(start + _CHUNK_NUMEL, numel)
                index = torch.arange(start, stop, device=tensor.device)
                values = 1 + (31 * index + 17 * part) % 113
                if self.rank is not None:
                    whole = index + context * numel
                    values *= whole % self.world_size == self.rank
                yield (
                    tensor[context * numel + start : context * numel + stop],
                    values.to(tensor.dtype),
                )

    def fill(self, tensor: Tensor) -> None:
        for there, values in self._chunks(tensor):
            there.copy_(values)

    def is_in(self, tensor: Tensor) -> bool:
        return all(torch.equal(there, values) for there, values in self._chunks(tensor))


def _case(
    inputs: Sequence[tuple[Tensor, Pattern]],
    call: Callable[[], None],
    outputs: Sequence[tuple[Tensor, Pattern]],
) -> Case:
    """Make a case. Tensors that are both input and output are filled as input."""

    def fill() -> None:
        for tensor, _ in outputs:
            tensor.zero_()
        for tensor, pattern in inputs:
            pattern.fill(tensor)

    return Case(fill, call, lambda: all(pattern.is_in(tensor) for tensor, pattern in outputs))


def _all_parts(context: RankContext) -> Pattern:
    return Pattern(range(context.world_size))


def _own_part(context: RankContext) -> Pattern:
    return Pattern([context.rank])


def _summand(context: RankContext) -> Pattern:
    return Pattern(range(context.world_size), context.rank, context.world_size)


def _all_gather(
    context: RankContext,
    numel: int,
    call: Callable[[Tensor, Tensor], None],
    *,
    in_place: bool = False,
) -> Case:
    """in_place: the shard is this rank's slice of the flat, as in a step of ZeRO stages 1 and 2."""
    flat = context.empty(numel)
    own = context.collectives.shard_of(flat)
    shard = own if in_place else context.empty(own.numel())
    return _case(
        [(shard, _own_part(context))], lambda: call(flat, shard), [(flat, _all_parts(context))]
    )


def _reduce_scatter(
    context: RankContext, numel: int, call: Callable[[Tensor, Tensor], None]
) -> Case:
    flat, out = context.empty(numel), context.empty(numel // context.world_size)
    return _case([(flat, _summand(context))], lambda: call(flat, out), [(out, _own_part(context))])


def _all_reduce(context: RankContext, numel: int, call: Callable[[Tensor], None]) -> Case:
    tensor = context.empty(numel)
    return _case(
        [(tensor, _summand(context))], lambda: call(tensor), [(tensor, _all_parts(context))]
    )


def _all_to_all(context: RankContext, numel: int, call: Callable[[Tensor, Tensor], None]) -> Case:
    flat, out = context.empty(numel), context.empty(numel)
    size, rank = context.world_size, context.rank
    to = Pattern([rank * size + peer for peer in range(size)])
    came = Pattern([peer * size + rank for peer in range(size)])
    return _case([(flat, to)], lambda: call(flat, out), [(out, came)])


def _broadcast(context: RankContext, numel: int) -> Case:
    tensor = context.empty(numel)
    inputs = [(tensor, _all_parts(context))] if context.rank == 0 else []
    return _case(
        inputs,
        lambda: context.collectives.broadcast(tensor),
        [(tensor, _all_parts(context))],
    )


def _reduce(context: RankContext, numel: int, call: Callable[[Tensor], None]) -> Case:
    tensor = context.empty(numel)
    outputs = [(tensor, _all_parts(context))] if context.rank == 0 else []
    return _case([(tensor, _summand(context))], lambda: call(tensor), outputs)


def _gather(
    context: RankContext, numel: int, call: Callable[[Tensor | None, Tensor], None]
) -> Case:
    flat = context.empty(numel) if context.rank == 0 else None
    shard = context.empty(numel // context.world_size)
    outputs = [] if flat is None else [(flat, _all_parts(context))]
    return _case([(shard, _own_part(context))], lambda: call(flat, shard), outputs)


def _scatter(
    context: RankContext, numel: int, call: Callable[[Tensor | None, Tensor], None]
) -> Case:
    flat = context.empty(numel) if context.rank == 0 else None
    out = context.empty(numel // context.world_size)
    inputs = [] if flat is None else [(flat, _all_parts(context))]
    return _case(inputs, lambda: call(flat, out), [(out, _own_part(context))])


def _send_right(context: RankContext, numel: int, call: Callable[[Tensor, Tensor], None]) -> Case:
    tensor, out = context.empty(numel), context.empty(numel)
    before = Pattern([(context.rank - 1) % context.world_size])
    return _case([(tensor, _own_part(context))], lambda: call(tensor, out), [(out, before)])


def _gather_small(context: RankContext, numel: int) -> Case:
    values = context.empty(numel // context.world_size)
    pattern, expected = _own_part(context), _all_parts(context)
    tables: list[Tensor] = []

    def call() -> None:
        tables[:] = [context.collectives.gather_small(values)]

    def is_right() -> bool:
        return bool(tables) and expected.is_in(tables[0].flatten())

    return Case(lambda: pattern.fill(values), call, is_right)


def _barrier(context: RankContext, numel: int) -> Case:
    return Case(lambda: None, context.collectives.barrier, lambda: True)


def _xds_all_gather(context: RankContext, numel: int) -> Case:
    def call(flat: Tensor, shard: Tensor) -> None:
        context.collectives.all_gather(flat, shard, buffer=0, kind="all_gather").wait()

    return _all_gather(context, numel, call, in_place=True)


def _xds_reduce_scatter(context: RankContext, numel: int) -> Case:
    def call(flat: Tensor, out: Tensor) -> None:
        context.collectives.reduce_scatter(
            flat, out, add=False, buffer=0, kind="reduce_scatter"
        ).wait()

    return _reduce_scatter(context, numel, call)


def _xds_all_reduce(context: RankContext, numel: int) -> Case:
    """As in a step of ZeRO stages 1 and 2: a reduce_scatter to the owners, then an all_gather."""

    def call(tensor: Tensor) -> None:
        own = context.collectives.shard_of(tensor)
        context.collectives.reduce_scatter(
            tensor, own, add=False, buffer=0, kind="reduce_scatter"
        ).wait()
        context.collectives.all_gather(tensor, own, buffer=0, kind="all_gather").wait()

    return _all_reduce(context, numel, call)


def _xds_all_to_all(context: RankContext, numel: int) -> Case:
    size = context.world_size

    def call(flat: Tensor, out: Tensor) -> None:
        outs, parts = list(out.chunk(size)), list(flat.chunk(size))
        context.collectives.all_to_all(outs, parts, what="a test", kind="all_to_all").wait()

    return _all_to_all(context, numel, call)


def _xds_send_right(context: RankContext, numel: int) -> Case:
    where = context.collectives
    right, left = (where.rank + 1) % where.world_size, (where.rank - 1) % where.world_size

    def send(tensor: Tensor) -> Handle:
        return where.send(tensor, right, number=0, what="a test", kind="send")

    def call(tensor: Tensor, out: Tensor) -> None:
        # NCCL runs them in the order of their starts: not all ranks may start with sending
        sent = None if where.rank % 2 else send(tensor)
        received = where.receive(out, left, number=0, what="a test")
        sent = sent or send(tensor)
        received.wait()
        sent.wait()

    return _send_right(context, numel, call)


def _bounds(context: RankContext, numel: int) -> list[tuple[int, int]]:
    part = numel // context.world_size
    return [(rank * part, (rank + 1) * part) for rank in range(context.world_size)]


def _xds_gather(context: RankContext, numel: int) -> Case:
    bounds = _bounds(context, numel)
    return _gather(
        context,
        numel,
        lambda flat, shard: context.collectives.collect(flat, shard, bounds, target=0),
    )


def _xds_scatter(context: RankContext, numel: int) -> Case:
    bounds = _bounds(context, numel)
    return _scatter(
        context, numel, lambda flat, out: context.collectives.scatter(flat, out, bounds)
    )


CASES: dict[str, dict[str, Maker]] = {
    "all_gather": {
        "xds": _xds_all_gather,
        "torch": lambda p, n: _all_gather(p, n, lambda f, s: raw.all_gather(p.group, f, s)),
    },
    "reduce_scatter": {
        "xds": _xds_reduce_scatter,
        "torch": lambda p, n: _reduce_scatter(p, n, lambda f, o: raw.reduce_scatter(p.group, f, o)),
    },
    "all_reduce": {
        "xds": _xds_all_reduce,
        "torch": lambda p, n: _all_reduce(p, n, lambda t: raw.all_reduce(p.group, t)),
    },
    "all_to_all": {
        "xds": _xds_all_to_all,
        "torch": lambda p, n: _all_to_all(p, n, lambda f, o: raw.all_to_all(p.group, f, o)),
    },
    "broadcast": {"xds": _broadcast},
    "reduce": {"torch": lambda p, n: _reduce(p, n, lambda t: raw.reduce(p.group, t))},
    "gather": {
        "xds": _xds_gather,
        "torch": lambda p, n: _gather(p, n, lambda f, s: raw.gather(p.group, f, s)),
    },
    "scatter": {
        "xds": _xds_scatter,
        "torch": lambda p, n: _scatter(p, n, lambda f, o: raw.scatter(p.group, f, o)),
    },
    "gather_small": {"xds": _gather_small},
    "send_recv": {
        "xds": _xds_send_right,
        "torch": lambda p, n: _send_right(p, n, lambda t, o: raw.send_right(p.group, t, o)),
    },
    "barrier": {"xds": _barrier},
}


_OF_BACKEND = ("broadcast", "barrier")  # xds over gloo messages calls the backend's own


def makers_of(op: str, *, shares_memory: bool) -> dict[str, Maker]:
    """The rows of an op: by xds, where its ranks share memory by xds over messages too, by the backend."""
    makers = CASES[op]
    if not shares_memory or "xds" not in makers:
        return makers
    over_messages = "torch" if op in _OF_BACKEND else MESSAGES
    return {"xds": makers["xds"], over_messages: makers["xds"], **makers}


def largest_bytes(op: str, max_bytes: int) -> int:
    """The largest size at which an op is measured."""
    if op == "barrier":
        return 0
    return min(max_bytes, _SMALL_BYTES) if op == "gather_small" else max_bytes
