"""Gives what stays for the whole training memory of its own on a GPU, once.

    first forward    the optimizer's states are allocated, before any activation
    first backward   gradient buffers are allocated between activations
    first update     then all of them are freed, and allocated again in the space of joined blocks

torch's allocator takes a block that activations have freed, and splits it. A part that stays for ever keeps the
rest from being joined again, so the next forward allocates more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch

from .memory import Memory
from .update import Updater


class FirstStep(ABC):
    """`begin` is called before every forward that trains, and `end` after every update."""

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def end(self) -> None: ...


@final
class OnCpu(FirstStep):
    """The kernel joins free pages itself."""

    def begin(self) -> None:
        return

    def end(self) -> None:
        return


@final
class OnGpu(FirstStep):
    """Each of both acts once."""

    def __init__(self, memory: Memory, updater: Updater) -> None:
        self._memory: Memory | None = memory
        self._updater: Updater | None = updater

    def begin(self) -> None:
        if self._updater is not None:
            updater, self._updater = self._updater, None
            torch.cuda.empty_cache()  # what the construction of the model has left
            updater.allocate_states()

    def end(self) -> None:
        if self._memory is not None:
            memory, self._memory = self._memory, None
            memory.reallocate_gradients()


def first_step(memory: Memory, updater: Updater, device: torch.device) -> FirstStep:
    """The one for `device`."""
    return OnGpu(memory, updater) if device.type == "cuda" else OnCpu()


__all__ = ["FirstStep", "first_step"]
