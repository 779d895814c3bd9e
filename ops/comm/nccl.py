"""The backend that calls torch's own collectives: NCCL, and what else has collectives of equal parts, as MPI.

These match by order, not by buffer: all ranks must start them in the same order. The functions at the end are
for `xds bench comm`, which measures torch's collectives without xds. Training does not use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch.distributed as dist
from torch import Tensor

from ..flat import sum_in_order
from .backend import Backend, Bounds
from .handles import Handle, InFlight

# torch 2.13 renamed these two. The old names warn there, and the new ones do not exist in 2.11.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@final
class NcclBackend(Backend):
    """Calls the collectives of torch's process group."""

    has_tags = False

    def all_gather(self, flat: Tensor, shard: Tensor, buffer: int) -> Handle:
        return _in_flight(_all_gather_single(flat, shard, group=self.group, async_op=True))

    def reduce_scatter(self, flat: Tensor, out: Tensor, buffer: int, add: bool) -> Handle:
        if not add and out.dtype == flat.dtype:
            return _in_flight(_reduce_scatter_single(out, flat, group=self.group, async_op=True))
        received = flat.new_empty(out.numel())
        work = _reduce_scatter_single(received, flat, group=self.group, async_op=True)

        def finish() -> None:
            sum_in_order(out, [received], add=add)

        return InFlight([(None, work)], finish)

    def all_reduce(self, tensor: Tensor, buffer: int) -> Handle:
        return _in_flight(dist.all_reduce(tensor, group=self.group, async_op=True))

    def all_to_all(self, outs: Sequence[Tensor], parts: Sequence[Tensor], buffer: int) -> Handle:
        return _in_flight(dist.all_to_all(list(outs), list(parts), group=self.group, async_op=True))

    def start_gather_small(self, values: Tensor, buffer: int) -> tuple[Tensor, Handle]:
        table = values.new_empty(self.world_size * values.numel())
        handle = self.all_gather(table, values.contiguous(), buffer)
        return table.view(self.world_size, -1), handle

    def send(self, tensor: Tensor, peer: int) -> Handle:
        work = dist.isend(tensor, group=self.group, group_dst=peer)
        return InFlight([(self.ranks[peer], work)])

    def receive(self, tensor: Tensor, peer: int) -> Handle:
        work = dist.irecv(tensor, group=self.group, group_src=peer)
        return InFlight([(self.ranks[peer], work)])

    def collect(self, out: Tensor | None, mine: Tensor, bounds: Bounds, target: int | None) -> None:
        # only gloo has messages of unequal size in one call, so every owner broadcasts its part
        for owner, (start, stop) in enumerate(bounds):
            if stop > start:
                part = mine if owner == self.rank else mine.new_empty(stop - start)
                self.broadcast(part, owner)
                if out is not None:
                    out[start:stop] = part

    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], buffer: int
    ) -> None:
        whole = shard.new_empty(self.world_size * shard.numel()) if flat is None else flat
        self.all_gather(whole, shard, buffer).wait()

    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, source: int) -> None:
        if self.rank != source:
            if out.numel():
                self.receive(out, source).wait()
            return
        assert full is not None
        for peer, (start, stop) in enumerate(bounds):
            if peer != source and stop > start:
                self.send(full[start:stop], peer).wait()
        out.copy_(full[slice(*bounds[source])])


def _in_flight(work: object) -> Handle:
    return InFlight([(None, work)])


# -- torch's collectives without xds, each complete on return; on a GPU, when its stream is ------------------


def all_gather(group: dist.ProcessGroup, flat: Tensor, shard: Tensor) -> None:
    """Fill `flat` [world_size * n] with every rank's `shard` [n]. **Collective.**"""
    _all_gather_single(flat, shard, group=group)


def reduce_scatter(group: dist.ProcessGroup, flat: Tensor, out: Tensor) -> None:
    """Fill `out` [n] with the sum of this rank's part of every `flat` [world_size * n]. **Collective.**"""
    _reduce_scatter_single(out, flat, group=group)


def all_reduce(group: dist.ProcessGroup, tensor: Tensor) -> None:
    """Overwrite `tensor` with its sum over the ranks. **Collective.**"""
    dist.all_reduce(tensor, group=group)


def all_to_all(group: dist.ProcessGroup, flat: Tensor, out: Tensor) -> None:
    """Send part p of `flat` [world_size * n] to rank p, and receive part p of `out` from it. **Collective.**"""
    dist.all_to_all_single(out, flat, group=group)


def send_right(group: dist.ProcessGroup, tensor: Tensor, out: Tensor) -> None:
    """Send `tensor` to the next rank and receive `out` from the previous one, at once. **Collective.**"""
    rank, world_size = group.rank(), group.size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    operations = [
        dist.P2POp(dist.isend, tensor, group=group, group_peer=right),
        dist.P2POp(dist.irecv, out, group=group, group_peer=left),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def send_to(group: dist.ProcessGroup, tensor: Tensor, source: int, target: int) -> None:
    """Send `tensor` of rank `source` to rank `target`. The other ranks do nothing."""
    if group.rank() == source:
        dist.send(tensor, group=group, group_dst=target)
    elif group.rank() == target:
        dist.recv(tensor, group=group, group_src=source)


__all__ = ["NcclBackend"]
