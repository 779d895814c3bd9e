"""The process groups of a mesh, each made once and only when it is used.

    rank = pipe x data     world   all ranks                       norms, losses, errors
     0 1 | stage 0         data    0 1 / 2 3                       parameters and gradients of a stage
     2 3 | stage 1         pipe    0 2 / 1 3, one for each use     forward, backward, batches
                           shared  0 1 2 3 for a weight tied over stages 0 and 1

A process keeps its groups: the next engine with the same mesh uses them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from ..mesh import Axis, Mesh
from .collectives import Collectives
from .opening import open_collectives

_groups: dict[tuple[object, tuple[int, ...], str], dist.ProcessGroup] = {}


@final
class MeshGroups:
    """Opens the collectives of one engine. Every method is for all ranks of the group that it opens."""

    def __init__(
        self, mesh: Mesh, world: dist.ProcessGroup, device: torch.device, timeout_seconds: float
    ) -> None:
        """`timeout_seconds`: of waits in new groups."""
        self.mesh = mesh
        self.opened: list[Collectives] = []
        self._world = world
        self._device = device
        self._rank = world.rank()
        self._timeout = timedelta(seconds=timeout_seconds)

    def coordinate(self, axis: Axis) -> int:
        """The place of this rank on `axis`."""
        return int(getattr(self.mesh.coordinates(self._rank), axis))

    def along(self, axis: Axis, use: str = "") -> Collectives:
        """The ranks that differ from this one on `axis` only. `use` tells several groups of one axis apart."""
        return self._open(self.mesh.ranks_along(axis, self._rank), use)

    def stages(self, stages: Sequence[int]) -> Collectives:
        """All data ranks of several pipeline stages."""
        return self._open(self.mesh.union_of(stages, self._rank), "")

    def _open(self, ranks: Sequence[int], use: str) -> Collectives:
        if len(ranks) == 1:
            return open_collectives(None, self._device)
        found = open_collectives(self._group(tuple(ranks), use), self._device)
        self.opened.append(found)
        return found

    def _group(self, ranks: tuple[int, ...], use: str) -> dist.ProcessGroup:
        if len(ranks) == self._world.size() and not use:
            return self._world
        everywhere = dist.get_process_group_ranks(self._world)
        key = (dist.group.WORLD, tuple(everywhere[rank] for rank in ranks), use)
        if key not in _groups:
            _groups[key] = dist.new_group(
                list(key[1]), timeout=self._timeout, use_local_synchronization=True
            )
        return _groups[key]


__all__ = ["MeshGroups"]
