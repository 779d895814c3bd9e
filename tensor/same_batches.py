"""Checks in the first forwards that the ranks of a tensor group got the same batch."""

from __future__ import annotations

import zlib
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..ops.comm.collectives import Collectives
from ..utils.errors import UsageError

CHECKED_FORWARDS = 3


@final
class SameBatches:
    """Compares checksums of the inputs of `model` over the ranks of `group`. Sends 8 bytes for a forward."""

    def __init__(self, model: nn.Module, group: Collectives) -> None:
        self._group = group
        self._left = CHECKED_FORWARDS
        self._hook = model.register_forward_pre_hook(self._check, with_kwargs=True)

    def _check(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._left -= 1
        if self._left == 0:
            self.remove()
        mine = torch.tensor([checksum((args, kwargs))], device=self._group.device)
        numbers = self._group.gather_small(mine, what="checksums of the batches").view(-1).tolist()
        other = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
        if other is not None:
            raise UsageError(
                f"tensor_parallel.tp_size = {self._group.world_size}: ranks 0 and {other} of a tensor group "
                "got different batches; they compute parts of one model, so give them the same: let the "
                "sampler use engine.dp_rank and engine.dp_world_size, or pass training_data"
            )

    def remove(self) -> None:
        """Check no more."""
        self._hook.remove()


def checksum(value: Any) -> int:
    """A number that differs for different tensors, numbers and texts in `value`."""
    found = 0
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            rows = leaf.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
            found = zlib.crc32(rows, zlib.crc32(repr(tuple(leaf.shape)).encode(), found))
        elif isinstance(leaf, (bool, int, float, str)):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found


__all__ = ["SameBatches", "checksum"]
