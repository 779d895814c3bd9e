"""Random numbers where activations are cut: each tensor rank draws others between columns and rows.

    whole     q, k, v ──┐  another generator on each rank  ┌── o    whole again
    dropout   the same  └── dropout of own heads ──────────┘        dropout the same

A region starts with one draw of the common generator, which seeds the generator of this rank. At its end the
common state comes back. So ranks stay equal where activations are whole, a recomputed block draws the same
numbers, and a checkpoint needs nothing new.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch

from ..ops.device import device_of

MASK = (1 << 62) - 1
STEP = 0x9E3779B97F4A7C15  # an odd constant: seeds of neighbouring ranks differ in many bits


class Draws(ABC):
    """What layers that are cut by columns and by rows do to the generator of random numbers."""

    @abstractmethod
    def begin(self, device: torch.device) -> None:
        """Activations on `device` are cut from here on. Nothing where they are already."""

    @abstractmethod
    def end(self) -> None:
        """Activations are whole again."""


@final
class CommonDraws(Draws):
    """All ranks draw the same numbers: layers by columns that no layer by rows follows."""

    def begin(self, device: torch.device) -> None:
        return

    def end(self) -> None:
        return


@final
class OwnDraws(Draws):
    """This rank draws its own numbers where activations are cut. Owns the common state in the meantime."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._generator: torch.Generator | None = None
        self._common: torch.Tensor | None = None
        self._seed = -1

    def begin(self, device: torch.device) -> None:
        generator = device_of(device).generator
        if self._is_running(generator):
            return
        seed = (_drawn(generator) + (self._rank + 1) * STEP) & MASK
        self._generator, self._common, self._seed = generator, generator.get_state(), seed
        generator.manual_seed(seed)

    def end(self) -> None:
        if self._generator is not None and self._common is not None:
            if self._is_running(self._generator):
                self._generator.set_state(self._common)
            self._generator = self._common = None

    def _is_running(self, generator: torch.Generator) -> bool:
        # a recomputation that stops early, or an error, puts the common state back without `end`
        return self._generator is generator and generator.initial_seed() == self._seed


def _drawn(generator: torch.Generator) -> int:
    """One draw; without a wait for a GPU: its generator is a seed and an offset."""
    if generator.device.type == "cpu":
        return int(torch.randint(MASK, (), generator=generator))
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return generator.initial_seed() ^ (offset * STEP & MASK)


__all__ = ["CommonDraws", "Draws", "OwnDraws"]
