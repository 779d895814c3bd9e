"""The interface to torch.distributed: all collectives of xds, on flat tensors, with their bytes counted.

On gloo the built-in reduce_scatter is a whole all_reduce and the built-in all_gather copies twice. Both
are three to four times slower than point-to-point messages directly between the flat buffers.
So a CPU group uses `PeerToPeer`. Its sums run in rank order on the receiver, so the result does not
depend on the position of an element: stages and bucket sizes are bit-identical. Messages carry the number of
their buffer as tag, so two ranks may start collectives in different orders.
Every other backend (NCCL, MPI, torch's threaded test group) uses `Native`: the backend's own collectives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..watch import Mark, Watch
from ..watch.config import WatchConfig
from .handles import Handle
from .message_log import MessageLog, clock_of
from .shared_flat import SharedFlat

if TYPE_CHECKING:
    from ..watch import Store

TAG_BASE = 0x5D000  # above the small tags that a user's own send and recv are likely to use
TAGS_PER_BUFFER = 2
TAGS_PER_INSTANCE = 1 << 16  # so that two engines in one group never receive each other's messages
SMALL_TAGS = 1 << 14  # the last tags of an instance: small gathers, by their size
# numbers for messages that belong to no flat buffer
CONTROL_BUFFER, ACCESS_BUFFER, MESSAGE_BUFFER, ACTIVATION_BUFFER = (-1, -2, -3, -4)

Bounds = Sequence[tuple[int, int]]  # [start, stop) of each rank's part; empty parts are allowed
# of each group, which is torch's and knows no engines: every rank creates its engines in the same order
_num_instances: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class PartOf:
    """The collectives of all ranks, and the ranks of a group among them, ascending."""

    world: Collectives
    ranks: tuple[int, ...]


class Collectives(ABC):
    """Collectives of one process group. Flat tensors are [world_size * shard_numel], shards [shard_numel].

    `buffer` is the number of the flat buffer that a message belongs to: concurrent messages of different
    buffers are never mixed. `sent_bytes` counts the bytes that this rank sent since construction, by kind;
    `sent_across_bytes` those of them to ranks on other hosts, if `set_hosts` was called.

    has_tags: ranks may start messages of different buffers in different orders.
    """

    has_tags = True

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        rank: int,
        world_size: int,
        part_of: PartOf | None = None,
        successor_of: Collectives | None = None,
    ) -> None:
        """
        Args:
            part_of: the collectives of all ranks; their watch serves this group as well.
            successor_of: other collectives of `group`, which this object replaces.
        """
        self.group = group
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.sent_bytes: dict[str, int] = {}
        self.sent_across_bytes: dict[str, int] = {}
        self.exact_bytes: dict[str, int] = {}  # that messages of these kinds stand for
        self._is_across: list[bool] | None = None  # by rank: it is on another host; None: not known
        self._counted_as = ""  # the kind, whatever the message is; "": its own
        if successor_of is not None:
            self._succeed(successor_of)
            return
        instance = 0
        if group is not None:
            instance = _num_instances.get(group, 0)
            _num_instances[group] = instance + 1
        self.instance = instance
        self._ranks: Sequence[int] = range(world_size)  # of this group, among all ranks
        self._members: tuple[int, ...] | None = None
        self._watch: Watch
        self.message_log: MessageLog  # of all groups of the engine
        if part_of is not None:
            self._watch = part_of.world._watch
            self.message_log = part_of.world.message_log
            self._ranks = self._members = part_of.ranks
            return
        self._watch = Watch(rank, world_size, instance, partial(_store_of, group))
        self.message_log = MessageLog(rank, clock_of(device))
        self._watch.name(CONTROL_BUFFER, "norms and flags")
        self._watch.name(ACCESS_BUFFER, "a parameter")

    def _succeed(self, before: Collectives) -> None:
        self.instance, self._ranks, self._members = before.instance, before._ranks, before._members
        self._watch, self.message_log = before._watch, before.message_log

    @property
    def watch(self) -> Watch:
        """What this rank has started, and the messages about failures."""
        return self._watch

    @property
    def members(self) -> Sequence[int]:
        """The ranks of the group, among all ranks of the job."""
        return self._ranks

    def name_buffer(self, buffer: int, name: str) -> None:
        """Set the name of the flat buffer `buffer` in messages, e.g. "unit 'blocks.5'"."""
        self._watch.name(buffer, name)

    def name_places(self, places: Mapping[int, str]) -> None:
        """Say in messages about a rank what it has, e.g. "stage 1"."""
        self._watch.places = places

    def _record(
        self,
        operation: str,
        kind: str,
        buffer: int,
        what: str = "",
        tensor: Tensor | None = None,
        *,
        peer: int | None = None,
    ) -> Mark:
        """Record the start of a collective. Of a message there is no second start to compare with.

        operation: one of those in bandwidth.py. peer: of a message, the other rank of this group.
        """
        mark = self._watch.start(kind, buffer, what, tensor)
        mark.members = self._members if peer is None else ()
        if self.message_log.is_on:
            self._time(mark, operation, peer)
        return mark

    def _time(self, mark: Mark, operation: str, peer: int | None = None) -> None:
        """Let the log measure the collective of `mark`."""
        of_shards = self.world_size if operation == "all_gather" else 1
        ranks = self._ranks
        members = ranks if peer is None else sorted((ranks[self.rank], ranks[peer]))
        mark.timed = self.message_log.start(
            operation,
            mark.size_bytes * of_shards,
            members,
            lambda: self._watch.call(mark.key).partition(" of ")[2],
        )

    def _of_size(self, mark: Mark, numel: int) -> None:
        """`mark`, whose collective is of `numel` elements in all."""
        if mark.timed is not None and mark.dtype is not None:
            mark.timed.size_bytes = numel * mark.dtype.itemsize

    def _of_parts(self, mark: Mark, parts: Sequence[Tensor]) -> None:
        """`mark`, whose collective is of all `parts`."""
        if mark.timed is not None:
            self._of_size(mark, sum(part.numel() for part in parts))

    @contextmanager
    def _guard(
        self, operation: str, kind: str, buffer: int, what: str = "", tensor: Tensor | None = None
    ) -> Iterator[Mark]:
        with self._watch.guard(kind, buffer, what, tensor) as mark:
            mark.members = self._members
            if self.message_log.is_on:
                self._time(mark, operation)
            yield mark
            if mark.timed is not None:
                mark.timed.end()

    def start_watching(self, section: WatchConfig, timeout_seconds: float) -> None:
        """Let the process's watcher serve this rank until `stop_watching`, where the group has a store.

        Args:
            timeout_seconds: timeout of waits in the group, where the group does not provide it.
        """
        self._watch.keep(section.ring_size)
        if self.group is not None and self.world_size > 1:
            from ..watch.sentinel import start_watching

            timeout_seconds = timeout_of(self.group, self.device) or timeout_seconds
            start_watching(self._watch, self.group.group_name, section, timeout_seconds)

    def stop_watching(self) -> None:
        """Undo `start_watching`."""
        if self._watch.diagnoser is not None:
            from ..watch.sentinel import stop_watching

            stop_watching(self._watch)

    def end_step(self) -> None:
        """Record the end of a training step, with its time and its wait time."""
        self._watch.step()

    def publishing_errors(self, where: str) -> AbstractContextManager[None]:
        """Wrap the user's code: an exception in it is reported on the ranks that wait for this one."""
        return self._watch.publishing_errors(where)

    def shard_of(self, flat: Tensor, rank: int | None = None) -> Tensor:
        """The view of `flat` that belongs to `rank` (default: this rank)."""
        numel = flat.numel() // self.world_size
        return flat.narrow(0, (self.rank if rank is None else rank) * numel, numel)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """[numel], undefined: memory from which this group sends faster than from other memory.

        Its storage may be of a fixed size. device: None is that of the group.
        """
        return torch.empty(numel, dtype=dtype, device=device or self.device)

    def share(self, numel: int, dtype: torch.dtype, text: str) -> SharedFlat | None:
        """[numel], undefined, that the ranks of each machine have in common. For all ranks.

        text: is printed when a script writes to it.
        None, on all ranks: they do not share memory.
        """
        return None

    def publish_shared(self, flat: Tensor, *, buffer: int, kind: str) -> Handle:
        """As `all_gather` into `flat`, the writable view of `share`, of which each rank has written its shard.

        Sends nothing inside a machine. After `wait` the values may be read.
        """
        raise AssertionError("share returns None here")

    def wait_for_readers(self) -> None:
        """Wait for all ranks of this machine: before and after writes to what they `share`."""
        raise AssertionError("share returns None here")

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the receive buffers, which are kept between steps."""
        return 0

    def free_scratch(self) -> None:  # noqa: B027 (most keep none)
        """Free the receive buffers that are not in use."""

    def _count(self, kind: str, shard: Tensor) -> None:
        """Count (world_size - 1) shards, which every algorithm here sends: the lower bound."""
        self._add(kind, (self.world_size - 1) * shard.numel() * shard.element_size())

    def _count_all_reduce(self, kind: str, tensor: Tensor) -> None:
        numel_sent = 2 * (self.world_size - 1) * tensor.numel()
        self._add(kind, numel_sent * tensor.element_size() // self.world_size)

    def _count_parts(self, kind: str, part: Tensor, peer: int | None = None) -> None:
        """Count one message of `part`; to `peer`, if that is one rank."""
        self._add(kind, part.numel() * part.element_size(), peer)

    def _add(self, kind: str, sent: int, peer: int | None = None) -> None:
        """Count bytes to `peer`, or the same number to every other rank."""
        part = 0
        if self._is_across is not None:
            across = sum(self._is_across) if peer is None else int(self._is_across[peer])
            part = sent * across // (self.world_size - 1 if peer is None else 1)
        self._add_link(kind, sent, part)

    def _add_link(self, kind: str, sent: int, across: int) -> None:
        """Count bytes of which some go to other hosts."""
        kind = self._counted_as or kind
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + sent
        if self._is_across is not None:
            self.sent_across_bytes[kind] = self.sent_across_bytes.get(kind, 0) + across

    def count_exact(self, kind: str, shard: Tensor) -> None:
        """A message of `kind` to each rank takes the place of `shard`, which would be sent otherwise."""
        sent = (self.world_size - 1) * shard.numel() * shard.element_size()
        self.exact_bytes[kind] = self.exact_bytes.get(kind, 0) + sent

    def set_hosts(self, numbers: Sequence[int]) -> None:
        """Count bytes to other hosts from now on. numbers: for each rank of the job, that of its host."""
        own = numbers[self._ranks[self.rank]]
        self._is_across = [numbers[rank] != own for rank in self._ranks]

    @abstractmethod
    def all_gather(self, flat: Tensor, shard: Tensor, *, buffer: int, kind: str) -> Handle:
        """Fill `flat` with every rank's `shard`. Sends (world_size - 1) * shard bytes per rank.

        `shard` may be this rank's own slice of `flat`. Neither may be written before `wait`.
        """

    @abstractmethod
    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, add: bool, buffer: int, kind: str
    ) -> Handle:
        """out = (out +) the sum over ranks of their `flat`, this rank's shard of it.

        Shapes:  flat [world_size * n], out [n]; `out` may be wider than `flat`, and may be this rank's
                 slice of `flat` unless `add`.
        Sends:   (world_size - 1) * n elements of `flat`'s dtype per rank. Do not write to them before `wait`.
        """

    def sum(self, tensor: Tensor, *, what: str, kind: str) -> None:
        """As `all_reduce`, complete on return. Faster for small tensors."""
        self.all_reduce(tensor, what=what, kind=kind).wait()

    def sums_whole(self, flat: Tensor, out: Tensor) -> bool:
        """`sum_whole` is faster than `reduce_scatter` and `all_gather`; the same on all ranks."""
        return False

    def sum_whole(
        self, flat: Tensor, out: Tensor, *, buffer: int, kinds: tuple[str, str]
    ) -> tuple[Handle, Handle]:
        """Reduce_scatter `flat` [world_size * n] to `out` [n], then all_gather it, rounded, to `flat`.

        Where `sums_whole`. `out` is this rank's shard of `flat`, or wider. Bits and bytes are those of the two,
        counted by these `kinds`.
        """
        raise AssertionError("sums_whole is False here")

    @abstractmethod
    def collect(
        self, out: Tensor | None, mine: Tensor, bounds: Bounds, *, target: int | None = None
    ) -> None:
        """Assemble a tensor from the ranks' parts: rank r's `mine` becomes out[start:stop] of bounds[r].

        Shapes:  out [n], mine [stop - start] of this rank's bounds. `out` may be None on a rank that is not
                 `target`; without `target` every rank receives the whole tensor.
        Sends:   this rank's part to each receiver. Complete on return.
        """

    @abstractmethod
    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], *, buffer: int
    ) -> None:
        """An all_gather to `receivers` only: they fill their `flat`, the other ranks only send.

        Sends this rank's shard to each receiver. Complete on return.
        """

    @abstractmethod
    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, *, source: int = 0) -> None:
        """out = full[start:stop] of this rank's bounds, from rank `source`; only that rank needs `full` [n].

        Sends:   from `source`, the part of each other rank. Complete on return.
        """

    @abstractmethod
    def all_reduce(
        self, tensor: Tensor, *, what: str, kind: str, buffer: int = ACTIVATION_BUFFER
    ) -> Handle:
        """tensor = the sum over ranks of `tensor`, of any shape, contiguous; the same bits on every rank.

        Args:
            what: the subject in messages about a failure, e.g. "the output of blocks.0.mlp.down".
            buffer: the number of the flat buffer that it is of, if any.
        Sums run in rank order where the backend has messages of its own (gloo). Counts 2 (world_size - 1) /
        world_size of its bytes as `kind`, which every algorithm sends: the lower bound. Neither read nor write
        it before `wait`.
        """

    @abstractmethod
    def all_to_all(
        self,
        outs: Sequence[Tensor],
        parts: Sequence[Tensor],
        *,
        what: str,
        kind: str,
        buffer: int = ACTIVATION_BUFFER,
    ) -> Handle:
        """outs[r] = what rank r has in parts[rank of this one]. Contiguous tensors, empty ones are allowed.

        Sends `parts` without this rank's own, counted as `kind`. Do not write to them before `wait`.
        buffer: the number of the flat buffer that they are of, if any.
        """

    def gather_small(self, values: Tensor, buffer: int = CONTROL_BUFFER, what: str = "") -> Tensor:
        """[n] -> [world_size, n], in rank order. Blocks until it is complete. For norms and flags: a few bytes.

        what: the subject in the message where a rank does not take part, e.g. "get_full_param(blocks.0.bias)".
        """
        table, handle = self.start_gather_small(values, buffer, what)
        handle.wait()
        return table

    @abstractmethod
    def start_gather_small(
        self, values: Tensor, buffer: int = CONTROL_BUFFER, what: str = ""
    ) -> tuple[Tensor, Handle]:
        """Start `gather_small`. Returns the table that will hold the values, and the handle to wait for."""

    @abstractmethod
    def send(self, tensor: Tensor, peer: int, *, number: int, what: str, kind: str) -> Handle:
        """Start to send contiguous `tensor` to rank `peer`, which calls `receive` with the same number.

        Args:
            number: tells messages between two ranks apart where the backend has tags. Those of one number, and
                on other backends all, arrive in the order in which they were sent.
            what: the subject in messages about a failure, e.g. "activations of micro-batch 3 from stage 1".
        Do not write to `tensor` before `wait`. Sends all its bytes, counted as `kind`.
        """

    @abstractmethod
    def receive(self, tensor: Tensor, peer: int, *, number: int, what: str) -> Handle:
        """Start to fill contiguous `tensor` with a message of rank `peer`; it has the same size."""

    def broadcast(
        self, tensor: Tensor, source: int = 0, what: str = "the first rank's values"
    ) -> None:
        """Overwrite `tensor` on every rank with that of rank `source` (its rank within the group).

        what: the subject in the message where a rank does not take part.
        """
        self._count("broadcast", tensor if self.rank == source else tensor.new_empty(0))
        with self._guard("broadcast", "broadcast", CONTROL_BUFFER, what, tensor):
            dist.broadcast(tensor, group=self.group, group_src=source)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        device = self.device
        is_nccl = device.type == "cuda" and "nccl" in str(dist.get_backend(self.group))
        # without it torch takes the current device, and warns
        ids = [device.index or 0] if is_nccl else None
        with self._guard("barrier", "barrier", CONTROL_BUFFER, "all ranks"):
            dist.barrier(self.group, device_ids=ids)

    def store(self) -> Store | None:
        """The store of the group; None where there is none."""
        return _store_of(self.group)


@contextmanager
def counting_as(kind: str, opened: Sequence[Collectives]) -> Iterator[None]:
    """Inside, the bytes of all messages of these groups are counted as `kind`."""
    before = [each._counted_as for each in opened]
    for each in opened:
        each._counted_as = kind
    try:
        yield
    finally:
        for each, kept in zip(opened, before, strict=True):
            each._counted_as = kept


def _store_of(group: dist.ProcessGroup | None) -> Store | None:
    """The store of `group`. It still answers after a collective of the group has failed."""
    from ..watch import Store

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
