"""Gives what stays for the whole training memory of its own on a GPU, once.

    first backward    gradient buffers are allocated between activations
    first update      the cache is emptied: the optimizer's states get segments of their own
    after it          gradient buffers are freed, the cache is emptied, they are allocated again

torch's allocator takes a block that activations have freed, and splits it. A part that stays for ever keeps the
rest from being joined again, so the next forward allocates more. Costs two waits for the device, in one step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch

from .memory import Memory


class FirstUpdate(ABC):
    """`begin` is called before every update, and `end` after it, when gradients are dropped."""

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def end(self) -> None: ...


@final
class Anywhere(FirstUpdate):
    """The device is a CPU, whose pages are joined by the kernel."""

    def begin(self) -> None:
        return

    def end(self) -> None:
        return


@final
class SegmentsOfTheirOwn(FirstUpdate):
    """The device is a GPU."""

    def __init__(self, memory: Memory) -> None:
        self._memory: Memory | None = memory

    def begin(self) -> None:
        if self._memory is not None:
            torch.cuda.empty_cache()

    def end(self) -> None:
        if self._memory is not None:
            memory, self._memory = self._memory, None
            again = memory.lift_gradients()
            torch.cuda.empty_cache()
            again()


def first_update(memory: Memory, device: torch.device) -> FirstUpdate:
    """The one for `device`."""
    return SegmentsOfTheirOwn(memory) if device.type == "cuda" else Anywhere()


__all__ = ["FirstUpdate", "first_update"]
