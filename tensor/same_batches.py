"""Checks in the first forwards that ranks of a tensor group get the same batch and draw the same numbers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from ..ops.comm.collectives import Collectives
from ..ops.device import device_of
from ..ops.torch_internals import tree_leaves
from ..utils.errors import UsageError

CHECKED_FORWARDS = 3


@final
class SameBatches:
    """Compares checksums of the inputs of `model` over the ranks of `group`. Sends 16 bytes for a forward.

    Where the model has dropout, states of the generator of random numbers are compared as well.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Collectives,
        setting: str = "tensor_parallel.tp_size",
        kind: str = "tensor",
        *,
        draws_equal: bool = True,
    ) -> None:
        """setting, kind: what messages call the number of ranks, and the group.

        draws_equal: with dropout, the states of random numbers must be equal.
        """
        self._setting, self._kind = setting, kind
        self._group = group
        self._draws = draws_equal and any(has_dropout(module) for module in model.modules())
        self._left = CHECKED_FORWARDS
        self._hook = model.register_forward_pre_hook(self._check, with_kwargs=True)

    def _check(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._left -= 1
        if self._left == 0 or self._group.was_reopened:
            self.remove()
        if self._group.was_reopened:
            return
        sums = [checksum((args, kwargs)), self._state() if model.training and self._draws else 0]
        mine = torch.tensor(sums, device=self._group.device)
        numbers = self._group.gather_small(mine, what="checksums of the batches").tolist()
        batches, states = zip(*numbers, strict=True)
        other = _first_other(batches)
        if other is not None:
            remedy = "draw them with one seed, or read them in one order"
            if model.training:
                remedy = (
                    "let the sampler use engine.dp_rank and engine.dp_world_size, or pass training_data"
                    f"{self._stock()}"
                )
            raise UsageError(
                f"{self._setting} = {self._group.world_size}: ranks 0 and {other} of a "
                f"{self._kind} group got different batches; they compute parts of one model, so give "
                f"them the same: {remedy}"
            )

        other = _first_other(states)
        if other is not None:
            raise UsageError(
                f"{self._setting} = {self._group.world_size}: ranks 0 and {other} of a "
                f"{self._kind} group have different states of random numbers, and the model has "
                "dropout; their activations would "
                "differ, so call torch.manual_seed with the same number on both, as seed + engine.dp_rank"
            )

    def _stock(self) -> str:
        if self._kind != "tensor":
            return ""
        return (
            "; a stock transformers Trainer and accelerate give them the same where the config names the "
            "number tensor_parallel.autotp_size"
        )

    def _state(self) -> int:
        return checksum(device_of(self._group.device).generator.get_state())

    def remove(self) -> None:
        """Check no more."""
        self._hook.remove()


def _first_other(numbers: Sequence[int]) -> int | None:
    """The first rank whose number is not that of rank 0."""
    return next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)


def has_dropout(module: nn.Module) -> bool:
    """`module` drops activations in training, as far as its attributes say."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return any(
        isinstance(rate, float) and rate > 0 and ("dropout" in name or "pdrop" in name)
        for name, rate in vars(module).items()
    )


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


__all__ = ["SameBatches", "checksum", "has_dropout"]
