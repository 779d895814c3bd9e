"""The one door to torch.distributed: every collective of xds, on flat tensors, with its bytes counted.

On gloo the built-in reduce_scatter is a whole all_reduce and the built-in all_gather copies twice; both
are three to four times slower than point-to-point messages straight from and into the flat buffers.
So a CPU group gets `PeerToPeer`. Its sums run in rank order on the receiver, so the result does not
depend on where an element lies: stages and bucketings are bit-identical. Messages carry the number of
their buffer as tag, so two ranks may start them in different orders and still meet.
Every other backend (NCCL, MPI, torch's threaded test group) gets `Native`: its own collectives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import PeerError
from .flat import sum_in_order
from .pool import BufferPool

# torch 2.13 renamed these two; the old names warn there and the new ones do not exist in 2.11.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

TAG_BASE = 0x5D000  # away from the small tags that a user's own send and recv would take
TAGS_PER_BUFFER = 2
TAGS_PER_INSTANCE = 1 << 15  # so that two engines on one group never take each other's messages
CONTROL_BUFFER, ACCESS_BUFFER = -1, -2  # numbers of what is no flat buffer

Bounds = Sequence[tuple[int, int]]  # [start, stop) of each rank's part; empty parts are allowed
_instances: Counter[str] = Counter()  # by group: every rank opens its engines in the same order


class Handle(ABC):
    """A collective in flight. `wait` ends it; calling it twice is harmless."""

    @abstractmethod
    def wait(self) -> None: ...


@final
class Done(Handle):
    """Nothing was sent."""

    def wait(self) -> None:
        return


@final
class InFlight(Handle):
    """Works to wait for, then what is left to do with what arrived."""

    def __init__(
        self, name: str, works: Sequence[Any], finish: Callable[[], None] | None = None
    ) -> None:
        self._name = name
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise _peer_error(self._name, error) from error
        self._works = ()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


def _peer_error(name: str, error: RuntimeError) -> PeerError:
    return PeerError(
        f"{name} failed: {str(error).splitlines()[0].rstrip('.')}. Another rank stopped, or went another way "
        "through its code; look at the first traceback among the ranks' logs"
    )


class Collectives(ABC):
    """Collectives of one process group. Flat tensors are [world_size * shard_numel], shards [shard_numel].

    `buffer` numbers the flat buffer a message belongs to: concurrent messages of different buffers never
    mix. `sent_bytes` counts what this rank sent, for each kind, since construction.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, rank: int, world_size: int
    ) -> None:
        self.group = group
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.sent_bytes: dict[str, int] = {}

    def shard_of(self, flat: Tensor, rank: int | None = None) -> Tensor:
        """The view of `flat` that belongs to `rank` (default: this one)."""
        numel = flat.numel() // self.world_size
        return flat.narrow(0, (self.rank if rank is None else rank) * numel, numel)

    @property
    def scratch_bytes(self) -> int:
        """Memory that receives what travels; kept between steps."""
        return 0

    def _count(self, kind: str, shard: Tensor) -> None:
        """Every algorithm here sends (world_size - 1) shards: the lower bound."""
        sent = (self.world_size - 1) * shard.numel() * shard.element_size()
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + sent

    def _count_parts(self, kind: str, part: Tensor) -> None:
        """One message of `part`."""
        sent = part.numel() * part.element_size()
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + sent

    def _name(self, kind: str, buffer: int) -> str:
        return f"{kind} of flat buffer {buffer} on rank {self.rank} of {self.world_size}"

    @abstractmethod
    def all_gather(self, flat: Tensor, shard: Tensor, *, buffer: int, kind: str) -> Handle:
        """Fill `flat` with every rank's `shard`. Sends (world_size - 1) * shard bytes a rank.

        `shard` may be this rank's own slice of `flat`. Neither may be written before `wait`.
        """

    @abstractmethod
    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, add: bool, buffer: int, kind: str
    ) -> Handle:
        """out = (out +) the sum over ranks of their `flat`, this rank's shard of it.

        Shapes:  flat [world_size * n], out [n]; `out` may be wider than `flat`, and may be this rank's
                 slice of `flat` unless `add`.
        Sends:   (world_size - 1) * n elements of `flat`'s dtype a rank. Nothing may be written before `wait`.
        """

    @abstractmethod
    def collect(
        self, out: Tensor | None, mine: Tensor, bounds: Bounds, *, target: int | None = None
    ) -> None:
        """Put together what the ranks hold parts of: rank r's `mine` becomes out[start:stop] of bounds[r].

        Shapes:  out [n], mine [stop - start] of this rank's bounds. `out` may be None on a rank that is not
                 `target`; without `target` every rank gets all of it.
        Sends:   this rank's part to each receiver. Done on return.
        """

    @abstractmethod
    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, *, source: int = 0) -> None:
        """out = full[start:stop] of this rank's bounds, from rank `source`, which alone needs `full` [n].

        Sends:   from `source`, every other rank its part. Done on return.
        """

    @abstractmethod
    def gather_small(self, values: Tensor, buffer: int = CONTROL_BUFFER) -> Tensor:
        """[n] -> [world_size, n], in rank order, at once. For norms and flags: a few bytes."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite `tensor` on every rank with rank `source`'s (rank within the group)."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank came here."""


@final
class Alone(Collectives):
    """One rank: nothing is ever sent."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(None, device, 0, 1)

    def all_gather(self, flat: Tensor, shard: Tensor, *, buffer: int, kind: str) -> Handle:
        if flat.data_ptr() != shard.data_ptr():
            flat.copy_(shard)
        return Done()

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, add: bool, buffer: int, kind: str
    ) -> Handle:
        sum_in_order(out, [flat], add=add)
        return Done()

    def collect(
        self, out: Tensor | None, mine: Tensor, bounds: Bounds, *, target: int | None = None
    ) -> None:
        if out is not None:
            out[slice(*bounds[0])] = mine

    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, *, source: int = 0) -> None:
        assert full is not None
        out.copy_(full[slice(*bounds[0])])

    def gather_small(self, values: Tensor, buffer: int = CONTROL_BUFFER) -> Tensor:
        return values.unsqueeze(0)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return

    def barrier(self) -> None:
        return


@final
class PeerToPeer(Collectives):
    """Messages between all pairs, for gloo. See the module's docstring."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device, group.rank(), group.size())
        self._scratch = BufferPool()
        self._tag_base = TAG_BASE + TAGS_PER_INSTANCE * _instances[group.group_name]
        _instances[group.group_name] += 1
        # every rank starts with its right neighbour, so that no one is everybody's first target
        self._peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    @property
    def scratch_bytes(self) -> int:
        return self._scratch.allocated_bytes

    def _tag(self, buffer: int) -> int:
        return self._tag_base + TAGS_PER_BUFFER * buffer

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        assert self.group is not None
        try:
            return self.group.send([tensor], peer, tag)
        except RuntimeError as error:
            raise _peer_error(f"sending from rank {self.rank} to rank {peer}", error) from error

    def _recv(self, tensor: Tensor, peer: int, tag: int) -> Any:
        assert self.group is not None
        try:
            return self.group.recv([tensor], peer, tag)
        except RuntimeError as error:
            raise _peer_error(f"receiving on rank {self.rank} from rank {peer}", error) from error

    def all_gather(self, flat: Tensor, shard: Tensor, *, buffer: int, kind: str) -> Handle:
        tag = self._tag(buffer)
        own = self.shard_of(flat)
        works = [self._recv(self.shard_of(flat, peer), peer, tag) for peer in self._peers]
        works += [self._send(shard, peer, tag) for peer in self._peers]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        self._count(kind, shard)
        return InFlight(self._name(kind, buffer), works)

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, add: bool, buffer: int, kind: str
    ) -> Handle:
        tag = self._tag(buffer) + 1
        parts = {self.rank: self.shard_of(flat)}
        works = []
        for peer in self._peers:
            parts[peer] = self._scratch.take(out.numel(), flat.dtype, flat.device)
            works.append(self._recv(parts[peer], peer, tag))
        works += [self._send(self.shard_of(flat, peer), peer, tag) for peer in self._peers]
        self._count(kind, parts[self.rank])

        def finish() -> None:
            sum_in_order(out, [parts[rank] for rank in range(self.world_size)], add=add)
            for peer in self._peers:
                self._scratch.give(parts[peer])

        return InFlight(self._name(kind, buffer), works, finish)

    def collect(
        self, out: Tensor | None, mine: Tensor, bounds: Bounds, *, target: int | None = None
    ) -> None:
        tag = self._tag(ACCESS_BUFFER)
        works = []
        for peer in self._peers if target in (None, self.rank) else []:
            start, stop = bounds[peer]
            if stop > start:
                assert out is not None
                works.append(self._recv(out[start:stop], peer, tag))
        receivers = self._peers if target is None else [target]
        for peer in receivers if mine.numel() else []:
            if peer != self.rank:
                works.append(self._send(mine, peer, tag))
                self._count_parts("access", mine)
        if out is not None:
            out[slice(*bounds[self.rank])] = mine
        InFlight(self._name("collect", ACCESS_BUFFER), works).wait()

    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, *, source: int = 0) -> None:
        tag = self._tag(ACCESS_BUFFER) + 1
        works = []
        if self.rank == source:
            assert full is not None
            for peer in self._peers:
                part = full[slice(*bounds[peer])]
                if part.numel():
                    works.append(self._send(part, peer, tag))
                    self._count_parts("access", part)
            out.copy_(full[slice(*bounds[self.rank])])
        elif out.numel():
            works.append(self._recv(out, source, tag))
        InFlight(self._name("scatter", ACCESS_BUFFER), works).wait()

    def gather_small(self, values: Tensor, buffer: int = CONTROL_BUFFER) -> Tensor:
        table = values.new_empty(self.world_size, values.numel())
        table[self.rank] = values
        flat = table.view(-1)
        self.all_gather(flat, self.shard_of(flat), buffer=buffer, kind="control").wait()
        return table

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self._count("broadcast", tensor[:0])
        dist.broadcast(tensor, group=self.group, group_src=source)

    def barrier(self) -> None:
        dist.barrier(self.group)


@final
class Native(Collectives):
    """The backend's own collectives: NCCL, MPI, and torch's threaded group in tests."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device, group.rank(), group.size())

    def all_gather(self, flat: Tensor, shard: Tensor, *, buffer: int, kind: str) -> Handle:
        self._count(kind, shard)
        work = _all_gather_single(flat, shard, group=self.group, async_op=True)
        return InFlight(self._name(kind, buffer), [work])

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, add: bool, buffer: int, kind: str
    ) -> Handle:
        direct = not add and out.dtype == flat.dtype
        target = out if direct else flat.new_empty(out.numel())
        self._count(kind, target)
        work = _reduce_scatter_single(target, flat, group=self.group, async_op=True)
        if direct:
            return InFlight(self._name(kind, buffer), [work])

        def finish() -> None:
            sum_in_order(out, [target], add=add)

        return InFlight(self._name(kind, buffer), [work], finish)

    def collect(
        self, out: Tensor | None, mine: Tensor, bounds: Bounds, *, target: int | None = None
    ) -> None:
        # no backend but gloo has messages of unequal size in one call: every owner broadcasts its part
        for owner, (start, stop) in enumerate(bounds):
            if stop > start:
                part = mine if owner == self.rank else mine.new_empty(stop - start)
                dist.broadcast(part, group=self.group, group_src=owner)
                if out is not None:
                    out[start:stop] = part
        self._count_parts("access", mine)

    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, *, source: int = 0) -> None:
        if self.rank == source:
            assert full is not None
            for peer, (start, stop) in enumerate(bounds):
                if peer != source and stop > start:
                    dist.send(full[start:stop], group=self.group, group_dst=peer)
                    self._count_parts("access", full[start:stop])
            out.copy_(full[slice(*bounds[source])])
        elif out.numel():
            dist.recv(out, group=self.group, group_src=source)

    def gather_small(self, values: Tensor, buffer: int = CONTROL_BUFFER) -> Tensor:
        table = values.new_empty(self.world_size * values.numel())
        self.all_gather(table, values.contiguous(), buffer=buffer, kind="control").wait()
        return table.view(self.world_size, -1)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self._count("broadcast", tensor[:0])
        dist.broadcast(tensor, group=self.group, group_src=source)

    def barrier(self) -> None:
        dist.barrier(self.group)


def open_collectives(group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
    """The collectives that suit `group` and the device its tensors live on."""
    if group is None or group.size() == 1:
        return Alone(device)
    if device.type == "cpu" and dist.get_backend(group) == "gloo":
        return PeerToPeer(group, device)
    return Native(group, device)
