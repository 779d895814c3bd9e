"""Groups and collectives of a rank that does not run: they know their sizes, count bytes and send nothing.

`xds plan` uses them to count the messages of a training. Sums and exchanges of activations are counted as well.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, final

import torch
from torch import Tensor

from ..mesh import Axis, Mesh
from .backend import Backend, Bounds, Gather, Member, SharedFlat
from .collectives import Collectives
from .handles import DONE, Handle
from .mesh_groups import AxisGroups, GroupsOf, Levels
from .message_log import Traffic


class Message(NamedTuple):
    """An operation of a group. size_bytes: What this rank sends. num_near: Other ranks on its host.

    axes: Of the mesh, along which the ranks of the group differ.
    """

    operation: str
    axes: tuple[Axis, ...]
    size_bytes: int
    ranks: int
    num_near: int


class Start(NamedTuple):
    """An operation starts. number: Its place among all of the journal."""

    number: int
    message: Message


class Wait(NamedTuple):
    """The results of operation `number` are needed from here on."""

    number: int


@final
class Journal:
    """What a rank that does not run would do, in order: `Start`, `Wait`, and what others add."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self._num_started = 0

    def start(self, message: Message) -> Handle:
        """The handle of an operation that starts here."""
        number, self._num_started = self._num_started, self._num_started + 1
        self.events.append(Start(number, message))
        return _Noted(self, number)


@final
@dataclass(eq=False)
class _Noted(Handle):
    journal: Journal
    number: int
    is_over: bool = False

    def wait(self) -> None:
        if not self.is_over:
            self.journal.events.append(Wait(self.number))
        self.is_over = True


@final
class FakeBackend(Backend):
    """Sends nothing. With `has_values` each peer seems to send what this rank sends.

    axes, num_near: See `fake_collectives`. journal: What is started and waited for; None: It is not noted.
    """

    journal: Journal | None = None

    is_recorded = False

    def __init__(
        self, member: Member, axes: tuple[Axis, ...], num_near: int, *, has_values: bool
    ) -> None:
        super().__init__(member)
        self.axes = axes
        self.num_near = num_near
        self._has_values = has_values

    def all_gather(self, flat: Tensor, shard: Tensor, buffer: int) -> Handle:
        if self._has_values and self.journal is None:
            flat.view(self.world_size, -1).copy_(shard.clone())
        return self._start("all_gather", shard.nbytes * self._others)

    def reduce_scatter(self, flat: Tensor, out: Tensor, buffer: int, add: bool) -> Handle:
        return self._start("reduce_scatter", flat.nbytes * self._others // self.world_size)

    def all_reduce(self, tensor: Tensor, buffer: int) -> Handle:
        return self._start("all_reduce", 2 * tensor.nbytes * self._others // self.world_size)

    @property
    def _others(self) -> int:
        return self.world_size - 1

    def _start(self, operation: str, size_bytes: int) -> Handle:
        if self.journal is None or not self._others:
            return DONE
        return self.journal.start(
            Message(operation, self.axes, size_bytes, self.world_size, self.num_near)
        )

    def all_to_all(self, outs: Sequence[Tensor], parts: Sequence[Tensor], buffer: int) -> Handle:
        for out, part in zip(outs, parts, strict=True):
            if self._has_values and self.journal is None:
                out.copy_(part)
        sent = sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        return self._start("all_to_all", sent)

    def start_gather_small(self, values: Tensor, buffer: int) -> tuple[Tensor, Handle]:
        # on the host, where they are read
        on_host = torch.zeros_like(values, device="cpu") if values.is_meta else values
        handle = self._start("all_gather", values.nbytes * self._others)
        return on_host.expand(self.world_size, -1), handle

    def send(self, tensor: Tensor, peer: int) -> Handle:
        return self._start("send", tensor.nbytes)

    def receive(self, tensor: Tensor, peer: int) -> Handle:
        return DONE

    def collect(self, out: Tensor | None, mine: Tensor, bounds: Bounds, target: int | None) -> None:
        _refuse()

    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], buffer: int
    ) -> None:
        _refuse()

    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, source: int) -> None:
        _refuse()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        return

    def share(self, numel: int, dtype: torch.dtype, text: str, gather: Gather) -> SharedFlat | None:
        values = self.empty(numel, dtype, self.device)
        return SharedFlat(values, values.view(-1), 1 + self.num_near, is_filler=self.rank == 0)

    def publish_shared(self, flat: Tensor, buffer: int) -> Handle:
        return self._start(
            "all_gather", (self.across_numel("publish_shared", flat) or 0) * flat.itemsize
        )

    def wait_for_readers(self) -> None:
        return

    def across_numel(self, operation: str, flat: Tensor) -> int | None:
        if operation != "publish_shared":
            return None
        num_hosts = -(-self.world_size // (1 + self.num_near))
        return (num_hosts - 1) * self.shard_of(flat).numel()  # once to each other host


def _refuse() -> NoReturn:
    raise AssertionError("a plan has no values that could be sent")


def fake_collectives(
    rank: int,
    world_size: int,
    axes: tuple[Axis, ...],
    num_near: int = 0,
    device: torch.device | None = None,
) -> Collectives:
    """The collectives of rank `rank` of `world_size`, which does not run.

    Args:
        axes: The axes of the mesh along which the ranks differ.
        num_near: How many of the other ranks are on this rank's host. `sent_across_bytes` leaves them out.
        device: Of values that are exchanged. Each peer then sends what this rank does. None, meta: no values.
    """
    has_values = device is not None and device.type != "meta"
    member = Member(None, device or torch.device("cpu"), rank, range(world_size))
    collectives = Collectives(FakeBackend(member, axes, num_near, has_values=has_values))
    collectives.traffic = Traffic(world_size, num_near)
    return collectives


def backend_of(collectives: Collectives) -> FakeBackend:
    """The backend of `fake_collectives`."""
    assert isinstance(collectives.backend, FakeBackend)
    return collectives.backend


@final
class FakeGroups(AxisGroups):
    """The groups of a rank that does not run, at these coordinates of a mesh of any size."""

    def __init__(
        self,
        mesh: Mesh,
        ranks_per_host: int = 1,
        *,
        pipe: int = 0,
        tensor: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """The data and sequence coordinates are 0, because all of them have equal parts.

        ranks_per_host: Hosts have consecutive ranks. device: See `fake_collectives`.
        """
        self.mesh = mesh
        self.rank = mesh.rank_at(pipe=pipe, tensor=tensor)
        self._device = device
        first = self.rank // ranks_per_host * ranks_per_host
        self._on_host = range(first, min(first + ranks_per_host, mesh.size))
        self.opened = []
        self._journal: Journal | None = None
        self._found: dict[tuple[tuple[int, ...], tuple[Axis, ...], str], Collectives] = {}
        self.world = self.along(("pipe", "data", "sequence", "tensor"))

    @property
    def is_everywhere(self) -> bool:
        return True

    def along(self, axes: Axis | tuple[Axis, ...], use: str = "") -> Collectives:
        names: tuple[Axis, ...] = (axes,) if isinstance(axes, str) else tuple(axes)
        return self._of(self.mesh.ranks_along(names, self.rank), names, use)

    def blocks(self, axes: Axis | tuple[Axis, ...], whole: Collectives, length: int) -> Levels:
        """See `AxisGroups.blocks`. Only the blocks of this rank are listed, and not those of all ranks."""
        members = next((key[0] for key, known in self._found.items() if known is whole), None)
        if members is None:
            return super().blocks(axes, whole, length)
        names: tuple[Axis, ...] = (axes,) if isinstance(axes, str) else tuple(axes)
        place = members.index(self.rank)
        start = place // length * length
        ranks = members[start : start + length], members[place % length :: length]
        return Levels(whole, *(whole if own == members else self._of(own, names) for own in ranks))

    def note(self, journal: Journal | None) -> None:
        """Note the operations of all groups in `journal`; None: no more."""
        self._journal = journal
        for group in self.opened:
            backend_of(group).journal = journal

    def _open(
        self, groups_of: GroupsOf, axes: tuple[Axis, ...], use: str = ""
    ) -> Collectives | None:
        groups = groups_of(self.mesh)
        members = next((tuple(ranks) for ranks in groups if self.rank in ranks), None)
        if members is None:
            return None
        return self._of(members, axes, use)

    def _of(self, members: tuple[int, ...], axes: tuple[Axis, ...], use: str = "") -> Collectives:
        """The group of `members`, which ascend; this rank is one of them."""
        if (members, axes, use) not in self._found:
            ends = self._on_host.start, self._on_host.stop
            first, last = (bisect_left(members, rank) for rank in ends)
            collectives = fake_collectives(
                bisect_left(members, self.rank), len(members), axes, last - first - 1, self._device
            )
            backend_of(collectives).journal = self._journal
            self._found[members, axes, use] = collectives
            self.opened.append(collectives)
        return self._found[members, axes, use]


__all__ = [
    "FakeBackend",
    "FakeGroups",
    "Journal",
    "Message",
    "Start",
    "Wait",
    "backend_of",
    "fake_collectives",
]
