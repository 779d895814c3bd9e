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
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from .flat import sum_in_order
from .handles import Done, Handle, InFlight
from .pool import BufferPool
from .watch import Board, Mark, Watch
from .watch.config import WatchConfig
from .watch.device import Probe
from .watch.sentinel import attend, leave

# torch 2.13 renamed these two; the old names warn there and the new ones do not exist in 2.11.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

TAG_BASE = 0x5D000  # away from the small tags that a user's own send and recv would take
TAGS_PER_BUFFER = 2
TAGS_PER_INSTANCE = 1 << 16  # so that two engines on one group never take each other's messages
SMALL_TAGS = 1 << 14  # the last ones of an instance: small gathers, by their size
CONTROL_BUFFER, ACCESS_BUFFER = -1, -2  # numbers of what is no flat buffer

Bounds = Sequence[tuple[int, int]]  # [start, stop) of each rank's part; empty parts are allowed
_instances: Counter[str] = Counter()  # by group: every rank opens its engines in the same order


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
        instance = _instances[group.group_name] if group is not None else 0
        if group is not None:
            _instances[group.group_name] += 1
        self.instance = instance
        self._watch = Watch(rank, world_size, instance, partial(_board_of, group))
        self._watch.name(CONTROL_BUFFER, "norms and flags")
        self._watch.name(ACCESS_BUFFER, "a parameter")

    def name_buffer(self, buffer: int, name: str) -> None:
        """What messages call the flat buffer `buffer`, e.g. "unit 'blocks.5'"."""
        self._watch.name(buffer, name)

    def attend(self, section: WatchConfig, timeout_seconds: float) -> None:
        """Let the process's watcher speak for this rank until `leave`, where the group has a store.

        Args:
            timeout_seconds: of waits in the group, where it does not tell itself.
        """
        self._watch.keep(section.ring_size)
        if self.group is not None and self.world_size > 1:
            timeout_seconds = _timeout_of(self.group, self.device) or timeout_seconds
            attend(self._watch, self.group.group_name, section, timeout_seconds)

    def leave(self) -> None:
        """The end of `attend`."""
        leave(self._watch)

    def end_step(self) -> None:
        """A step of training is over: its time and its waiting are measured."""
        self._watch.step()

    def telling(self, where: str) -> AbstractContextManager[None]:
        """Around the user's code: an exception in it is named on the ranks that wait for this one."""
        return self._watch.telling(where)

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
    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], *, buffer: int
    ) -> None:
        """An all_gather that only `receivers` want: they fill their `flat`, the others just give.

        Sends this rank's shard to each receiver. Done on return.
        """

    @abstractmethod
    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, *, source: int = 0) -> None:
        """out = full[start:stop] of this rank's bounds, from rank `source`, which alone needs `full` [n].

        Sends:   from `source`, every other rank its part. Done on return.
        """

    @abstractmethod
    def gather_small(self, values: Tensor, buffer: int = CONTROL_BUFFER, what: str = "") -> Tensor:
        """[n] -> [world_size, n], in rank order, at once. For norms and flags: a few bytes.

        `what` it is about, for the message when a rank does not come, e.g. "get_full_param(blocks.0.bias)".
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite `tensor` on every rank with rank `source`'s (rank within the group)."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank came here."""

    def board(self) -> Board | None:
        """The store in which the ranks of the group met; None where there is none."""
        return _board_of(self.group)


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

    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], *, buffer: int
    ) -> None:
        if flat is not None:
            flat.copy_(shard)

    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, *, source: int = 0) -> None:
        assert full is not None
        out.copy_(full[slice(*bounds[0])])

    def gather_small(self, values: Tensor, buffer: int = CONTROL_BUFFER, what: str = "") -> Tensor:
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
        self._tag_base = TAG_BASE + TAGS_PER_INSTANCE * self.instance
        # every rank starts with its right neighbour, so that no one is everybody's first target
        self._peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    @property
    def scratch_bytes(self) -> int:
        return self._scratch.allocated_bytes

    def _tag(self, buffer: int) -> int:
        return self._tag_base + TAGS_PER_BUFFER * buffer

    def _small_tag(self, buffer: int, values: Tensor) -> int:
        """Messages of another size get another tag: gloo aborts the process when one does not fit."""
        distinct = 4 * values.numel() * values.element_size() - buffer
        return self._tag_base + TAGS_PER_INSTANCE - SMALL_TAGS + distinct % SMALL_TAGS

    def _start(
        self,
        mark: Mark,
        tag: int,
        receives: Iterable[tuple[int, Tensor]],
        sends: Iterable[tuple[int, Tensor]],
    ) -> list[tuple[int | None, Any]]:
        """Begin to receive and send (peer, tensor) pairs. What arrives must fit its tensor exactly."""
        assert self.group is not None
        works: list[tuple[int | None, Any]] = []
        peer = None
        try:
            for peer, tensor in receives:
                works.append((peer, self.group.recv([tensor], peer, tag)))
            for peer, tensor in sends:
                works.append((peer, self.group.send([tensor], peer, tag)))
        except RuntimeError as error:
            raise self._watch.failed(mark, error, peer) from error
        return works

    def all_gather(self, flat: Tensor, shard: Tensor, *, buffer: int, kind: str) -> Handle:
        mark = self._watch.start(kind, buffer, tensor=shard)
        return self._all_gather(mark, flat, shard, self._tag(buffer), kind)

    def _all_gather(self, mark: Mark, flat: Tensor, shard: Tensor, tag: int, kind: str) -> Handle:
        own = self.shard_of(flat)
        works = self._start(
            mark,
            tag,
            [(peer, self.shard_of(flat, peer)) for peer in self._peers],
            [(peer, shard) for peer in self._peers],
        )
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        self._count(kind, shard)
        return InFlight(self._watch, mark, works)

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, add: bool, buffer: int, kind: str
    ) -> Handle:
        mark = self._watch.start(kind, buffer, tensor=flat)
        parts = {self.rank: self.shard_of(flat)}
        for peer in self._peers:
            parts[peer] = self._scratch.take(out.numel(), flat.dtype, flat.device)
        works = self._start(
            mark,
            self._tag(buffer) + 1,
            [(peer, parts[peer]) for peer in self._peers],
            [(peer, self.shard_of(flat, peer)) for peer in self._peers],
        )
        self._count(kind, parts[self.rank])

        def finish() -> None:
            sum_in_order(out, [parts[rank] for rank in range(self.world_size)], add=add)
            for peer in self._peers:
                self._scratch.give(parts[peer])

        return InFlight(self._watch, mark, works, finish)

    def collect(
        self, out: Tensor | None, mine: Tensor, bounds: Bounds, *, target: int | None = None
    ) -> None:
        mark = self._watch.start("access", ACCESS_BUFFER, tensor=mine)
        receives = []
        for peer in self._peers if target in (None, self.rank) else []:
            start, stop = bounds[peer]
            if stop > start:
                assert out is not None
                receives.append((peer, out[start:stop]))
        receivers = self._peers if target is None else [target]
        sends = [(peer, mine) for peer in receivers if peer != self.rank and mine.numel()]
        works = self._start(mark, self._tag(ACCESS_BUFFER), receives, sends)
        for _, part in sends:
            self._count_parts("access", part)
        if out is not None:
            out[slice(*bounds[self.rank])] = mine
        InFlight(self._watch, mark, works).wait()

    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], *, buffer: int
    ) -> None:
        mark = self._watch.start("all_gather", buffer, tensor=shard)
        receives = []
        if flat is not None:
            receives = [(peer, self.shard_of(flat, peer)) for peer in self._peers]
            self.shard_of(flat).copy_(shard)
        sends = [(peer, shard) for peer in receivers if peer != self.rank]
        works = self._start(mark, self._tag(buffer), receives, sends)
        for _, part in sends:
            self._count_parts("all_gather", part)
        InFlight(self._watch, mark, works).wait()

    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, *, source: int = 0) -> None:
        mark = self._watch.start("access", ACCESS_BUFFER, tensor=out)
        receives, sends = [], []
        if self.rank == source:
            assert full is not None
            parts = [(peer, full[slice(*bounds[peer])]) for peer in self._peers]
            sends = [(peer, part) for peer, part in parts if part.numel()]
            out.copy_(full[slice(*bounds[self.rank])])
        elif out.numel():
            receives = [(source, out)]
        works = self._start(mark, self._tag(ACCESS_BUFFER) + 1, receives, sends)
        for _, part in sends:
            self._count_parts("access", part)
        InFlight(self._watch, mark, works).wait()

    def gather_small(self, values: Tensor, buffer: int = CONTROL_BUFFER, what: str = "") -> Tensor:
        kind = "access" if buffer == ACCESS_BUFFER else "exchange"
        mark = self._watch.start(kind, buffer, what, values)
        table = values.new_empty(self.world_size, values.numel())
        table[self.rank] = values
        flat = table.view(-1)
        tag = self._small_tag(buffer, values)
        self._all_gather(mark, flat, self.shard_of(flat), tag, "control").wait()
        return table

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self._count("broadcast", tensor.new_empty(0))
        with self._watch.guard("broadcast", CONTROL_BUFFER, "rank 0's values", tensor):
            dist.broadcast(tensor, group=self.group, group_src=source)

    def barrier(self) -> None:
        with self._watch.guard("barrier", CONTROL_BUFFER, "all ranks"):
            dist.barrier(self.group)


@final
class Native(Collectives):
    """The backend's own collectives: NCCL, MPI, and torch's threaded group in tests."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device, group.rank(), group.size())
        if device.type == "cuda":
            self._watch.probe = Probe(device)

    def all_gather(self, flat: Tensor, shard: Tensor, *, buffer: int, kind: str) -> Handle:
        return self._all_gather(self._watch.start(kind, buffer, tensor=shard), flat, shard, kind)

    def _all_gather(self, mark: Mark, flat: Tensor, shard: Tensor, kind: str) -> Handle:
        self._count(kind, shard)
        work = _all_gather_single(flat, shard, group=self.group, async_op=True)
        return InFlight(self._watch, mark, [(None, work)])

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, add: bool, buffer: int, kind: str
    ) -> Handle:
        mark = self._watch.start(kind, buffer, tensor=flat)
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
        # no backend but gloo has messages of unequal size in one call: every owner broadcasts its part
        for owner, (start, stop) in enumerate(bounds):
            if stop > start:
                part = mine if owner == self.rank else mine.new_empty(stop - start)
                with self._watch.guard("access", ACCESS_BUFFER, tensor=part):
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
        with self._watch.guard("access", ACCESS_BUFFER, tensor=out):
            if self.rank == source:
                assert full is not None
                for peer, (start, stop) in enumerate(bounds):
                    if peer != source and stop > start:
                        dist.send(full[start:stop], group=self.group, group_dst=peer)
                        self._count_parts("access", full[start:stop])
                out.copy_(full[slice(*bounds[source])])
            elif out.numel():
                dist.recv(out, group=self.group, group_src=source)

    def gather_small(self, values: Tensor, buffer: int = CONTROL_BUFFER, what: str = "") -> Tensor:
        table = values.new_empty(self.world_size * values.numel())
        kind = "access" if buffer == ACCESS_BUFFER else "exchange"
        mark = self._watch.start(kind, buffer, what, values)
        self._all_gather(mark, table, values.contiguous(), "control").wait()
        return table.view(self.world_size, -1)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self._count("broadcast", tensor.new_empty(0))
        with self._watch.guard("broadcast", CONTROL_BUFFER, "rank 0's values", tensor):
            dist.broadcast(tensor, group=self.group, group_src=source)

    def barrier(self) -> None:
        with self._watch.guard("barrier", CONTROL_BUFFER, "all ranks"):
            dist.barrier(self.group)


def _board_of(group: dist.ProcessGroup | None) -> Board | None:
    """Where the ranks of `group` met: it still answers when the group does not."""
    try:
        return None if group is None else group.get_group_store()
    except RuntimeError:
        return None


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long a wait in `group` lasts at most; 0 where this torch or backend does not tell."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return 0.0


def open_collectives(group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
    """The collectives that suit `group` and the device its tensors live on."""
    if group is None or group.size() == 1:
        return Alone(device)
    if device.type == "cpu" and dist.get_backend(group) == "gloo":
        return PeerToPeer(group, device)
    return Native(group, device)
