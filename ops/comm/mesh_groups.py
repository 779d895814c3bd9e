"""The process groups of a mesh, each made once and only when it is used.

    rank = pipe x data     world   all ranks                       norms, losses, errors
     0 1 | stage 0         data    0 1 / 2 3                       parameters and gradients of a stage
     2 3 | stage 1         pipe    0 2 / 1 3, one for each use     forward, backward, batches
                           shared  0 1 2 3 for a weight tied over stages 0 and 1

A process keeps its groups: the next engine with the same mesh uses them again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from threading import Thread
from typing import Any, Protocol, final

import torch
import torch.distributed as dist

from ..mesh import Axis, Mesh
from .backend import CONTROL_BUFFER, set_timeout, state_of
from .collectives import Collectives, PartOf
from .config import Communication
from .opening import DEFAULT, open_collectives
from .point_to_point import TAG_BASE

OPENING_FACTOR = 10  # of the timeout of connections: see `reopen`
_MADE_TAG = TAG_BASE - 1  # of no other message
_POLL_SECONDS = 0.05
_NAMED = 8  # ranks of a group, in messages


def blocks_of(mesh: Mesh, axes: Axis | tuple[Axis, ...], length: int) -> list[tuple[int, ...]]:
    """The ranks of every group along `axes`, in blocks of `length` neighbours.

    >>> blocks_of(Mesh(pipe=1, data=4, tensor=2), "data", 2)
    [(0, 2), (4, 6), (1, 3), (5, 7)]
    """
    groups = mesh.groups(axes)
    return [
        ranks[start : start + length] for ranks in groups for start in range(0, len(ranks), length)
    ]


# -- two levels of a group ----------------------------------------------------------------------------------
#
# rank = block * L + place     0 1 | 2 3     inside   0 1 / 2 3     the ranks of a block, e.g. of one host
#                                            across   0 2 / 1 3     the same place in every block


@final
@dataclass(frozen=True, eq=False)
class Levels:
    """A group, and the two groups that it consists of. Either may be this rank alone."""

    whole: Collectives
    inside: Collectives
    across: Collectives


class Split(Protocol):
    """Opens the levels of a group, with blocks of `length` ranks. **Collective** for all ranks of the mesh."""

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """The ranks of this group and of all similar ones, as numbers in the job. All of them decide alike."""

    def __call__(self, length: int) -> Levels: ...


def block_length(hosts: Sequence[int]) -> int:
    """The number of ranks on every host; 1 where hosts have unequal numbers, or ranks are not in order.

    hosts: For each rank of a group, the number of its host.

    >>> block_length([7, 7, 3, 3])
    2
    """
    starts = [0] + [rank for rank, (a, b) in enumerate(pairwise(hosts), 1) if a != b]
    length = len(hosts) // len(starts) if hosts else 1
    is_even = all(start == number * length for number, start in enumerate(starts))
    in_order = len(set(hosts)) == len(starts)
    return length if is_even and in_order and length * len(starts) == len(hosts) else 1


# -- the groups of a mesh -----------------------------------------------------------------------------------

GroupsOf = Callable[
    [Mesh], Sequence[Sequence[int]]
]  # the ranks of one group and of all similar ones


class AxisGroups(ABC):
    """The groups of ranks along the axes of a mesh, for one rank. `fake.py` has those of a plan.

    All ranks of the mesh call every method that opens a group, in one order.

    Attributes:
        rank: The number of this rank in the mesh.
        opened: The collectives so far, those of all ranks first.
    """

    mesh: Mesh
    rank: int
    opened: list[Collectives]

    @property
    @abstractmethod
    def is_everywhere(self) -> bool:
        """Whether the mesh has all ranks of the job."""

    @abstractmethod
    def _open(
        self, groups_of: GroupsOf, axes: tuple[Axis, ...], use: str = ""
    ) -> Collectives | None:
        """Open the one of these groups that has this rank. None: this rank is in none of them."""

    def coordinate(self, axis: Axis) -> int:
        """The place of this rank on `axis`."""
        return int(getattr(self.mesh.coordinates(self.rank), axis))

    def along(self, axes: Axis | tuple[Axis, ...], use: str = "") -> Collectives:
        """Open the group of the ranks that differ from this one on `axes` only. **Collective.**

        use: Tells several groups of one axis apart.
        """
        return self._open_own(lambda mesh: mesh.groups(axes), axes, use)

    def blocks(self, axes: Axis | tuple[Axis, ...], whole: Collectives, length: int) -> Levels:
        """Split the group `whole` into blocks of `length` ranks, which divides it. **Collective.**

        whole: The group along `axes`, or one of its equal blocks.
        """
        size = whole.world_size
        is_block = size < self.mesh.length(axes)

        def wholes(mesh: Mesh) -> list[tuple[int, ...]]:
            return blocks_of(mesh, axes, size if is_block else mesh.length(axes))

        def inside(mesh: Mesh) -> list[tuple[int, ...]]:
            return [
                ranks[start : start + length]
                for ranks in wholes(mesh)
                for start in range(0, len(ranks), length)
            ]

        def across(mesh: Mesh) -> list[tuple[int, ...]]:
            return [ranks[place::length] for ranks in wholes(mesh) for place in range(length)]

        levels = [
            whole if ranks == size else self._open_own(groups_of, axes)
            for groups_of, ranks in ((inside, length), (across, size // length))
        ]
        return Levels(whole, *levels)

    def within(self, axes: tuple[Axis, ...], tensor_sets: Sequence[Sequence[int]]) -> Collectives:
        """As `along`, with the ranks whose place on the tensor axis is in the same set as this one's."""
        return self._open_own(
            lambda mesh: [
                [rank for rank in ranks if mesh.coordinates(rank).tensor in places]
                for ranks in mesh.groups(axes)
                for places in tensor_sets
            ],
            axes,
        )

    def shared(self, stages: Sequence[int], *, by_slice: bool = False) -> Collectives | None:
        """Open the group of all ranks of several pipeline stages. **Collective.**

        Returns None where this rank is not one of them.
        by_slice: Only those with the same place on the tensor axis as this rank.
        """
        axes: tuple[Axis, ...] = ("pipe", "data", "sequence") + (() if by_slice else ("tensor",))
        return self._open(
            lambda mesh: [
                [rank for rank in ranks if mesh.coordinates(rank).pipe in stages]
                for ranks in mesh.groups(axes)
            ],
            axes,
        )

    def _open_own(
        self, groups_of: GroupsOf, axes: Axis | tuple[Axis, ...], use: str = ""
    ) -> Collectives:
        collectives = self._open(groups_of, (axes,) if isinstance(axes, str) else tuple(axes), use)
        assert collectives is not None
        return collectives


@final
class BlocksOf:
    """Opens blocks of `whole`, the group along `axes` or one of its equal blocks: a `Split`."""

    def __init__(self, mesh: AxisGroups, axes: Axis | tuple[Axis, ...], whole: Collectives) -> None:
        self._mesh, self._axes, self._whole = mesh, axes, whole

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        return blocks_of(self._mesh.mesh, self._axes, self._whole.world_size)

    def __call__(self, length: int) -> Levels:
        return self._mesh.blocks(self._axes, self._whole, length)


@final
class MeshGroups(AxisGroups):
    """Opens the collectives of one engine.

    torch names a group by how many this process has made, so every rank takes part in making every group.
    """

    def __init__(
        self,
        mesh: Mesh,
        group: dist.ProcessGroup,
        world: Collectives,
        timeout_seconds: float,
        section: Communication = DEFAULT,
        sites: Sequence[Sequence[int]] = (),
    ) -> None:
        """
        Args:
            group: torch's group of all ranks.
            world: The collectives of `group`, opened with `section`.
            timeout_seconds: The timeout of waits in new groups.
            sites: The ranks in the job of `group` and of all groups beside it, which have the same mesh and
                open the same groups; (): `group` is the whole job.
        """
        self.mesh = mesh
        self.opened = [world]
        self._world = group
        self._collectives = world
        self.rank = group.rank()
        self._section = section
        self._sites = sites
        self._wait_seconds = timeout_seconds
        self._timeout = timedelta(seconds=timeout_seconds)  # of the opening of a group
        self._made: list[tuple[Collectives, GroupsOf, str]] = []  # in the order of their opening

    @property
    def is_everywhere(self) -> bool:
        return bool(self._sites) or self._world.size() == dist.get_world_size()

    def _open(
        self, groups_of: GroupsOf, axes: tuple[Axis, ...], use: str = ""
    ) -> Collectives | None:
        collectives = self._connect(groups_of, use)
        if collectives is not None:
            self._made.append((collectives, groups_of, use))
            if collectives.world_size > 1:
                self.opened.append(collectives)
        return collectives

    def _connect(self, groups_of: GroupsOf, use: str) -> Collectives | None:
        groups = groups_of(self.mesh)
        for ranks in groups:
            self._make(ranks, use)
        members = next((ranks for ranks in groups if self.rank in ranks), None)
        if members is None:
            return None
        device = self._collectives.device
        part_of = PartOf(self._collectives, tuple(members))
        group = None if len(members) == 1 else self._make(members, use)
        return open_collectives(
            group, device, part_of, self._section, wait_seconds=self._wait_seconds
        )

    def _make(self, ranks: Sequence[int], use: str) -> Any:
        if len(ranks) == 1 or (len(ranks) == self.mesh.size and not use):
            return self._world
        assert dist.group.WORLD is not None
        made, sites = state_of(dist.group.WORLD).parts, tuple(map(tuple, self._sites))
        key = (tuple(ranks), use, *sites)
        if key not in made:
            made[key] = group = self._new_group(ranks)
            is_again = self._timeout.total_seconds() != self._wait_seconds
            if is_again and isinstance(group, dist.ProcessGroup):
                set_timeout(group, self._message_timeout)
        return made[key]

    @property
    def _message_timeout(self) -> timedelta:
        """Of messages while groups are opened."""
        return min(OPENING_FACTOR * self._timeout, timedelta(seconds=self._wait_seconds))

    def reopen(self, mesh: Mesh, group: dist.ProcessGroup, connect_seconds: float) -> None:
        """Open all groups again, for the ranks of `group`, which are those of `mesh`. **Collective.**

        The collectives of all ranks belong to `group` already. All others stay the same objects.

        Args:
            connect_seconds: gloo's timeout of the connections. All ranks are there. Messages have
                `OPENING_FACTOR` times as much: a rank may have left for a newer group, and closes nothing
                before all ranks are there.
        Raises:
            RuntimeError, PeerError: A rank has ended meanwhile.
        """
        self.mesh, self._world, self.rank = mesh, group, group.rank()
        timeout, self._timeout = self._timeout, timedelta(seconds=connect_seconds)
        try:
            for collectives, groups_of, use in self._made:
                opened = self._connect(groups_of, use)
                assert opened is not None
                collectives.reopen(opened)
        finally:
            self._timeout = timeout
        for made in state_of(group).parts.values():
            if isinstance(made, dist.ProcessGroup):
                set_timeout(made, timeout)

    def _new_groups(self, ranks: Sequence[int]) -> Any:
        """Call torch's new_group, for these ranks of every site. Returns that of this site."""
        if not self._sites:
            return dist.new_group(list(ranks), timeout=self._timeout)
        own = dist.get_process_group_ranks(self._world)
        every = [
            (site, dist.new_group([site[rank] for rank in ranks], timeout=self._timeout))
            for site in self._sites
        ]
        return next(group for site, group in every if list(site) == own)

    def _new_group(self, ranks: Sequence[int]) -> Any:
        """Call torch's new_group. Raises PeerError, within seconds where one of `ranks` ends meanwhile.

        gloo waits for all of `ranks` in native code, which nothing can interrupt. So a thread makes the group.
        Another one waits for a message of the next rank, that its group is made. This fails at once when the
        next rank's process ends. The watcher of each other rank then hears of it.
        """
        watch, names = self._collectives.watch, ", ".join(map(str, ranks[:_NAMED]))
        what = f"ranks {names}" + (f", ..., {ranks[-1]}" if len(ranks) > _NAMED else "")
        with watch.guard("new_group", CONTROL_BUFFER, what) as record:
            record.members = tuple(ranks)
            if self.rank not in ranks or dist.get_backend(self._world) != "gloo":
                return self._new_groups(ranks)
            place = ranks.index(self.rank)
            after, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]
            timeout = self._message_timeout
            made: list[Any] = []
            failed: list[tuple[Exception, int | None]] = []

            def make() -> None:
                try:
                    made.append(self._new_groups(ranks))
                    self._world.send([torch.zeros(1)], before, _MADE_TAG).wait(timeout)
                except Exception as error:
                    failed.append((error, None))

            def hear() -> None:
                try:
                    self._world.recv([torch.zeros(1)], after, _MADE_TAG).wait(timeout)
                except RuntimeError as error:
                    failed.append((error, after))

            threads = [Thread(target=each, name="xds-groups", daemon=True) for each in (make, hear)]
            for thread in threads:
                thread.start()
            while not failed and (alive := [each for each in threads if each.is_alive()]):
                alive[0].join(_POLL_SECONDS)
                if watch.lost is not None:
                    lost = f"Connection closed by rank {watch.lost}, as another rank has noticed"
                    failed.append((RuntimeError(lost), watch.lost))
            if failed:
                error, rank = failed[0]
                raise watch.failed(record, RuntimeError(str(error)), rank) from error
            return made[0]


__all__ = ["OPENING_FACTOR", "AxisGroups", "BlocksOf", "MeshGroups", "blocks_of"]
