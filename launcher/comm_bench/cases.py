"""Every collective that is timed: its tensors, its call, and the result that it must have.

Values are whole numbers that every dtype holds exactly. What is summed is 0 on all ranks but one, so a
sum is exact at any number of ranks, and one that misses a rank, or counts one twice, is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ...ops.comm import raw_collectives as raw
from ...ops.comm.collectives import Collectives

_CHUNK_NUMEL = 1 << 20  # so that checking takes little memory beside the tensors themselves
_SMALL_BYTES = 64 * 1024  # gather_small is for less
Check = Callable[[], bool]
Maker = Callable[["Place", int], "Case"]


@final
@dataclass(frozen=True)
class Place:
    """This rank in its group. whole numel is always a multiple of world_size."""

    door: Collectives
    group: Any
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return self.door.rank

    @property
    def world_size(self) -> int:
        return self.door.world_size

    def empty(self, numel: int) -> Tensor:
        """Uninitialized, on this rank's device."""
        return torch.empty(numel, dtype=self.dtype, device=self.door.device)


@final
@dataclass(frozen=True)
class Case:
    """fill: write what goes in, and spoil what comes out. call: once. is_right: what came out."""

    fill: Callable[[], None]
    call: Callable[[], None]
    is_right: Check


@final
@dataclass(frozen=True)
class Pattern:
    """Values of a tensor of equal parts: each by its place in the part, and by the part's number.

    rank: of `world_size`, keeps the values whose turn it is, and 0 elsewhere.
    """

    parts: Sequence[int]
    rank: int | None = None
    world_size: int = 1

    def _chunks(self, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        numel = tensor.numel() // len(self.parts)
        for place, part in enumerate(self.parts):
            for start in range(0, numel, _CHUNK_NUMEL):
                stop = min(start + _CHUNK_NUMEL, numel)
                index = torch.arange(start, stop, device=tensor.device)
                values = 1 + (31 * index + 17 * part) % 113
                if self.rank is not None:
                    whole = index + place * numel
                    values *= whole % self.world_size == self.rank
                yield tensor[place * numel + start : place * numel + stop], values.to(tensor.dtype)

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
    """Tensors that are input and output at once are filled as input."""

    def fill() -> None:
        for tensor, _ in outputs:
            tensor.zero_()
        for tensor, pattern in inputs:
            pattern.fill(tensor)

    return Case(fill, call, lambda: all(pattern.is_in(tensor) for tensor, pattern in outputs))


def _all_parts(place: Place) -> Pattern:
    return Pattern(range(place.world_size))


def _own_part(place: Place) -> Pattern:
    return Pattern([place.rank])


def _summand(place: Place) -> Pattern:
    return Pattern(range(place.world_size), place.rank, place.world_size)


def _all_gather(place: Place, numel: int, call: Callable[[Tensor, Tensor], None]) -> Case:
    flat, shard = place.empty(numel), place.empty(numel // place.world_size)
    return _case(
        [(shard, _own_part(place))], lambda: call(flat, shard), [(flat, _all_parts(place))]
    )


def _reduce_scatter(place: Place, numel: int, call: Callable[[Tensor, Tensor], None]) -> Case:
    flat, out = place.empty(numel), place.empty(numel // place.world_size)
    return _case([(flat, _summand(place))], lambda: call(flat, out), [(out, _own_part(place))])


def _all_reduce(place: Place, numel: int, call: Callable[[Tensor], None]) -> Case:
    tensor = place.empty(numel)
    return _case([(tensor, _summand(place))], lambda: call(tensor), [(tensor, _all_parts(place))])


def _all_to_all(place: Place, numel: int, call: Callable[[Tensor, Tensor], None]) -> Case:
    flat, out = place.empty(numel), place.empty(numel)
    size, rank = place.world_size, place.rank
    to = Pattern([rank * size + peer for peer in range(size)])
    came = Pattern([peer * size + rank for peer in range(size)])
    return _case([(flat, to)], lambda: call(flat, out), [(out, came)])


def _broadcast(place: Place, numel: int, call: Callable[[Tensor], None]) -> Case:
    tensor = place.empty(numel)
    inputs = [(tensor, _all_parts(place))] if place.rank == 0 else []
    return _case(inputs, lambda: call(tensor), [(tensor, _all_parts(place))])


def _reduce(place: Place, numel: int, call: Callable[[Tensor], None]) -> Case:
    tensor = place.empty(numel)
    outputs = [(tensor, _all_parts(place))] if place.rank == 0 else []
    return _case([(tensor, _summand(place))], lambda: call(tensor), outputs)


def _gather(place: Place, numel: int, call: Callable[[Tensor | None, Tensor], None]) -> Case:
    flat = place.empty(numel) if place.rank == 0 else None
    shard = place.empty(numel // place.world_size)
    outputs = [] if flat is None else [(flat, _all_parts(place))]
    return _case([(shard, _own_part(place))], lambda: call(flat, shard), outputs)


def _scatter(place: Place, numel: int, call: Callable[[Tensor | None, Tensor], None]) -> Case:
    flat = place.empty(numel) if place.rank == 0 else None
    out = place.empty(numel // place.world_size)
    inputs = [] if flat is None else [(flat, _all_parts(place))]
    return _case(inputs, lambda: call(flat, out), [(out, _own_part(place))])


def _send_right(place: Place, numel: int) -> Case:
    tensor, out = place.empty(numel), place.empty(numel)
    before = Pattern([(place.rank - 1) % place.world_size])
    return _case(
        [(tensor, _own_part(place))],
        lambda: raw.send_right(place.group, tensor, out),
        [(out, before)],
    )


def _gather_small(place: Place, numel: int) -> Case:
    values = place.empty(numel // place.world_size)
    pattern, expected = _own_part(place), _all_parts(place)
    tables: list[Tensor] = []

    def call() -> None:
        tables[:] = [place.door.gather_small(values)]

    def is_right() -> bool:
        return bool(tables) and expected.is_in(tables[0].flatten())

    return Case(lambda: pattern.fill(values), call, is_right)


def _barrier(place: Place, numel: int) -> Case:
    return Case(lambda: None, place.door.barrier, lambda: True)


def _door_all_gather(place: Place, numel: int) -> Case:
    def call(flat: Tensor, shard: Tensor) -> None:
        place.door.all_gather(flat, shard, buffer=0, kind="all_gather").wait()

    return _all_gather(place, numel, call)


def _door_reduce_scatter(place: Place, numel: int) -> Case:
    def call(flat: Tensor, out: Tensor) -> None:
        place.door.reduce_scatter(flat, out, add=False, buffer=0, kind="reduce_scatter").wait()

    return _reduce_scatter(place, numel, call)


def _door_all_reduce(place: Place, numel: int) -> Case:
    """What a step of stages 1 and 2 does with a unit: the sums to their owners, the values back to all."""

    def call(tensor: Tensor) -> None:
        own = place.door.shard_of(tensor)
        place.door.reduce_scatter(tensor, own, add=False, buffer=0, kind="reduce_scatter").wait()
        place.door.all_gather(tensor, own, buffer=0, kind="all_gather").wait()

    return _all_reduce(place, numel, call)


def _bounds(place: Place, numel: int) -> list[tuple[int, int]]:
    part = numel // place.world_size
    return [(rank * part, (rank + 1) * part) for rank in range(place.world_size)]


def _door_gather(place: Place, numel: int) -> Case:
    bounds = _bounds(place, numel)
    return _gather(
        place, numel, lambda flat, shard: place.door.collect(flat, shard, bounds, target=0)
    )


def _door_scatter(place: Place, numel: int) -> Case:
    bounds = _bounds(place, numel)
    return _scatter(place, numel, lambda flat, out: place.door.scatter(flat, out, bounds))


CASES: dict[str, dict[str, Maker]] = {
    "all_gather": {
        "xds": _door_all_gather,
        "torch": lambda p, n: _all_gather(p, n, lambda f, s: raw.all_gather(p.group, f, s)),
    },
    "reduce_scatter": {
        "xds": _door_reduce_scatter,
        "torch": lambda p, n: _reduce_scatter(p, n, lambda f, o: raw.reduce_scatter(p.group, f, o)),
    },
    "all_reduce": {
        "xds": _door_all_reduce,
        "torch": lambda p, n: _all_reduce(p, n, lambda t: raw.all_reduce(p.group, t)),
    },
    "all_to_all": {
        "torch": lambda p, n: _all_to_all(p, n, lambda f, o: raw.all_to_all(p.group, f, o))
    },
    "broadcast": {"xds": lambda p, n: _broadcast(p, n, p.door.broadcast)},
    "reduce": {"torch": lambda p, n: _reduce(p, n, lambda t: raw.reduce(p.group, t))},
    "gather": {
        "xds": _door_gather,
        "torch": lambda p, n: _gather(p, n, lambda f, s: raw.gather(p.group, f, s)),
    },
    "scatter": {
        "xds": _door_scatter,
        "torch": lambda p, n: _scatter(p, n, lambda f, o: raw.scatter(p.group, f, o)),
    },
    "gather_small": {"xds": _gather_small},
    "send_recv": {"torch": _send_right},
    "barrier": {"xds": _barrier},
}


def largest_bytes(op: str, max_bytes: int) -> int:
    """Up to what size an op is measured."""
    if op == "barrier":
        return 0
    return min(max_bytes, _SMALL_BYTES) if op == "gather_small" else max_bytes
