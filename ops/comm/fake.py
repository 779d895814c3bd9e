"""Groups and collectives of a rank that does not run: they know their sizes, count bytes and send nothing.

`xds plan` uses them to count the messages of a training. Sums and exchanges of activations are counted as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, final

import torch
from torch import Tensor

from ..mesh import Axis, Mesh
from .backend import Backend, Bounds, Gather, Member, SharedFlat
from .collectives import Collectives
from .handles import DONE, Handle
from .mesh_groups import AxisGroups
from .message_log import Traffic


@final
class FakeBackend(Backend):
    """Sends nothing. With `has_values` each peer seems to send what this rank sends.

    axes, num_near: See `fake_collectives`.
    """

    is_recorded = False

    def __init__(
        self, member: Member, axes: tuple[Axis, ...], num_near: int, *, has_values: bool
    ) -> None:
        super().__init__(member)
        self.axes = axes
        self.num_near = num_near
        self._has_values = has_values

    def all_gather(self, flat: Tensor, shard: Tensor, buffer: int) -> Handle:
        if self._has_values:
            flat.view(self.world_size, -1).copy_(shard.clone())
        return DONE

    def reduce_scatter(self, flat: Tensor, out: Tensor, buffer: int, add: bool) -> Handle:
        return DONE

    def all_reduce(self, tensor: Tensor, buffer: int) -> Handle:
        return DONE

    def all_to_all(self, outs: Sequence[Tensor], parts: Sequence[Tensor], buffer: int) -> Handle:
        for out, part in zip(outs, parts, strict=True):
            if self._has_values:
                out.copy_(part)
        return DONE

    def start_gather_small(self, values: Tensor, buffer: int) -> tuple[Tensor, Handle]:
        # on the host, where they are read
        on_host = torch.zeros_like(values, device="cpu") if values.is_meta else values
        return on_host.expand(self.world_size, -1), DONE

    def send(self, tensor: Tensor, peer: int) -> Handle:
        return DONE

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
        return DONE

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
        device: Of values that are exchanged. Each peer then sends what this rank does. None: no values.
    """
    member = Member(None, device or torch.device("cpu"), rank, range(world_size))
    collectives = Collectives(FakeBackend(member, axes, num_near, has_values=device is not None))
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
        self._found: dict[tuple[tuple[int, ...], tuple[Axis, ...], str], Collectives] = {}
        self.world = self.along(("pipe", "data", "sequence", "tensor"))

    @property
    def is_everywhere(self) -> bool:
        return True

    def _open(
        self, groups: Sequence[Sequence[int]], axes: tuple[Axis, ...], use: str = ""
    ) -> Collectives | None:
        members = next((tuple(ranks) for ranks in groups if self.rank in ranks), None)
        if members is None:
            return None
        if (members, axes, use) not in self._found:
            near = sum(rank != self.rank and rank in self._on_host for rank in members)
            collectives = fake_collectives(
                members.index(self.rank), len(members), axes, near, self._device
            )
            self._found[members, axes, use] = collectives
            self.opened.append(collectives)
        return self._found[members, axes, use]


__all__ = ["FakeBackend", "FakeGroups", "backend_of", "fake_collectives"]
