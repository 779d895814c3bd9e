"""Groups and collectives of a rank that does not run: they know their sizes, count bytes and send nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, final

import torch
from torch import Tensor

from ..mesh import Axis, Mesh
from .collectives import ACTIVATION_BUFFER, CONTROL_BUFFER, Bounds, Collectives
from .handles import Done, Handle
from .levels import Levels
from .mesh_groups import AxisGroups
from .shared_flat import SharedFlat


@final
class PaperCollectives(Collectives):
    """The collectives of rank `rank` of `world_size`. Sums and exchanges of activations are counted.

    axes: along which its ranks are. num_near: so many of the others are on this rank's host, which
    `sent_across_bytes` leaves out.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        axes: tuple[Axis, ...],
        num_near: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """device: of values that are exchanged. Each peer then sends what this rank does; None: no values."""
        super().__init__(None, device or torch.device("cpu"), rank, world_size)
        self._has_values = device is not None
        self.axes = axes
        self.num_near = num_near

    def _add(self, kind: str, sent: int, peer: int | None = None) -> None:
        near = sent * self.num_near // (self.world_size - 1) if self.num_near else 0
        self._add_link(kind, sent, sent - near)

    def _add_link(self, kind: str, sent: int, across: int) -> None:
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + sent
        self.sent_across_bytes[kind] = self.sent_across_bytes.get(kind, 0) + across

    def share(self, numel: int, dtype: torch.dtype, text: str) -> SharedFlat | None:
        values = self.empty(numel, dtype)
        return SharedFlat(values, values.view(-1), 1 + self.num_near, is_filler=self.rank == 0)

    def publish_shared(self, flat: Tensor, *, buffer: int, kind: str) -> Handle:
        num_hosts = -(-self.world_size // (1 + self.num_near))
        sent = (num_hosts - 1) * self.shard_of(flat).nbytes  # once to each other host
        self._add_link(kind, sent, sent)
        return Done()

    def wait_for_readers(self) -> None:
        return

    def broadcast(
        self, tensor: Tensor, source: int = 0, what: str = "the first rank's values"
    ) -> None:
        return

    def all_reduce(
        self, tensor: Tensor, *, what: str, kind: str, buffer: int = ACTIVATION_BUFFER
    ) -> Handle:
        self._count_all_reduce(kind, tensor)
        return Done()

    def all_to_all(
        self,
        outs: Sequence[Tensor],
        parts: Sequence[Tensor],
        *,
        what: str,
        kind: str,
        buffer: int = ACTIVATION_BUFFER,
    ) -> Handle:
        for peer, part in enumerate(parts):
            if peer != self.rank:
                self._count_parts(kind, part)
        for out, part in zip(outs, parts, strict=True):
            if self._has_values:
                out.copy_(part)
        return Done()

    def all_gather(self, flat: Tensor, shard: Tensor, *, buffer: int, kind: str) -> Handle:
        self._count(kind, shard)
        if self._has_values:
            flat.view(self.world_size, -1).copy_(shard.clone())
        return Done()

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, add: bool, buffer: int, kind: str
    ) -> Handle:
        self._count(kind, self.shard_of(flat))
        return Done()

    def collect(
        self, out: Tensor | None, mine: Tensor, bounds: Bounds, *, target: int | None = None
    ) -> None:
        _refuse()

    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], *, buffer: int
    ) -> None:
        _refuse()

    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, *, source: int = 0) -> None:
        _refuse()

    def start_gather_small(
        self, values: Tensor, buffer: int = CONTROL_BUFFER, what: str = ""
    ) -> tuple[Tensor, Handle]:
        # on the host, where they are read
        found = torch.zeros_like(values, device="cpu") if values.is_meta else values
        return found.expand(self.world_size, -1), Done()

    def send(self, tensor: Tensor, peer: int, *, number: int, what: str, kind: str) -> Handle:
        self._count_parts(kind, tensor)
        return Done()

    def receive(self, tensor: Tensor, peer: int, *, number: int, what: str) -> Handle:
        return Done()


def _refuse() -> NoReturn:
    raise AssertionError("a plan has no values that could be sent")


@final
class PaperGroups(AxisGroups):
    """The groups of the rank at these coordinates of a mesh of any size."""

    def __init__(
        self,
        mesh: Mesh,
        ranks_per_host: int = 1,
        *,
        pipe: int = 0,
        tensor: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """The data and sequence coordinates are 0: all of them have equal parts.

        ranks_per_host: hosts have consecutive ranks. device: see `PaperCollectives`.
        """
        self.mesh = mesh
        self.rank = mesh.rank_at(pipe=pipe, tensor=tensor)
        self._device = device
        first = self.rank // ranks_per_host * ranks_per_host
        self._on_host = range(first, min(first + ranks_per_host, mesh.size))
        self.opened = []
        self._at: dict[Axis, int] = {"pipe": pipe, "data": 0, "sequence": 0, "tensor": tensor}
        self._found: dict[tuple[tuple[Axis, ...], str], PaperCollectives] = {}
        self._members: dict[Collectives, Sequence[int]] = {}
        self.world: PaperCollectives = self._open(("pipe", "data", "sequence", "tensor"), "")

    @property
    def is_everywhere(self) -> bool:
        return True

    def coordinate(self, axis: Axis) -> int:
        return self._at[axis]

    def along(self, axes: Axis | tuple[Axis, ...], use: str = "") -> Collectives:
        return self._open((axes,) if isinstance(axes, str) else tuple(axes), use)

    def blocks(self, axes: Axis | tuple[Axis, ...], whole: Collectives, length: int) -> Levels:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        members = self._members.get(whole, self.mesh.ranks_along(names, self.rank))
        block, place = divmod(whole.rank, length)
        inside = self._made(members[block * length : (block + 1) * length], names)
        across = self._made(members[place::length], names)
        return Levels(whole, inside, across)

    def within(self, axes: tuple[Axis, ...], tensor_sets: Sequence[Sequence[int]]) -> Collectives:
        own = next(places for places in tensor_sets if self._at["tensor"] in places)
        at = self.mesh.coordinates
        along = self.mesh.ranks_along(axes, self.rank)
        return self._made([rank for rank in along if at(rank).tensor in own], axes)

    def shared(self, stages: Sequence[int], *, by_slice: bool = False) -> Collectives | None:
        if self._at["pipe"] not in stages:
            return None
        axes: tuple[Axis, ...] = ("pipe", "data", "sequence") + (() if by_slice else ("tensor",))
        at = self.mesh.coordinates
        along = self.mesh.ranks_along(axes, self.rank)
        return self._made([rank for rank in along if at(rank).pipe in stages], axes)

    def _open(self, axes: tuple[Axis, ...], use: str) -> PaperCollectives:
        if (axes, use) not in self._found:
            self._found[axes, use] = self._made(self.mesh.ranks_along(axes, self.rank), axes)
        return self._found[axes, use]

    def _made(self, members: Sequence[int], axes: tuple[Axis, ...]) -> PaperCollectives:
        near = sum(rank != self.rank and rank in self._on_host for rank in members)
        at = list(members).index(self.rank)
        found = PaperCollectives(at, len(members), axes, near, self._device)
        self._members[found] = members
        self.opened.append(found)
        return found


__all__ = ["PaperCollectives", "PaperGroups"]
