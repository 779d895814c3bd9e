"""The interface of a backend: what carries the operations of one group.

    Collectives ──> Backend ─┬─ SingleRank            one rank: copies                       this file
    counts, logs,            ├─ GlooBackend           messages of gloo between pairs of ranks point_to_point.py
    watches                  ├─ StagedGlooBackend     the same for tensors of a GPU           point_to_point.py
                             ├─ SharedMemoryBackend   ranks read each other's memory          memory/
                             ├─ MachinesBackend       memory inside a machine, gloo across    memory/
                             ├─ NcclBackend           torch's own collectives                 nccl.py
                             └─ FakeBackend           a rank that does not run                fake.py

A backend neither counts nor watches. It raises `Lost` if a rank does not take part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..flat import sum_in_order
from .handles import DONE, Handle, Lost

# The numbers of flat buffers begin at 0. These are for tensors that belong to no flat buffer.
CONTROL_BUFFER, ACCESS_BUFFER, MESSAGE_BUFFER, ACTIVATION_BUFFER = (-1, -2, -3, -4)

Bounds = Sequence[tuple[int, int]]  # [start, stop) of each rank's part; empty parts are allowed
Gather = Callable[[Tensor], Tensor]  # [n] -> [world_size, n]


@final
@dataclass(frozen=True, eq=False)
class Member:
    """This rank as a member of a group.

    Attributes:
        group: torch's process group; None if the rank does not run, or is alone.
        device: The device of the tensors.
        rank: The number of this rank in the group.
        ranks: The numbers in the job of all ranks of the group, ascending.
        engine: The number of the engine among those that use `group`, the same on all ranks. So two engines
            in one group never receive each other's messages.
    """

    group: dist.ProcessGroup | None
    device: torch.device
    rank: int
    ranks: Sequence[int]
    engine: int = 0


@final
@dataclass(eq=False)
class GroupState:
    """What this process keeps for one of torch's process groups, as long as that group exists.

    Attributes:
        num_engines: How many engines have used the group. Every rank creates its engines in the same order.
        dropped: Works that were dropped before they were complete, with their memory. gloo handles the messages
            of a connection in order: one whose memory is gone would hold up all later ones. Nothing says
            when such a work is complete.
        parts: Groups of some of these ranks, by ranks and use. The next engine uses them again.
        timeout: Of waits for messages between two ranks; None: that with which the group was opened.
    """

    num_engines: int = 0
    dropped: list[Any] = field(default_factory=list)
    parts: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    timeout: timedelta | None = None


_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()


def state_of(group: dist.ProcessGroup) -> GroupState:
    """The state that belongs to `group`. torch's object has no place for it."""
    found = _states.get(group)
    if found is None:
        found = _states[group] = GroupState()
    return found


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Give later operations of `group` another timeout than that of its opening.

    torch's setter does not reach gloo's messages between two ranks: their waits have `GroupState.timeout`.
    """
    dist.distributed_c10d._set_pg_timeout(timeout, group)
    state_of(group).timeout = timeout


@final
class SharedFlat:
    """A flat buffer [numel] that the ranks of a machine have once, in memory that all of them map.

        memory of the machine ─┬─ mapped to read:  `values`      what modules compute with
                               └─ mapped to write: `writable`    each rank writes its own part

    A write to `values` ends the process with a message, because it would change what other ranks compute with.
    The memory is freed with the last tensor of it.

    num_ranks: How many ranks of this machine have it. is_filler: This one of them sets the first values.
    """

    def __init__(
        self, values: Tensor, writable: Tensor, num_ranks: int, *, is_filler: bool
    ) -> None:
        self.values = values
        self.writable = writable
        self.num_ranks = num_ranks
        self.is_filler = is_filler


class Backend(ABC):
    """Carries the operations of one group. Every operation is **collective** unless it says otherwise.

    Flat tensors are [world_size * n], shards are [n]. `buffer` is the number of the flat buffer that a tensor
    belongs to. `Collectives` documents the arguments and the results.

    Attributes:
        has_tags: Ranks may start operations of different buffers in different orders.
        is_recorded: Operations wait for other ranks, so each one is recorded.
        whole_sum: The operations that `sum_whole` consists of.
    """

    has_tags = True
    is_recorded = True
    whole_sum: tuple[str, ...] = ("all_reduce",)

    def __init__(self, member: Member) -> None:
        self.member = member
        self.group = member.group
        self.device = member.device
        self.rank = member.rank
        self.ranks = member.ranks
        self.world_size = len(member.ranks)

    def shard_of(self, flat: Tensor, rank: int | None = None) -> Tensor:
        """The view of `flat` that belongs to `rank`; None is this rank."""
        numel = flat.numel() // self.world_size
        return flat.narrow(0, (self.rank if rank is None else rank) * numel, numel)

    # -- operations in flight -------------------------------------------------------------------------------

    @abstractmethod
    def all_gather(self, flat: Tensor, shard: Tensor, buffer: int) -> Handle: ...

    @abstractmethod
    def reduce_scatter(self, flat: Tensor, out: Tensor, buffer: int, add: bool) -> Handle: ...

    @abstractmethod
    def all_reduce(self, tensor: Tensor, buffer: int) -> Handle: ...

    @abstractmethod
    def all_to_all(
        self, outs: Sequence[Tensor], parts: Sequence[Tensor], buffer: int
    ) -> Handle: ...

    @abstractmethod
    def start_gather_small(self, values: Tensor, buffer: int) -> tuple[Tensor, Handle]: ...

    @abstractmethod
    def send(self, tensor: Tensor, peer: int) -> Handle:
        """Send to one rank, which calls `receive`. Not collective."""

    @abstractmethod
    def receive(self, tensor: Tensor, peer: int) -> Handle:
        """Receive from one rank, which calls `send`. Not collective."""

    def sums_whole(self, flat: Tensor, out: Tensor) -> bool:
        return False

    def sum_whole(self, flat: Tensor, out: Tensor, buffer: int) -> Sequence[Handle]:
        """One handle for each operation of `whole_sum`."""
        raise AssertionError("sums_whole is False here")

    # -- operations that are complete on return -------------------------------------------------------------

    def sum(self, tensor: Tensor) -> None:
        self.all_reduce(tensor, ACTIVATION_BUFFER).wait()

    def gather_small(self, values: Tensor, buffer: int) -> Tensor:
        table, handle = self.start_gather_small(values, buffer)
        handle.wait()
        return table

    @abstractmethod
    def collect(
        self, out: Tensor | None, mine: Tensor, bounds: Bounds, target: int | None
    ) -> None: ...

    @abstractmethod
    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], buffer: int
    ) -> None: ...

    @abstractmethod
    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, source: int) -> None: ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        dense = tensor.resolve_conj().resolve_neg().contiguous()
        content = dense.view(-1).view(torch.uint8)  # gloo does not support every dtype
        _or_lost(dist.broadcast, content, group=self.group, group_src=source)
        if dense is not tensor and self.rank != source:
            tensor.copy_(dense)

    def barrier(self) -> None:
        is_nccl = self.device.type != "cpu" and "nccl" in str(dist.get_backend(self.group))
        # without it torch takes the current device, and warns
        ids = [self.device.index or 0] if is_nccl else None
        _or_lost(dist.barrier, self.group, device_ids=ids)

    # -- memory ---------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def share(self, numel: int, dtype: torch.dtype, text: str, gather: Gather) -> SharedFlat | None:
        """gather: Gathers a few numbers of every rank, [n] -> [world_size, n]."""
        return None

    def publish_shared(self, flat: Tensor, buffer: int) -> Handle:
        raise AssertionError("share returns None here")

    def wait_for_readers(self) -> None:
        raise AssertionError("share returns None here")

    def leave(self) -> None:  # noqa: B027 (most cannot)
        """Fail the waits of the ranks that wait for this one. Not collective; the group does not recover."""

    @property
    def scratch_bytes(self) -> int:
        return 0

    def free_scratch(self) -> None:  # noqa: B027 (most keep none)
        """Free the receive buffers that are not in use. Not collective."""

    # -- bytes ----------------------------------------------------------------------------------------------

    def across_numel(self, operation: str, flat: Tensor) -> int | None:
        """How many elements this rank sends to other machines in an `operation` on `flat`.

        operation: all_gather, reduce_scatter or publish_shared. None means a shard for each rank there.
        """
        return None


def _or_lost(function: Any, *args: Any, **kwargs: Any) -> None:
    try:
        function(*args, **kwargs)
    except RuntimeError as error:
        raise Lost(str(error), None) from error


@final
class SingleRank(Backend):
    """The backend of a group with one rank. It copies, and sends nothing."""

    is_recorded = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(Member(None, device, 0, (0,)))

    def all_gather(self, flat: Tensor, shard: Tensor, buffer: int) -> Handle:
        if flat.data_ptr() != shard.data_ptr():
            flat.copy_(shard)
        return DONE

    def reduce_scatter(self, flat: Tensor, out: Tensor, buffer: int, add: bool) -> Handle:
        sum_in_order(out, [flat], add=add)
        return DONE

    def all_reduce(self, tensor: Tensor, buffer: int) -> Handle:
        return DONE

    def all_to_all(self, outs: Sequence[Tensor], parts: Sequence[Tensor], buffer: int) -> Handle:
        outs[0].copy_(parts[0])
        return DONE

    def start_gather_small(self, values: Tensor, buffer: int) -> tuple[Tensor, Handle]:
        return values.unsqueeze(0), DONE

    def send(self, tensor: Tensor, peer: int) -> Handle:
        raise AssertionError("a single rank has no other to send to")

    def receive(self, tensor: Tensor, peer: int) -> Handle:
        raise AssertionError("a single rank has no other to receive from")

    def collect(self, out: Tensor | None, mine: Tensor, bounds: Bounds, target: int | None) -> None:
        if out is not None:
            out[slice(*bounds[0])] = mine

    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], buffer: int
    ) -> None:
        if flat is not None:
            flat.copy_(shard)

    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, source: int) -> None:
        assert full is not None
        out.copy_(full[slice(*bounds[0])])

    def broadcast(self, tensor: Tensor, source: int) -> None:
        return

    def barrier(self) -> None:
        return


__all__ = [
    "ACCESS_BUFFER",
    "ACTIVATION_BUFFER",
    "CONTROL_BUFFER",
    "MESSAGE_BUFFER",
    "Backend",
    "Bounds",
    "Gather",
    "GroupState",
    "Member",
    "SharedFlat",
    "SingleRank",
    "set_timeout",
    "state_of",
]
