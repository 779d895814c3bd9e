"""Collectives of ranks on several machines, of which some share a machine: two levels.

    reduce_scatter   inside    each rank adds, over the ranks of its machine, its own shard and its part of the
                               shards of other machines
                     across    the parts go to the owners of the shards: each byte once for each pair of machines
                     owner     adds the sums of the machines, in the order of their first ranks
    all_gather       across    each shard goes to each other machine once: its ranks get a part each
                     inside    the ranks copy shards and parts from one another

    ranks 0 1 | 2 3, shard 2 (c)     rank 0: first half of c0 + c1 ──> rank 2: + (c2 + c3)
                                     rank 1: second half           ──> rank 2

The sums of machines are in the dtype that is sent. So each result depends on its own inputs and on the ranks'
places only, and stages have equal bits. All other messages go to ranks inside through memory, and to each rank
across by gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from ..flat import sum_in_order
from ..watch import Mark
from .collectives import Collectives, PartOf
from .handles import Handle, InFlight
from .in_order import InOrder, Job
from .memory import operations
from .memory.meeting import Neighbours
from .memory.operations import InMemory, Line, Messages
from .pairwise import Pairwise
from .point_to_point import dropped_of, post
from .pool import BufferPool

_jobs = InOrder("xds-machines")
_SHARED = 1 << 40  # of a key: the second messages inside, of an all_gather


@final
class Machines(Pairwise):
    """Collectives of a group on several machines, with several ranks on at least one of them."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        neighbours: Neighbours,
        timeout_seconds: float,
        part_of: PartOf | None = None,
        successor_of: Collectives | None = None,
        *,
        is_hierarchical: bool = True,
    ) -> None:
        """is_hierarchical: False adds in rank order, and sends a shard to each rank of another machine."""
        super().__init__(group, device, part_of, successor_of)
        self.neighbours = neighbours
        self.is_hierarchical = is_hierarchical
        hosts = neighbours.hosts
        self._is_across = [host != hosts[self.rank] for host in hosts]
        self._across = [rank for rank in range(self.world_size) if self._is_across[rank]]
        self._machines = [
            [rank for rank in range(self.world_size) if hosts[rank] == host]
            for host in sorted(set(hosts))
        ]
        self._own = next(ranks for ranks in self._machines if self.rank in ranks)
        self._place = {rank: at for ranks in self._machines for at, rank in enumerate(ranks)}
        self._beside = {rank: len(ranks) for ranks in self._machines for rank in ranks}
        self._line = Line(neighbours, self._watch, self._ranks, timeout_seconds)
        self._dropped = dropped_of(group)
        self._arrived = BufferPool(lambda numel, dtype, _: self.empty(numel, dtype))

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        if device is not None and device.type != "cpu":
            return super().empty(numel, dtype, device)
        return self.neighbours.segment.empty(numel, dtype)

    # -- messages between two ranks ---------------------------------------------------------------------

    def _transfer(
        self,
        mark: Mark,
        tag: int,
        receives: Messages,
        sends: Messages,
        finish: Callable[[], None] | None = None,
    ) -> Handle:
        near = [[m for m in each if not self._is_across[m[0]]] for each in (receives, sends)]
        far = [[m for m in each if self._is_across[m[0]]] for each in (receives, sends)]
        inside = self._line.transfer(mark, tag, *near)
        works = post(self, mark, tag, *far)
        return _Both(inside, InFlight(self._watch, mark, works, finish, self._dropped))

    def _exchange(self, mark: Mark, tag: int, receives: Messages, sends: Messages) -> None:
        self._transfer(mark, tag, receives, sends).wait()

    # -- two levels -------------------------------------------------------------------------------------

    def _part(self, shard: Tensor, rank: int) -> Tensor:
        """The part of a shard that `rank` handles for its machine."""
        at, count, numel = self._place[rank], self._beside[rank], shard.numel()
        return shard[numel * at // count : numel * (at + 1) // count]

    def _reduce_scatter(
        self, mark: Mark, flat: Tensor, out: Tensor, add: bool, tag: int, kind: str
    ) -> Handle:
        if not self.is_hierarchical or not operations.can_sum(flat.dtype, flat.dtype):
            return super()._reduce_scatter(mark, flat, out, add, tag, kind)
        found = {self._own[0]: self._scratch.take(out.numel(), flat.dtype, flat.device)}
        parts = [(self.rank * out.numel(), found[self._own[0]])]
        shards = [(rank, self.shard_of(flat, rank)) for rank in self._across]
        sent = [(rank, self._part(shard, self.rank)) for rank, shard in shards]
        whole = sum(part.numel() for _, part in sent)
        self._count_links(kind, flat, whole)
        scratch = self._scratch.take(whole, flat.dtype, flat.device)
        sends, at = [], 0
        for rank, part in sent:
            sends.append((rank, scratch[at : at + part.numel()]))
            parts.append((part.storage_offset() - flat.storage_offset(), sends[-1][1]))
            at += part.numel()
        receives = []
        for ranks in self._machines:
            if ranks is not self._own:
                found[ranks[0]] = self._scratch.take(out.numel(), flat.dtype, flat.device)
                receives += [(rank, self._part(found[ranks[0]], rank)) for rank in ranks]
        works = post(self, mark, tag, _filled(receives), [])
        inside = self._line.sum(mark, tag, flat, parts)

        def send() -> None:
            _settle(inside)
            works.extend(post(self, mark, tag, [], _filled(sends)))

        def finish() -> None:
            sum_in_order(out, [found[rank] for rank in sorted(found)], add=add)
            for buffer in (scratch, *found.values()):
                self._scratch.give(buffer)

        across = InFlight(self._watch, mark, works, finish, self._dropped)
        return _Chained(self._line, mark, _jobs.add(send), [across], [], _nothing)

    def _all_gather(self, mark: Mark, flat: Tensor, shard: Tensor, tag: int, kind: str) -> Handle:
        if not self.is_hierarchical or not shard.numel():
            return super()._all_gather(mark, flat, shard, tag, kind)
        self._count_links(kind, flat, (len(self._machines) - 1) * shard.numel())
        if self.shard_of(flat).data_ptr() != shard.data_ptr():
            self.shard_of(flat).copy_(shard)
        inside = self._line.all_gather(mark, tag, flat, shard)
        targets = {rank: self._part(self.shard_of(flat, rank), self.rank) for rank in self._across}
        whole = sum(part.numel() for part in targets.values())
        received = self._arrived.take(whole, flat.dtype, flat.device)
        receives, at = [], 0
        for rank, part in targets.items():
            receives.append((rank, received[at : at + part.numel()]))
            at += part.numel()
        sends = [(rank, self._part(shard, rank)) for rank in self._across]
        arrivals = post(self, mark, tag, _filled(receives), [])
        sent = InFlight(
            self._watch, mark, post(self, mark, tag, [], _filled(sends)), None, self._dropped
        )
        last: list[InMemory] = []

        @torch.no_grad()
        def share() -> None:
            for _, work in arrivals:
                work.wait()
            for (_, source), target in zip(receives, targets.values(), strict=True):
                target.copy_(source)
            if len(self._own) > 1:
                last.append(self._share(mark, tag, flat, received))

        def finish() -> None:
            self._arrived.give(received)

        return _Chained(self._line, mark, _jobs.add(share), [inside, sent], last, finish)

    def _share(self, mark: Mark, tag: int, flat: Tensor, received: Tensor) -> InMemory:
        """Copy what the other ranks of this machine have received into `flat`, and let them copy `received`."""
        copies = []
        for peer in self._own:
            rows = []
            at_bytes = 0
            for rank in self._across:
                part = self._part(self.shard_of(flat, rank), peer)
                rows.append((at_bytes, part.nbytes, part.data_ptr()))
                at_bytes += part.nbytes
            copies += [(peer, at_bytes, *row) for row in rows if peer != self.rank]
        return self._line.gather_parts(mark, tag + _SHARED, received, copies, flat)

    # -- bytes ------------------------------------------------------------------------------------------

    def _count_links(self, kind: str, flat: Tensor, across_numel: int) -> None:
        """Count (world_size - 1) shards of `flat`, of which so many elements leave the machine."""
        item = flat.element_size()
        self._add_link(
            kind,
            flat.numel() // self.world_size * (self.world_size - 1) * item,
            across_numel * item,
        )


@final
class _Both(Handle):
    """Two handles."""

    def __init__(self, first: Handle, second: Handle) -> None:
        self._handles = first, second

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


@final
class _Chained(Handle):
    """A job, handles of what was started with it, and those that it starts."""

    def __init__(
        self,
        line: Line,
        mark: Mark,
        job: Job,
        handles: Sequence[Handle],
        last: Sequence[Handle],
        finish: Callable[[], None],
    ) -> None:
        self._line = line
        self._mark = mark
        self._job: Job | None = job
        self._handles = handles
        self._last = last
        self._finish = finish

    def wait(self) -> None:
        job, self._job = self._job, None
        if job is None:
            return
        watch, mark = self._line.watch, self._mark
        begin_seconds = watch.begin_wait(mark)
        while not job.wait(0.2):
            if self._line.is_over(begin_seconds):
                raise self._line.failed(mark, "Timed out waiting for other machines", None)
        if job.error is not None:
            reason = str(job.error)
            raise self._line.failed(mark, reason, getattr(job.error, "rank", None)) from job.error
        watch.end_wait(mark, begin_seconds)
        for handle in (*self._handles, *self._last):
            handle.wait()
        self._finish()


@final
class _Lost(RuntimeError):
    """A rank of this machine does not take part."""

    def __init__(self, reason: str, rank: int | None) -> None:
        super().__init__(reason)
        self.rank = rank


def _settle(inside: InMemory) -> None:
    failure = inside.settle()
    if failure is not None:
        raise _Lost(*failure)


def _filled(messages: Messages) -> list[tuple[int, Tensor]]:
    return [(rank, tensor) for rank, tensor in messages if tensor.numel()]


def _nothing() -> None:
    return


__all__ = ["Machines"]
