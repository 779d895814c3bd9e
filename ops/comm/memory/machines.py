"""The backend of ranks on several machines, of which some share a machine: two levels.

    reduce_scatter   inside    each rank adds, over the ranks of its machine, its own shard and its part of the
                               shards of other machines
                     across    the parts go to the owners of the shards: each byte once for a pair of machines
                     owner     adds the sums of the machines, in the order of their first ranks
    all_gather       across    each shard goes to each other machine once: its ranks get a part each
                     inside    the ranks copy shards and parts from one another

    ranks 0 1 | 2 3, shard 2 (c)     rank 0: first half of c0 + c1 ──> rank 2: + (c2 + c3)
                                     rank 1: second half           ──> rank 2

The sums of machines have the dtype that is sent. So each result depends on its own inputs and on the ranks'
places only, and stages have equal bits. All other messages go through memory to ranks inside, and through
gloo to each rank on other machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from ...flat import sum_in_order
from ...pool import BufferPool
from ..backend import Member, state_of
from ..handles import Handle, Lost, Messages, Works
from ..point_to_point import close_connections, post, transfer
from ..threads import OrderedThreads, ThreadJob
from .operations import GroupOperations, InMemory, WaitClock, can_sum
from .peers import Neighbours
from .segment import Segment
from .shared_memory import InMemoryBackend

# of all groups; jobs of different ones never wait for each other
_threads = OrderedThreads("xds-machines")
_SHARED = 1 << 40  # of a key: the second messages inside, of an all_gather


@final
class MachinesBackend(InMemoryBackend):
    """Operations of a group on several machines, with several ranks on at least one of them."""

    whole_sum = ("reduce_scatter", "all_gather")

    def __init__(
        self,
        member: Member,
        neighbours: Neighbours,
        timeout_seconds: float,
        *,
        is_hierarchical: bool = True,
    ) -> None:
        """is_hierarchical: False adds in rank order, and sends a shard to each rank of another machine."""
        super().__init__(member, neighbours, timeout_seconds)
        self.is_hierarchical = is_hierarchical
        hosts = neighbours.hosts
        self.is_across = [host != hosts[self.rank] for host in hosts]
        self._across = [rank for rank in range(self.world_size) if self.is_across[rank]]
        self._machines = [
            [rank for rank in range(self.world_size) if hosts[rank] == host]
            for host in sorted(set(hosts))
        ]
        self._own = next(ranks for ranks in self._machines if self.rank in ranks)
        self._place = {rank: place for ranks in self._machines for place, rank in enumerate(ranks)}
        self._beside = {rank: len(ranks) for ranks in self._machines for rank in ranks}
        self._arrived = BufferPool(partial(_empty, neighbours.segment))

    @property
    def scratch_bytes(self) -> int:
        return super().scratch_bytes + self._arrived.allocated_bytes

    def free_scratch(self) -> None:
        super().free_scratch()
        self._arrived.clear()

    def leave(self) -> None:
        super().leave()
        close_connections(self, self._across)

    # -- messages between two ranks ---------------------------------------------------------------------

    def _transfer(
        self,
        tag: int,
        receives: Messages,
        sends: Messages,
        finish: Callable[[], None] | None = None,
    ) -> Handle:
        receives_near, receives_far = self._by_place(receives)
        sends_near, sends_far = self._by_place(sends)
        inside = self.memory.transfer(tag, receives_near, sends_near)
        return _Both(inside, transfer(self, tag, receives_far, sends_far, finish))

    def _by_place(self, messages: Messages) -> tuple[Messages, Messages]:
        """The messages with ranks of this machine, and those with other ranks."""
        return (
            [message for message in messages if not self.is_across[message[0]]],
            [message for message in messages if self.is_across[message[0]]],
        )

    # -- two levels -------------------------------------------------------------------------------------

    def _part(self, shard: Tensor, rank: int) -> Tensor:
        """The part of a shard that `rank` handles for its machine."""
        place, count, numel = self._place[rank], self._beside[rank], shard.numel()
        return shard[numel * place // count : numel * (place + 1) // count]

    def reduce_scatter(self, flat: Tensor, out: Tensor, buffer: int, add: bool) -> Handle:
        if not self._reduces_on_levels(flat):
            return super().reduce_scatter(flat, out, buffer, add)
        tag = self._tag(buffer) + 1
        sums = self._reducing(flat, tag)

        def finish() -> None:
            sums.add_up(out, add=add)
            self._give_back(sums.buffers)

        return self._start(tag, sums.exchange, finish)

    def _reduces_on_levels(self, flat: Tensor) -> bool:
        return self.is_hierarchical and can_sum(flat.dtype, flat.dtype)

    def _reducing(self, flat: Tensor, tag: int) -> _Reducing:
        """Start to add inside the machine. The caller lets a thread call `exchange`."""
        shard = self.shard_of(flat)
        sums = {self._own[0]: self._scratch.take(shard.numel(), flat.dtype, flat.device)}
        parts = [(self.rank * shard.numel(), sums[self._own[0]])]
        shards = [(rank, self.shard_of(flat, rank)) for rank in self._across]
        sent = [(rank, self._part(shard, self.rank)) for rank, shard in shards]
        whole = sum(part.numel() for _, part in sent)
        scratch = self._scratch.take(whole, flat.dtype, flat.device)
        sends, offset = [], 0
        for rank, part in sent:
            sends.append((rank, scratch[offset : offset + part.numel()]))
            parts.append((int(part.storage_offset() - flat.storage_offset()), sends[-1][1]))
            offset += part.numel()
        receives = []
        for ranks in self._machines:
            if ranks is not self._own:
                sums[ranks[0]] = self._scratch.take(shard.numel(), flat.dtype, flat.device)
                receives += [(rank, self._part(sums[ranks[0]], rank)) for rank in ranks]
        inside = self.memory.sum(tag, flat, parts)

        def exchange(works: Works) -> None:
            post(self, works, tag, _filled(receives), [])
            _settle(inside)
            post(self, works, tag, [], _filled(sends))

        return _Reducing(exchange, sums, (scratch, *sums.values()))

    def _give_back(self, buffers: Sequence[Tensor]) -> None:
        for buffer in buffers:
            self._scratch.give(buffer)

    def _all_gather(self, flat: Tensor, shard: Tensor, tag: int) -> Handle:
        if not self.is_hierarchical or not shard.numel():
            return super()._all_gather(flat, shard, tag)
        if self.shard_of(flat).data_ptr() != shard.data_ptr():
            self.shard_of(flat).copy_(shard)
        exchange, received = self._gathering(flat, tag)
        inside = self.memory.all_gather(tag, flat, shard)
        return self._start(tag, partial(exchange, inside), partial(self._arrived.give, received))

    def _gathering(
        self, flat: Tensor, tag: int
    ) -> tuple[Callable[[InMemory, Works], None], Tensor]:
        """A function that sends this rank's part of `flat`, in a thread, and the memory that it needs.

        Its argument is the all_gather inside the machine, which has started.
        """
        shard = self.shard_of(flat)
        targets = {rank: self._part(self.shard_of(flat, rank), self.rank) for rank in self._across}
        whole = sum(part.numel() for part in targets.values())
        received = self._arrived.take(whole, flat.dtype, flat.device)
        receives, offset = [], 0
        for rank, part in targets.items():
            receives.append((rank, received[offset : offset + part.numel()]))
            offset += part.numel()
        sends = [(rank, self._part(shard, rank)) for rank in self._across]

        @torch.no_grad()
        def exchange(inside: InMemory, works: Works) -> None:
            post(self, works, tag, _filled(receives), _filled(sends))
            _await(works, len(_filled(receives)))
            for (_, source), target in zip(receives, targets.values(), strict=True):
                target.copy_(source)
            shared = self._share(tag, flat, received) if len(self._own) > 1 else None
            _settle(inside)
            if shared is not None:
                _settle(shared)

        return exchange, received

    def sums_whole(self, flat: Tensor, out: Tensor) -> bool:
        # the second half starts when the first is done, while the caller computes
        return bool(flat.numel()) and self._reduces_on_levels(flat)

    def sum_whole(self, flat: Tensor, out: Tensor, buffer: int) -> Sequence[Handle]:
        tag, shard = self._tag(buffer), self.shard_of(flat)
        sums = self._reducing(flat, tag + 1)

        @torch.no_grad()
        def reduce(works: Works) -> None:
            sums.exchange(works)
            _await(works)
            sums.add_up(out, add=False)
            if out.data_ptr() != shard.data_ptr():
                shard.copy_(out)

        reduced = self._start(tag + 1, reduce, partial(self._give_back, sums.buffers))
        exchange, received = self._gathering(flat, tag)
        first = reduced.job

        def gather(works: Works) -> None:
            first.join()
            exchange(self.memory.all_gather(tag, flat, shard), works)

        return reduced, self._start(tag, gather, partial(self._arrived.give, received))

    def publish_shared(self, flat: Tensor, buffer: int) -> Handle:
        shard, tag = self.shard_of(flat), self._tag(buffer)
        receives = [(r, self._part(self.shard_of(flat, r), self.rank)) for r in self._across]
        sends = [(rank, self._part(shard, rank)) for rank in self._across]

        def exchange(works: Works) -> None:
            post(self, works, tag, _filled(receives), _filled(sends))
            _await(works, len(_filled(receives)))
            _settle(self._meet(tag))

        return self._start(tag, exchange, _nothing)

    def _start(
        self,
        tag: int,
        exchange: Callable[[Works], None],
        finish: Callable[[], None],
    ) -> _Chained:
        """Let a thread run `exchange`, which adds its messages to a list, and wait for them.

        The caller does not start messages itself: gloo's thread holds the locks for that while it sends and
        receives.
        finish: Is called once in the handle's wait.
        """

        assert self.group is not None
        dropped = state_of(self.group).dropped

        def run() -> None:
            works: Works = []
            try:
                exchange(works)
                _await(works)
            except BaseException:
                dropped.append(works)  # their memory may still be written
                raise

        return _Chained(self.memory, _threads.add((id(self), tag), run), finish)

    def start_gather_small(self, values: Tensor, buffer: int) -> tuple[Tensor, Handle]:
        """Send to each rank at once, because the second level would cost more than it saves."""
        table, tag = self._table_of(values, buffer)
        flat = table.view(-1)
        return table, super()._all_gather(flat, self.shard_of(flat), tag)

    def _share(self, tag: int, flat: Tensor, received: Tensor) -> InMemory:
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
        return self.memory.gather_parts(tag + _SHARED, received, copies, flat)

    # -- bytes ------------------------------------------------------------------------------------------

    def across_numel(self, operation: str, flat: Tensor) -> int | None:
        numel = flat.numel() // self.world_size
        if operation == "reduce_scatter":
            if not self._reduces_on_levels(flat):
                return None
            place, count = self._place[self.rank], len(self._own)
            return len(self._across) * (numel * (place + 1) // count - numel * place // count)
        is_on_levels = self.is_hierarchical or operation == "publish_shared"
        return (len(self._machines) - 1) * numel if is_on_levels else None


def _empty(segment: Segment, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return segment.empty(numel, dtype)


@final
@dataclass(frozen=True, eq=False)
class _Reducing:
    """A reduce_scatter that has started inside the machine.

    exchange: Sends and receives, in a thread. found: The sums of each machine, by its first rank. buffers: The
    memory to give back at the end.
    """

    exchange: Callable[[Works], None]
    found: dict[int, Tensor]
    buffers: Sequence[Tensor]

    def add_up(self, out: Tensor, *, add: bool) -> None:
        sum_in_order(out, [self.found[rank] for rank in sorted(self.found)], add=add)


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
    """A job to wait for, and a function to call after it."""

    def __init__(self, memory: GroupOperations, job: ThreadJob, finish: Callable[[], None]) -> None:
        self.job = job
        self._memory = memory
        self._is_waited_for = False
        self._finish = finish

    def wait(self) -> None:
        job = self.job
        if self._is_waited_for:
            return
        self._is_waited_for = True
        clock = WaitClock()
        while not job.wait(0.2):
            if self._memory.is_out_of_time(clock):
                raise self._memory.lost("Timed out waiting for other machines", None)
        if job.error is not None:
            rank = job.error.rank if isinstance(job.error, Lost) else None
            raise self._memory.lost(str(job.error), rank) from job.error
        self._finish()


def _nothing() -> None:
    return


def _settle(inside: InMemory) -> None:
    failure = inside.settle()
    if failure is not None:
        raise Lost(*failure)


def _await(works: Works, count: int | None = None) -> None:
    """Wait for the messages, or for the first `count`, in a thread, and take them off the list."""
    for _ in range(len(works) if count is None else count):
        peer, work = works[0]
        try:
            work.wait()
        except RuntimeError as error:
            raise Lost(str(error), peer) from error
        del works[0]


def _filled(messages: Messages) -> list[tuple[int, Tensor]]:
    return [(rank, tensor) for rank, tensor in messages if tensor.numel()]


__all__ = ["MachinesBackend"]
