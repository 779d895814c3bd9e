"""Parameters that were frozen after `initialize`: an update leaves them, and their states, as they are.

They lie in flat ranges beside others that train, and an optimizer steps whole ranges. So what belongs to
them is kept before the step and put back after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from .flat_params import FlatParams

Range = tuple[int, int]


def frozen_ranges(params: FlatParams, start: int, stop: int) -> list[Range]:
    """[from, to) of the frozen parameters' elements in [start, stop) of the buffer, relative to `start`."""
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
    """What an update must not change. `restore` ends it."""

    def __init__(self) -> None:
        self._values: list[tuple[Tensor, Tensor]] = []

    def keep(self, tensor: Tensor, ranges: Sequence[Range]) -> None:
        """These elements of a contiguous tensor."""
        flat = tensor.detach().view(-1)
        self._values += [(flat[low:high], flat[low:high].clone()) for low, high in ranges]

    def keep_state(self, state: dict[str, Any], numel: int, ranges: Sequence[Range]) -> None:
        """The states of a range of `numel` elements: by element, or all where all of it is frozen.

        The count of steps goes on: it is one for a range, and must not depend on where ranges are cut.
        """
        is_whole = sum(high - low for low, high in ranges) == numel
        for key, value in state.items():
            if key == "step" or not isinstance(value, Tensor) or not value.is_contiguous():
                continue
            if value.numel() == numel:
                self.keep(value, ranges)
            elif is_whole:
                self.keep(value, [(0, value.numel())])

    @torch.no_grad()
    def restore(self) -> None:
        for target, value in self._values:
            target.copy_(value)


__all__ = ["FrozenValues", "Range", "clip", "frozen_ranges"]
