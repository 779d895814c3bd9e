"""The tensors that an optimizer gets, and which range of which master each one is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from ...ops.optim.shard_optimizer import World
from ...utils.errors import UsageError
from .master import Master


@final
class Places:
    """Makes the tensors for an optimizer's groups, and remembers their places."""

    def __init__(self, masters: Sequence[Master], world: World) -> None:
        self._masters, self._world = masters, world
        # id of an optimizer's tensor -> the tensor, its master, its first element in the master
        self._found: dict[int, tuple[Tensor, Master, int]] = {}

    def tensors_of(self, group: int) -> list[Tensor]:
        """The tensors of the optimizer's group `group`: one 1-D tensor for each flat buffer."""
        return [
            self._add(item.master, master, item.start)
            for master in self._masters
            for item in master.items
            if item.group == group
        ]

    def whole_params(self, group: int) -> list[Tensor]:
        """The same as tensors of the parameters' own shapes, for optimizers that use shapes.

        Raises:
            UsageError: the optimizer state is sharded, so no rank has full parameters.
        """
        if self._world.is_sharded:
            raise UsageError("a shard does not keep the shapes of its parameters")
        return [
            self._add_view(
                item.master[part.start : part.stop].view(part.shape),
                master,
                item.start + part.start,
            )
            for master in self._masters
            for item in master.items
            if item.group == group
            for part in item.parts
        ]

    def of(self, tensor: Tensor) -> tuple[Master, int] | None:
        """The master that contains an optimizer's `tensor`, and the tensor's first element in it; or None."""
        _, master, start = self._found.get(id(tensor), (None, None, 0))
        return None if master is None or not tensor.numel() else (master, start)

    def tensors_in(
        self, master: Master, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[Tensor, int]]:
        """The tensors of `optimizer` that are ranges of `master`, and their first elements in it."""
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                place = self.of(tensor)
                if place is not None and place[0] is master:
                    yield tensor, place[1]

    def _add_view(self, tensor: Tensor, master: Master, start: int) -> Tensor:
        master.residence.add_view(tensor, start)
        return self._add(tensor, master, start)

    def _add(self, tensor: Tensor, master: Master, start: int) -> Tensor:
        self._found[id(tensor)] = (tensor, master, start)
        return tensor


__all__ = ["Places"]
