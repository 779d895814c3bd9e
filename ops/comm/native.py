"""Collectives of the backend itself: NCCL, MPI, and torch's threaded group in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from ..flat import sum_in_order
from ..watch import Mark
from ..watch.device import Probe
from .collectives import (
    ACCESS_BUFFER,
    ACTIVATION_BUFFER,
    CONTROL_BUFFER,
    MESSAGE_BUFFER,
    Bounds,
    Collectives,
    PartOf,
)
from .handles import Handle, InFlight

# torch 2.13 renamed these two; the old names warn there and the new ones do not exist in 2.11.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@final
class Native(Collectives):
    """Collectives that call the backend's own: NCCL, MPI, and torch's threaded group in tests."""

    has_tags = False

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, part_of: PartOf | None = None
    ) -> None:
        super().__init__(group, device, group.rank(), group.size(), part_of)
        if device.type == "cuda":
            self._watch.probe = Probe(device)

    def all_gather(self, flat: Tensor, shard: Tensor, *, buffer: int, kind: str) -> Handle:
        return self._all_gather(
            self._record("all_gather", kind, buffer, tensor=shard), flat, shard, kind
        )

    def _all_gather(self, mark: Mark, flat: Tensor, shard: Tensor, kind: str) -> Handle:
        self._count(kind, shard)
        work = _all_gather_single(flat, shard, group=self.group, async_op=True)
        return InFlight(self._watch, mark, [(None, work)])

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, add: bool, buffer: int, kind: str
    ) -> Handle:
        mark = self._record("reduce_scatter", kind, buffer, tensor=flat)
        direct = not add and out.dtype == flat.dtype
        target = out if direct else flat.new_empty(out.numel())
        self._count(kind, target)
        work = _reduce_scatter_single(target, flat, group=self.group, async_op=True)
        if direct:
            return InFlight(self._watch, mark, [(None, work)])

        def finish() -> None:
            sum_in_order(out, [target], add=add)

        return InFlight(self._watch, mark, [(None, work)], finish)

    def collect(
        self, out: Tensor | None, mine: Tensor, bounds: Bounds, *, target: int | None = None
    ) -> None:
        # only gloo supports messages of unequal size in one call, so every owner broadcasts its part
        for owner, (start, stop) in enumerate(bounds):
            if stop > start:
                part = mine if owner == self.rank else mine.new_empty(stop - start)
                with self._guard("broadcast", "access", ACCESS_BUFFER, tensor=part):
                    dist.broadcast(part, group=self.group, group_src=owner)
                if out is not None:
                    out[start:stop] = part
        self._count_parts("access", mine)

    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], *, buffer: int
    ) -> None:
        whole = shard.new_empty(self.world_size * shard.numel()) if flat is None else flat
        self.all_gather(whole, shard, buffer=buffer, kind="all_gather").wait()

    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, *, source: int = 0) -> None:
        with self._guard("scatter", "access", ACCESS_BUFFER, tensor=out) as mark:
            self._of_size(mark, bounds[-1][1])
            if self.rank == source:
                assert full is not None
                for peer, (start, stop) in enumerate(bounds):
                    if peer != source and stop > start:
                        dist.send(full[start:stop], group=self.group, group_dst=peer)
                        self._count_parts("access", full[start:stop], peer)
                out.copy_(full[slice(*bounds[source])])
            elif out.numel():
                dist.recv(out, group=self.group, group_src=source)

    def send(self, tensor: Tensor, peer: int, *, number: int, what: str, kind: str) -> Handle:
        mark = self._record("send", "send", MESSAGE_BUFFER, what, tensor, peer=peer)
        self._count_parts(kind, tensor, peer)
        work = dist.isend(tensor, group=self.group, group_dst=peer)
        return InFlight(self._watch, mark, [(self._ranks[peer], work)])

    def receive(self, tensor: Tensor, peer: int, *, number: int, what: str) -> Handle:
        mark = self._record("receive", "receive", MESSAGE_BUFFER, what, tensor, peer=peer)
        work = dist.irecv(tensor, group=self.group, group_src=peer)
        return InFlight(self._watch, mark, [(self._ranks[peer], work)])

    def all_reduce(
        self, tensor: Tensor, *, what: str, kind: str, buffer: int = ACTIVATION_BUFFER
    ) -> Handle:
        mark = self._record("all_reduce", kind, buffer, what, tensor)
        self._count_all_reduce(kind, tensor)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return InFlight(self._watch, mark, [(None, work)])

    def all_to_all(
        self,
        outs: Sequence[Tensor],
        parts: Sequence[Tensor],
        *,
        what: str,
        kind: str,
        buffer: int = ACTIVATION_BUFFER,
    ) -> Handle:
        mark = self._record("all_to_all", kind, buffer, what, parts[0])
        self._of_parts(mark, parts)
        for peer, part in enumerate(parts):
            if peer != self.rank:
                self._count_parts(kind, part, peer)
        work = dist.all_to_all(list(outs), list(parts), group=self.group, async_op=True)
        return InFlight(self._watch, mark, [(None, work)])

    def start_gather_small(
        self, values: Tensor, buffer: int = CONTROL_BUFFER, what: str = ""
    ) -> tuple[Tensor, Handle]:
        table = values.new_empty(self.world_size * values.numel())
        kind = "access" if buffer == ACCESS_BUFFER else "exchange"
        mark = self._record("all_gather", kind, buffer, what, values)
        handle = self._all_gather(mark, table, values.contiguous(), "control")
        return table.view(self.world_size, -1), handle
