"""Whole tensors of a sharded model one after the other, gathered in flat buckets, the next one ahead.

    shards      rank 0 |a a a b|      rank 1 |b c c c|
    bucket      |a a a b|b c c c|     each rank sends its part of it to every other rank, in one message
    tensors      a       b  c         views of the bucket; one that is in two pieces is joined

Extra memory: the bucket whose tensors are used, and the one that is on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch
from torch import Tensor, nn

from ...ops.comm.collectives import ACCESS_BUFFER, Collectives
from ...ops.comm.handles import Handle
from ...ops.flat import numel_of, shaped
from ...ops.torch_internals import num_users
from ..core.owners import ParamOwner, ShardView, find_owner

KIND = "weights"  # of the bytes, in engine.bytes_sent()


@final
@dataclass(frozen=True, eq=False)
class Wanted:
    """A tensor that is to be gathered as `dtype`. tensor: a parameter of the engine, or any other tensor."""

    name: str
    tensor: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        owner = find_owner(self.tensor)
        return tuple(self.tensor.shape) if owner is None else owner.full_shape(self._param)

    @property
    def _param(self) -> nn.Parameter:
        return self.tensor  # type: ignore[return-value]

    def held(self) -> tuple[ParamOwner | None, ShardView | None]:
        """The owner, and this rank's part of the values that forward computes with."""
        owner = find_owner(self.tensor)
        return owner, None if owner is None else owner.compute(self._param)

    def group(self) -> Collectives | None:
        """The ranks that have parts of it; None: this rank has all of it, or all of its slice."""
        owner, view = self.held()
        return (
            None if owner is None or view is None or view.is_whole else owner.group_of(self._param)
        )


@final
class _Memory:
    """Memory of buckets. On a CPU that of an earlier one is used again, for new memory costs more than a copy.

    On a GPU the caching allocator does so.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[numel], undefined, that nobody else has."""
        size_bytes = numel * dtype.itemsize
        for flat in self._kept:
            if flat.numel() >= size_bytes and num_users(flat) == 1:
                return flat[:size_bytes].view(dtype)
        self._kept = [flat for flat in self._kept if num_users(flat) > 1]
        flat = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            self._kept.append(flat)
        return flat.view(dtype)


@final
class _Flight:
    """One bucket on its way."""

    def __init__(self, wanted: Sequence[Wanted], group: Collectives, memory: _Memory) -> None:
        self._wanted = wanted
        self._views = [view for item in wanted if (view := item.held()[1]) is not None]
        sizes = [[stop - start for start, stop in view.bounds] for view in self._views]
        totals = [sum(row[rank] for row in sizes) for rank in range(group.world_size)]
        starts = [0, *accumulate(totals)]
        self._places = []  # of each tensor, the ranges of its pieces
        begins = starts[:-1]
        for row in sizes:
            self._places.append(
                [(begins[rank], begins[rank] + n) for rank, n in enumerate(row) if n]
            )
            begins = [place + n for place, n in zip(begins, row, strict=True)]
        self._flat = memory.take(starts[-1], wanted[0].dtype, group.device)
        parts = [self._flat[starts[rank] : starts[rank + 1]] for rank in range(group.world_size)]
        own_part = parts[group.rank]
        begin = 0
        for view in self._views:
            start, stop = view.bounds[group.rank]
            own_part[begin : begin + stop - start].copy_(view.local)
            begin += stop - start
        outs = [part.view(torch.uint8) for part in parts]
        sent = [outs[group.rank]] * group.world_size
        self._handle: Handle = group.all_to_all(
            outs, sent, what="a bucket of weights", kind=KIND, buffer=ACCESS_BUFFER
        )

    def land(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors. The message has arrived when the first one is asked for."""
        self._handle.wait()
        for item, view, places in zip(self._wanted, self._views, self._places, strict=True):
            yield item.name, _joined(view, self._piece(places))

    def _piece(self, places: list[tuple[int, int]]) -> Tensor:
        adjacent = all(a[1] == b[0] for a, b in zip(places, places[1:], strict=False))
        if not places:
            return self._flat[:0]
        if adjacent:
            return self._flat[places[0][0] : places[-1][1]]
        return torch.cat([self._flat[start:stop] for start, stop in places])

    def drop(self) -> None:
        """Nobody wants the tensors: let the message end."""
        self._handle.wait()


def _joined(view: ShardView, flat: Tensor) -> Tensor:
    part = shaped(flat, view.shape, view.channels_last)
    if view.slices is None:
        return part.contiguous()
    whole = view.slices.join(part.contiguous(), for_all=True)
    assert whole is not None
    return whole


def in_order(wanted: Sequence[Wanted]) -> list[Wanted]:
    """`wanted`, so that each rank has to send as much for each bucket. The same order on all ranks.

    A shard is a run of tensors. In their own order all tensors of a small bucket would come from one rank.
    """
    queues: dict[tuple[int, int], list[Wanted]] = {}
    others: list[Wanted] = []
    keys: dict[int, int] = {}
    for item in wanted:
        _, view = item.held()
        if view is None or view.is_whole or view.slices is not None:
            others.append(item)
            continue
        sizes = [stop - start for start, stop in view.bounds]
        group = item.group()
        key = (id(group), sizes.index(max(sizes)))
        keys.setdefault(id(group), len(keys))
        queues.setdefault(key, []).append(item)
    ordered: list[Wanted] = []
    for group_id in keys:
        of_group = {
            rank: queue for (which, rank), queue in sorted(queues.items()) if which == group_id
        }
        taken = dict.fromkeys(of_group, 0)
        positions = dict.fromkeys(of_group, 0)
        while waiting := [rank for rank in of_group if positions[rank] < len(of_group[rank])]:
            rank = min(waiting, key=lambda sender: (taken[sender], sender))
            item = of_group[rank][positions[rank]]
            ordered.append(item)
            taken[rank] += numel_of(item.shape) * item.dtype.itemsize
            positions[rank] += 1
    return ordered + others


def gathered(wanted: Sequence[Wanted], bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of each of `wanted`, in order. A collective: every rank takes all of them.

    Tensors of a bucket are views of it. What this rank has whole is no copy unless its dtype differs.

    Args:
        wanted: in the order of `in_order`.
        bucket_bytes: the size of a bucket; a larger tensor is a bucket of its own.
    Sends: each rank its part of every tensor to every other rank that has a part of it, as the wanted dtype.
    """
    buckets = _buckets(wanted, bucket_bytes)
    memory = _Memory()
    flight = _started(buckets[0], memory) if buckets else None
    ahead = None
    try:
        for number, bucket in enumerate(buckets):
            landed = _whole(bucket) if flight is None else flight.land()
            flight = None
            yield next(landed)
            # not earlier: until then the caller had a tensor of the bucket before
            ahead = _started(buckets[number + 1], memory) if number + 1 < len(buckets) else None
            yield from landed
            flight, ahead = ahead, None
            del landed
    finally:
        if ahead is not None:
            ahead.drop()


def _started(bucket: Sequence[Wanted], memory: _Memory) -> _Flight | None:
    group = bucket[0].group()
    return None if group is None else _Flight(bucket, group, memory)


def _whole(bucket: Sequence[Wanted]) -> Iterator[tuple[str, Tensor]]:
    for item in bucket:
        _, view = item.held()
        if view is None or view.slices is None:
            yield item.name, item.tensor.detach().to(item.dtype)
        else:
            yield item.name, _joined(view, view.local.to(item.dtype))


def _buckets(wanted: Sequence[Wanted], bucket_bytes: int) -> list[list[Wanted]]:
    buckets: list[list[Wanted]] = []
    kind: tuple[int, torch.dtype] | None = None
    taken_bytes = 0
    for item in wanted:
        item_kind = id(item.group()), item.dtype
        size_bytes = numel_of(item.shape) * item.dtype.itemsize
        if item_kind != kind or taken_bytes + size_bytes > bucket_bytes:
            buckets.append([])
            kind, taken_bytes = item_kind, 0
        buckets[-1].append(item)
        taken_bytes += size_bytes
    return buckets


__all__ = ["Wanted", "gathered", "in_order"]
