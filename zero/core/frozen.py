"""Keeps parameters that were frozen after `initialize`, and their optimizer states, unchanged by an update.

They lie in flat ranges beside trainable parameters, and an optimizer updates whole ranges. So their values
are saved before the step and restored after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ...ops.optim.shard_optimizer import states_of
from .param_bucket import ParamBucket

Range = tuple[int, int]


def frozen_ranges(params: ParamBucket, start: int, stop: int) -> list[Range]:
    """[from, to) of what is frozen now in [start, stop) of the buffer, in elements from `start` on."""
    frozen = {
        slot.offset
        for slot, param in zip(params.layout.slots, params.params, strict=True)
        if not param.requires_grad
    }
    if not frozen:
        return []
    pieces = params.layout.pieces_in(start, stop)
    return [(piece.start, piece.stop) for piece in pieces if piece.slot.offset in frozen]


def clip(ranges: Iterable[Range], at: int, numel: int) -> list[Range]:
    """The parts of `ranges` in [at, at + numel), relative to `at`."""
    clipped = [(max(low - at, 0), min(high - at, numel)) for low, high in ranges]
    return [(low, high) for low, high in clipped if low < high]


@final
class FrozenValues:
    """Saved values that an update must not change. `restore` writes them back."""

    def __init__(self) -> None:
        self._values: list[tuple[Tensor, Tensor]] = []

    def keep(self, tensor: Tensor, ranges: Sequence[Range]) -> None:
        """Save these elements of a contiguous tensor."""
        flat = tensor.detach().view(-1)
        self._values += [(flat[low:high], flat[low:high].clone()) for low, high in ranges]

    def keep_state(self, state: dict[str, Any], numel: int, ranges: Sequence[Range]) -> None:
        """Save the states of a range of `numel` elements: per element, or all if all of it is frozen.

        The step count is not saved: there is one for a range, and it must not depend on the ranges' bounds.
        """
        is_whole = sum(high - low for low, high in ranges) == numel
        for key, value in state.items():
            if key == "step" or not isinstance(value, Tensor) or not value.is_contiguous():
                continue
            if value.numel() == numel:
                self.keep(value, ranges)
            elif is_whole:
                self.keep(value, [(0, value.numel())])

    def keep_states(
        self,
        optimizer: torch.optim.Optimizer,
        tensors: Iterable[tuple[Tensor, int]],
        ranges: Sequence[Range],
    ) -> None:
        """Save the states of what is frozen. tensors: those of `optimizer`, and their first elements."""
        for tensor, at in tensors:
            inside = clip(ranges, at, tensor.numel())
            if inside:
                self.keep_state(states_of(optimizer).get(tensor, {}), tensor.numel(), inside)

    def restore(self) -> None:
        """Write the saved values back. Without gradients."""
        for target, value in self._values:
            target.copy_(value)


__all__ = ["FrozenValues", "Range", "clip", "frozen_ranges"]
