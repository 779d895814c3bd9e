"""The collective operations of a group. Every message of a training goes through `Collectives`.

user code ──> Collectives.all_gather(flat, shard, buffer=3, kind="params")
                │  1  watch: count it, keep it in the ring with the line of the script
                │  2  message_log: start a clock, if it is on
                │  3  backend: start the operation (gloo, NCCL, shared memory, ...; see backend.py)
                │  4  traffic: count the bytes
                └──> Call, whose `wait` measures the wait, and raises PeerError if a rank does not take part
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from ..flat import moved
from ..watch.config import WatchConfig
from ..watch.ring import Record
from ..watch.watch import Watch
from .backend import (
    ACCESS_BUFFER,
    ACTIVATION_BUFFER,
    CONTROL_BUFFER,
    MESSAGE_BUFFER,
    Backend,
    Bounds,
    SharedFlat,
)
from .handles import DONE, Handle, Lost
from .message_log import Clock, MessageLog, Timed, Traffic

if TYPE_CHECKING:
    from ..watch.store import Store

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class PartOf:
    """The collectives of all ranks, and the ranks of a group among them, ascending."""

    world: Collectives
    ranks: tuple[int, ...]


@final
class Collectives:
    """The collective operations of one process group, which are counted, logged and watched.

    Every operation is **collective** unless it says otherwise: all ranks of the group must call it. Flat
    tensors are [world_size * shard_numel], shards are [shard_numel].

    Arguments that many operations have:
        buffer: The number of the flat buffer that a tensor belongs to. Operations of different buffers are
            never mixed, and ranks may start them in different orders where `has_tags`.
        kind: The name under which the bytes are counted, e.g. "params".
        what: The subject in errors, e.g. "the output of blocks.0.mlp.down".

    Operations that return a `Handle` are complete after its `wait`. Until then, neither inputs nor outputs
    may be written. An operation and a wait raise `PeerError` if another rank does not take part.

    Attributes:
        backend: What carries the operations.
        watch: What this rank has started, and the diagnosis of failures. All groups of an engine share it.
        message_log: Times of the operations. All groups of an engine share it.
        traffic: The bytes that this rank has sent.
    """

    def __init__(self, backend: Backend, part_of: PartOf | None = None) -> None:
        """part_of: The collectives of all ranks, which have the watch and the log; None if these are they."""
        self.backend = backend
        self.group = backend.group
        self.device = backend.device
        self.rank = backend.rank
        self.world_size = backend.world_size
        # some ranks may be new: what ranks send in their first forwards is over
        self.was_reopened = False
        self.traffic = Traffic(self.world_size)
        self._members = None if part_of is None else part_of.ranks
        self.watch: Watch
        self.message_log: MessageLog
        if part_of is not None:
            self.watch, self.message_log = part_of.world.watch, part_of.world.message_log
            return
        engine = backend.member.engine
        self.watch = Watch(self.rank, self.world_size, engine, partial(_store_of, self.group))
        self.message_log = MessageLog(self.rank, Clock(self.device))
        self.watch.name(CONTROL_BUFFER, "norms and flags")
        self.watch.name(ACCESS_BUFFER, "a parameter")

    def replace_backend(self, backend: Backend) -> None:
        """Carry all later operations by `backend`, and count bytes from 0."""
        self.backend = backend
        self.traffic = Traffic(self.world_size)

    def reopen(self, opened: Collectives) -> None:
        """Be the collectives of another generation of the group, or of this rank alone.

        Memory of `empty` stays valid. Operations of the group before are dropped: nobody may wait for them.

        Args:
            opened: The collectives of that group, which nothing else uses.
        """
        self.replace_backend(opened.backend)
        self.was_reopened = True
        self.group, self.rank = opened.backend.group, opened.backend.rank
        self.world_size = opened.backend.world_size
        self._members = opened._members
        if self._members is None:
            self.watch.regroup(self.rank, self.world_size, partial(_store_of, self.group))

    @property
    def members(self) -> Sequence[int]:
        """The numbers in the job of the ranks of this group."""
        return self.backend.ranks

    @property
    def has_tags(self) -> bool:
        """Ranks may start operations of different buffers in different orders."""
        return self.backend.has_tags

    def shard_of(self, flat: Tensor, rank: int | None = None) -> Tensor:
        """The view of `flat` that belongs to `rank`; None is this rank. Not collective."""
        return self.backend.shard_of(flat, rank)

    # -- operations in flight -------------------------------------------------------------------------------

    def all_gather(self, flat: Tensor, shard: Tensor, *, buffer: int, kind: str) -> Handle:
        """Fill `flat` with the `shard` of every rank, in rank order.

        Shapes:  flat [world_size * n], shard [n]; `shard` may be this rank's slice of `flat`.
        Sends:   (world_size - 1) * n elements from each rank.
        """
        call = self._call("all_gather", kind, buffer, shard)
        handle = call.start(self.backend.all_gather, flat, shard, buffer)
        self._count_flat("all_gather", kind, flat, shard.nbytes)
        return handle

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, add: bool, buffer: int, kind: str
    ) -> Handle:
        """Sum `flat` over the ranks, and write this rank's shard of the sum to `out`, or add it to `out`.

        The sum runs in rank order and in the dtype of `out`, so it does not depend on the position of an
        element. NCCL chooses its own order.

        Shapes:  flat [world_size * n], out [n]; `out` may be wider than `flat`, and may be this rank's slice of
                 `flat` unless `add`.
        Sends:   (world_size - 1) * n elements of `flat`'s dtype from each rank.
        """
        call = self._call("reduce_scatter", kind, buffer, flat)
        handle = call.start(self.backend.reduce_scatter, flat, out, buffer, add)
        self._count_flat("reduce_scatter", kind, flat, flat.nbytes // self.world_size)
        return handle

    def all_reduce(
        self, tensor: Tensor, *, what: str, kind: str, buffer: int = ACTIVATION_BUFFER
    ) -> Handle:
        """Overwrite `tensor`, contiguous, with its sum over the ranks. Every rank gets the same bits.

        All ranks wait for such operations in one order: a second round of messages begins in the wait.

        Sends:   2 (world_size - 1) / world_size of its bytes are counted. Every algorithm sends as much or
                 more.
        """
        call = self._call("all_reduce", kind, buffer, tensor, what)
        handle = call.start(self.backend.all_reduce, tensor, buffer)
        self._count_all_reduce(kind, tensor)
        return handle

    def sums_whole(self, flat: Tensor, out: Tensor) -> bool:
        """Whether `sum_whole` is faster than `reduce_scatter` and `all_gather`, the same on all ranks."""
        return self.backend.sums_whole(flat, out)

    def sum_whole(
        self, flat: Tensor, out: Tensor, *, buffer: int, kinds: tuple[str, str]
    ) -> tuple[Handle, Handle]:
        """Reduce_scatter `flat` [world_size * n] to `out` [n], and all_gather `out`, rounded, to `flat`.

        Call it where `sums_whole`. Bits and bytes are those of the two operations.

        Args:
            out: This rank's shard of `flat`, or a wider tensor.
            kinds: The kinds of the bytes of the reduce_scatter and of the all_gather.
        Returns: The handle of the sum, and that of the gathered values.
        """
        calls = [
            self._call(name, kind, buffer, self.shard_of(flat) if name == "all_gather" else flat)
            for name, kind in zip(self.backend.whole_sum, kinds, strict=False)
        ]
        started = calls[0].checked(self.backend.sum_whole, flat, out, buffer)
        handles = [call.hold(handle) for call, handle in zip(calls, started, strict=True)]
        for operation, kind in zip(("reduce_scatter", "all_gather"), kinds, strict=True):
            self._count_flat(operation, kind, flat, self.shard_of(flat).nbytes)
        return handles[0], handles[1] if len(handles) > 1 else DONE

    def all_to_all(
        self,
        outs: Sequence[Tensor],
        parts: Sequence[Tensor],
        *,
        what: str,
        kind: str,
        buffer: int = ACTIVATION_BUFFER,
    ) -> Handle:
        """Send parts[r] to each rank r, and fill outs[r] with the part that rank r sends to this rank.

        Shapes:  contiguous tensors of any shape; empty ones are allowed.
        Sends:   `parts` without this rank's own.
        """
        numel = sum(part.numel() for part in parts) if self.message_log.is_on else None
        call = self._call("all_to_all", kind, buffer, parts[self.rank], what, numel=numel)
        handle = call.start(self.backend.all_to_all, outs, parts, buffer)
        for peer, part in enumerate(parts):
            if peer != self.rank and part.numel():
                self.traffic.add_to(kind, part.nbytes, peer)
        return handle

    def send(self, tensor: Tensor, peer: int, *, what: str, kind: str) -> Handle:
        """Send contiguous `tensor` to rank `peer`, which calls `receive`. Not collective.

        Messages arrive in the order in which they were sent.
        """
        call = self._call("send", "send", MESSAGE_BUFFER, tensor, what, peer=peer)
        handle = call.start(self.backend.send, tensor, peer)
        self.traffic.add_to(kind, tensor.nbytes, peer)
        return handle

    def receive(self, tensor: Tensor, peer: int, *, what: str) -> Handle:
        """Fill contiguous `tensor` with a message of rank `peer`, of the same size. Not collective."""
        call = self._call("receive", "receive", MESSAGE_BUFFER, tensor, what, peer=peer)
        return call.start(self.backend.receive, tensor, peer)

    def start_gather_small(
        self, values: Tensor, buffer: int = CONTROL_BUFFER, what: str = ""
    ) -> tuple[Tensor, Handle]:
        """Start `gather_small`. Returns the table, whose values are there after the handle's `wait`."""
        if values.device.type != self.device.type:
            return self.gather_small(values, buffer, what), DONE
        call = self._call("all_gather", _small_kind(buffer), buffer, values, what)
        table, handle = call.checked(self.backend.start_gather_small, values, buffer)
        self._count_small("control", values.nbytes)
        return table, call.hold(handle)

    # -- operations that are complete on return -------------------------------------------------------------

    def gather_small(self, values: Tensor, buffer: int = CONTROL_BUFFER, what: str = "") -> Tensor:
        """Return the `values` [n] of every rank, [world_size, n], in rank order: norms, flags, a few bytes.

        Values on the host, such as fp64 of a device without it, are sent as bytes, and the host waits for them.
        """
        if values.device.type != self.device.type:
            sent = moved(values.contiguous().view(torch.uint8), self.device)
            every = self.gather_small(sent, buffer, what).cpu()
            return every.view(values.dtype).view(self.world_size, -1)
        call = self._call("all_gather", _small_kind(buffer), buffer, values, what)
        table = call.run(self.backend.gather_small, values, buffer)
        self._count_small("control", values.nbytes)
        return table

    def sum(self, tensor: Tensor, *, what: str, kind: str) -> None:
        """As `all_reduce`, complete on return, which is faster for small tensors."""
        self._call("all_reduce", kind, ACTIVATION_BUFFER, tensor, what).run(
            self.backend.sum, tensor
        )
        self._count_all_reduce(kind, tensor)

    def collect(
        self, out: Tensor | None, mine: Tensor, bounds: Bounds, *, target: int | None = None
    ) -> None:
        """Assemble a tensor from unequal parts: out[start:stop] of bounds[r] is `mine` of rank r.

        Shapes:  out [n], mine [stop - start] of this rank's bounds.
        Sends:   this rank's part to each receiver.

        Args:
            out: May be None on a rank that is not `target`.
            target: The only rank that receives; None for all ranks.
        """
        name = "all_gather" if target is None else "gather"
        call = self._call(name, "access", ACCESS_BUFFER, mine, numel=bounds[-1][1])
        call.run(self.backend.collect, out, mine, bounds, target)
        self._count_receivers(
            "access", mine, range(self.world_size) if target is None else [target]
        )

    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], *, buffer: int
    ) -> None:
        """As `all_gather`, to `receivers` only. They fill their `flat`; the other ranks have None.

        Sends:   this rank's shard to each receiver.
        """
        call = self._call("all_gather", "all_gather", buffer, shard)
        call.run(self.backend.serve, flat, shard, receivers, buffer)
        self._count_receivers("all_gather", shard, receivers)

    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, *, source: int = 0) -> None:
        """Fill `out` with full[start:stop] of this rank's bounds, from rank `source`.

        Shapes:  full [n], needed on `source` only; out [stop - start].
        Sends:   from `source`, the part of each other rank.
        """
        call = self._call("scatter", "access", ACCESS_BUFFER, out, numel=bounds[-1][1])
        call.run(self.backend.scatter, full, out, bounds, source)
        if self.rank == source and full is not None:
            for peer, (start, stop) in enumerate(bounds):
                if peer != source and stop > start:
                    self.traffic.add_to("access", (stop - start) * full.element_size(), peer)

    def broadcast(
        self, tensor: Tensor, source: int = 0, what: str = "the first rank's values"
    ) -> None:
        """Overwrite `tensor` with that of rank `source`, a number in this group."""
        call = self._call("broadcast", "broadcast", CONTROL_BUFFER, tensor, what)
        call.run(self.backend.broadcast, tensor, source)
        self._count_small("broadcast", tensor.nbytes if self.rank == source else 0)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        call = self._call("barrier", "barrier", CONTROL_BUFFER, None, "all ranks")
        call.run(self.backend.barrier)

    # -- memory ---------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Memory [numel], undefined, from which this group sends fast. Not collective.

        device: None is that of the group. The storage may be of a fixed size.
        """
        return self.backend.empty(numel, dtype, device or self.device)

    def share(self, numel: int, dtype: torch.dtype, text: str) -> SharedFlat | None:
        """Memory [numel], undefined, that the ranks of each machine have once. None on all ranks if they
        cannot.

        text: Is printed when a script writes to it.
        """
        gather = partial(self.gather_small, what="memory for shared parameters")
        return self.backend.share(numel, dtype, text, gather)

    def publish_shared(self, flat: Tensor, *, buffer: int, kind: str) -> Handle:
        """As `all_gather` into `flat`, the writable view of `share`. Each rank has written its shard.

        Sends:   nothing inside a machine, each shard once to each other machine.
        """
        call = self._call("all_gather", kind, buffer, self.shard_of(flat))
        handle = call.start(self.backend.publish_shared, flat, buffer)
        sent_bytes = (self.backend.across_numel("publish_shared", flat) or 0) * flat.element_size()
        self.traffic.add(kind, sent_bytes, sent_bytes)
        return handle

    def wait_for_readers(self) -> None:
        """Wait for all ranks of this machine, before and after writes to memory that they `share`."""
        call = self._call("barrier", "barrier", CONTROL_BUFFER, None, "shared parameters")
        call.run(self.backend.wait_for_readers)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the receive buffers, which are kept between steps."""
        return self.backend.scratch_bytes

    def free_scratch(self) -> None:
        """Free the receive buffers that are not in use. Not collective."""
        self.backend.free_scratch()

    # -- records --------------------------------------------------------------------------------------------

    def _call(
        self,
        operation: str,
        kind: str,
        buffer: int,
        tensor: Tensor | None,
        what: str = "",
        *,
        peer: int | None = None,
        numel: int | None = None,
    ) -> Call:
        """Record that this rank starts an operation.

        Args:
            operation: One of `OPERATIONS`.
            peer: The other rank of a message. A message has no second start to compare with.
            numel: How many elements the whole operation has. None for those of `tensor`, times the number of
                ranks in an all_gather.
        """
        if not self.backend.is_recorded:
            return Call(None, None, None)
        watch, log = self.watch, self.message_log
        record = watch.start(kind, buffer, what, tensor)
        record.members = self._members if peer is None else ()
        if not log.is_on:
            return Call(watch, record, None)
        ranks = self.members if peer is None else sorted(self.members[r] for r in (self.rank, peer))
        if numel is None:
            numel = record.numel * (self.world_size if operation == "all_gather" else 1)
        size_bytes = numel * (0 if record.dtype is None else record.dtype.itemsize)
        subject = watch.call(record.key).partition(" of ")[2] if log.options.debug else ""
        return Call(watch, record, log.start(operation, size_bytes, ranks, subject))

    def name_buffer(self, buffer: int, name: str) -> None:
        """Set the name of the flat buffer `buffer` in messages, e.g. "unit 'blocks.5'"."""
        self.watch.name(buffer, name)

    def name_places(self, places: Mapping[int, str]) -> None:
        """Set what each rank has in messages, e.g. "stage 1"."""
        self.watch.places = places

    def start_watching(self, section: WatchConfig, timeout_seconds: float) -> None:
        """Let the process's watcher serve this rank until `stop_watching`, where the group has a store.

        Args:
            timeout_seconds: The timeout of waits in the group, where the group does not provide it.
        """
        self.watch.keep(section.ring_size)
        if self.group is not None and self.world_size > 1:
            from ..watch.watcher import start_watching

            timeout_seconds = timeout_of(self.group, self.device) or timeout_seconds
            start_watching(self.watch, self.group.group_name, section, timeout_seconds)

    def stop_watching(self) -> None:
        """Undo `start_watching`."""
        if self.watch.diagnoser is not None:
            from ..watch.watcher import stop_watching

            stop_watching(self.watch)

    def end_step(self) -> None:
        """Record the end of a training step, with its time and its wait time."""
        self.watch.step()

    def publishing_errors(self, where: str) -> AbstractContextManager[None]:
        """Wrap user code. The ranks that wait for this rank are told of an exception in it."""
        return self.watch.publishing_errors(where)

    def leave(self) -> None:
        """Fail the waits of the ranks that wait for this one. Not collective; the group does not recover.

        No effect with NCCL.
        """
        self.backend.leave()

    def store(self) -> Store | None:
        """The store of the group; None where there is none."""
        return _store_of(self.group)

    # -- bytes ----------------------------------------------------------------------------------------------

    @property
    def sent_bytes(self) -> dict[str, int]:
        """The bytes that this rank has sent, by kind."""
        return self.traffic.sent_bytes

    @property
    def sent_across_bytes(self) -> dict[str, int]:
        """Those bytes that went to other machines, by kind, where `set_hosts` was called."""
        return self.traffic.sent_across_bytes

    @property
    def exact_bytes(self) -> dict[str, int]:
        """The bytes that compressed messages stand for, by kind."""
        return self.traffic.exact_bytes

    def set_hosts(self, numbers: Sequence[int]) -> None:
        """Count bytes to other hosts from now on. numbers: For each rank of the job, the number of its host."""
        own_host = numbers[self.members[self.rank]]
        self.traffic.is_across = [numbers[rank] != own_host for rank in self.members]

    def count_exact(self, kind: str, shard: Tensor) -> None:
        """Count that a message of `kind` to each rank stands for `shard`, which is not sent itself."""
        self.traffic.add_exact(kind, (self.world_size - 1) * shard.nbytes)

    def _count_flat(self, operation: str, kind: str, flat: Tensor, shard_bytes: int) -> None:
        """Count world_size - 1 shards of `flat`. Every algorithm sends as much or more."""
        sent_bytes = (self.world_size - 1) * shard_bytes
        across_numel = None
        if self.traffic.is_across is not None:
            across_numel = self.backend.across_numel(operation, flat)
        if across_numel is None:
            self.traffic.add_to_all(kind, sent_bytes)
        else:
            self.traffic.add(kind, sent_bytes, across_numel * flat.element_size())

    def _count_all_reduce(self, kind: str, tensor: Tensor) -> None:
        sent_numel = 2 * (self.world_size - 1) * tensor.numel()
        self.traffic.add_to_all(kind, sent_numel * tensor.element_size() // self.world_size)

    def _count_small(self, kind: str, size_bytes: int) -> None:
        """Count values that each other rank gets. They are no part of a plan."""
        if self.backend.is_recorded:
            self.traffic.add_to_all(kind, (self.world_size - 1) * size_bytes)

    def _count_receivers(self, kind: str, part: Tensor, receivers: Sequence[int]) -> None:
        for peer in receivers:
            if peer != self.rank and part.numel():
                self.traffic.add_to(kind, part.nbytes, peer)


@final
class Call(Handle):
    """An operation of this rank: its records, and the backend's handle once it has started."""

    __slots__ = ("_handle", "_record", "_timed", "_watch")

    def __init__(self, watch: Watch | None, record: Record | None, timed: Timed | None) -> None:
        """None: The operation is not recorded."""
        self._watch, self._record, self._timed = watch, record, timed
        self._handle: Handle | None = None

    def start(self, function: Callable[..., Handle], *args: Any) -> Handle:
        """Start the operation by a `function` of the backend. Returns the handle for the caller."""
        try:
            handle = function(*args)
        except Lost as error:
            raise self._failed(error) from error
        if self._watch is None:
            return handle
        self._handle = handle
        return self

    def checked(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call a `function` of the backend. Returns its result."""
        try:
            return function(*args)
        except Lost as error:
            raise self._failed(error) from error

    def hold(self, handle: Handle) -> Handle:
        """Hold the `handle` of the operation, which has started. Returns the handle for the caller."""
        if self._watch is None:
            return handle
        self._handle = handle
        return self

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run the operation by a `function` of the backend that waits itself. Returns its result."""
        watch, record = self._watch, self._record
        if watch is None or record is None:
            return function(*args)
        begin_seconds = watch.begin_wait(record)
        result = self.checked(function, *args)
        watch.end_wait(record, begin_seconds)
        if self._timed is not None:
            self._timed.end()
        return result

    def wait(self) -> None:
        handle, watch, record, timed = self._handle, self._watch, self._record, self._timed
        if handle is None or watch is None or record is None:
            return  # the second wait
        if timed is not None:
            timed.begin_wait()
        begin_seconds = watch.begin_wait(record, handle)
        try:
            handle.wait()
        except Lost as error:
            raise self._failed(error) from error
        watch.end_wait(record, begin_seconds)
        self._handle = None
        if timed is not None:
            timed.end()

    def _failed(self, error: Lost) -> Exception:
        assert self._watch is not None and self._record is not None
        return self._watch.failed(self._record, error, error.rank)


def _small_kind(buffer: int) -> str:
    return "access" if buffer == ACCESS_BUFFER else "exchange"


@contextmanager
def counting_as(kind: str, opened: Sequence[Collectives]) -> Iterator[None]:
    """Count the bytes of all messages of these groups as `kind` inside."""
    before = [each.traffic.counted_as for each in opened]
    for each in opened:
        each.traffic.counted_as = kind
    try:
        yield
    finally:
        for each, kept in zip(opened, before, strict=True):
            each.traffic.counted_as = kept


def _store_of(group: dist.ProcessGroup | None) -> Store | None:
    """The store of `group`. It still answers after a collective of the group has failed."""
    from ..watch.store import Store

    try:
        if group is not None:
            return Store(group.get_group_store(), group.group_name, group.rank())
    except RuntimeError:
        pass
    return None


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """The timeout of waits in `group`; 0 where this torch or backend does not provide it."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return 0.0


__all__ = [
    "ACCESS_BUFFER",
    "ACTIVATION_BUFFER",
    "CONTROL_BUFFER",
    "MESSAGE_BUFFER",
    "Bounds",
    "Collectives",
    "PartOf",
    "counting_as",
    "timeout_of",
]
