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


@final
class PaperCollectives(Collectives):
    """The collectives of rank `rank` of `world_size`. Sums and exchanges of activations are counted.

    stages, tensors: the pipeline stages and tensor ranks that its ranks are on, if not all along `axes`.
    places: of its ranks among all along `axes`, if they are not all.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        axes: tuple[Axis, ...],
        stages: Sequence[int] = (),
        tensors: Sequence[int] = (),
        places: Sequence[int] = (),
        device: torch.device | None = None,
    ) -> None:
        """device: of values that are exchanged. Each peer then sends what this rank does; None: no values."""
        super().__init__(None, device or torch.device("cpu"), rank, world_size)
        self._has_values = device is not None
        self.axes = axes
        self.stages = tuple(stages)
        self.tensors = tuple(tensors)
        self.places = tuple(places)

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
        self._count(kind, out)
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
        return values.expand(self.world_size, -1), Done()

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

    def __init__(self, mesh: Mesh, *, pipe: int = 0, tensor: int = 0) -> None:
        """The data and sequence coordinates are 0: all of them have equal parts."""
        self.mesh = mesh
        self.opened = []
        self._at: dict[Axis, int] = {"pipe": pipe, "data": 0, "sequence": 0, "tensor": tensor}
        self._found: dict[tuple[tuple[Axis, ...], str], PaperCollectives] = {}
        self.world = self._open(("pipe", "data", "sequence", "tensor"), "")

    @property
    def is_everywhere(self) -> bool:
        return True

    def coordinate(self, axis: Axis) -> int:
        return self._at[axis]

    def along(self, axes: Axis | tuple[Axis, ...], use: str = "") -> Collectives:
        return self._open((axes,) if isinstance(axes, str) else tuple(axes), use)

    def blocks(self, axes: Axis | tuple[Axis, ...], whole: Collectives, length: int) -> Levels:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        rank, size = whole.rank, whole.world_size
        assert isinstance(whole, PaperCollectives)
        block, place = divmod(rank, length)
        places = whole.places or range(size)
        of_block = places[block * length : (block + 1) * length]
        inside = PaperCollectives(place, length, names, places=of_block)
        across = PaperCollectives(block, size // length, names, places=places[place::length])
        self.opened += [inside, across]
        return Levels(whole, inside, across)

    def within(self, axes: tuple[Axis, ...], tensor_sets: Sequence[Sequence[int]]) -> Collectives:
        own = next(sorted(places) for places in tensor_sets if self._at["tensor"] in places)
        others = self.mesh.length(tuple(axis for axis in axes if axis != "tensor"))
        place = own.index(self._at["tensor"])
        found = PaperCollectives(place, others * len(own), axes, tensors=own)
        self.opened.append(found)
        return found

    def shared(self, stages: Sequence[int], *, by_slice: bool = False) -> Collectives | None:
        if self._at["pipe"] not in stages:
            return None
        axes: tuple[Axis, ...] = ("pipe", "data", "sequence") + (() if by_slice else ("tensor",))
        others = self.mesh.length(axes[1:])
        rank = sorted(stages).index(self._at["pipe"]) * others
        rank += 0 if by_slice else self._at["tensor"]
        found = PaperCollectives(rank, len(stages) * others, axes, sorted(stages))
        self.opened.append(found)
        return found

    def _open(self, axes: tuple[Axis, ...], use: str) -> PaperCollectives:
        if (axes, use) not in self._found:
            rank = 0
            for axis in ("pipe", "data", "sequence", "tensor"):
                if axis in axes:
                    rank = rank * self.mesh.length(axis) + self._at[axis]
            found = PaperCollectives(rank, self.mesh.length(axes), axes)
            self._found[axes, use] = found
            self.opened.append(found)
        return self._found[axes, use]


__all__ = ["PaperCollectives", "PaperGroups"]
