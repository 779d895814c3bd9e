"""What all ranks know after the small message of a step, on the device and, once it is read, on the host."""

from __future__ import annotations

from functools import cached_property
from typing import final

import torch
from torch import Tensor

from ...ops.kernels.decide import decide
from ...ops.kernels.square_sum import is_in_range
from .same_edits import NUM_COUNTS

LATE, ASKED = NUM_COUNTS, 2 * NUM_COUNTS  # flags beside the number of writes


@final
class Agreement:
    """The squared norm of the reduced sums, and what each rank has to say."""

    def __init__(self, table: Tensor, numel: int) -> None:
        """
        Args:
            table: fp64 [world_size, 2], by rank: its part of the squared norm; its writes, plus LATE if
                it has late gradients, plus ASKED if its process was asked to stop.
            numel: elements of all gradients, on the rank that has the most.
        """
        self._table, self._numel = table, numel
        self._arrived: tuple[Tensor, torch.Event] | None = None
        self._flags: Tensor | None = None

    def attach(self, flags: Tensor | None) -> None:
        """Read `flags` [n] of this rank in the same wait; before anything is read."""
        self._flags = flags

    def decide(self, factor: float, limit: float) -> Tensor:
        """What the kernels of a plain step read; see the op `decide`. Reading on the host waits for no more."""
        numbers = decide(self._table, self._numel, factor, limit)
        host = torch.empty(self._table.shape, dtype=self._table.dtype, pin_memory=True)
        host.copy_(self._table, non_blocking=True)
        event = torch.Event(self._table.device)
        event.record()
        self._arrived = host, event
        return numbers

    @cached_property
    def _numbers(self) -> list[float]:
        """The table row by row, then the flags. Waits for the device once, until `decide` if it was called."""
        if self._arrived is not None:
            host, event = self._arrived
            event.synchronize()
        else:
            host = self._table.view(-1)
            if self._flags is not None:
                host = torch.cat([host, self._flags.to(host)])
        numbers: list[float] = host.view(-1).tolist()
        return numbers

    @property
    def _rows(self) -> list[tuple[float, float]]:
        numbers = self._numbers[: self._table.numel()]
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    @property
    def flags(self) -> list[bool]:
        """Those that were attached."""
        return [bool(number) for number in self._numbers[self._table.numel() :]]

    @property
    def square(self) -> float:
        """The squared norm, added in rank order; inf or nan on overflow."""
        total = 0.0
        for square, _ in self._rows:  # `sum` compensates rounding in some versions of Python
            total += square
        return total

    @property
    def is_late(self) -> bool:
        """Some rank has late gradients."""
        return any(int(number) & LATE for _, number in self._rows)

    @property
    def asked(self) -> list[bool]:
        """By rank: its process was asked to stop."""
        return [bool(int(number) & ASKED) for _, number in self._rows]

    @property
    def edits(self) -> list[int]:
        """The writes of scripts by rank."""
        return [int(number) % NUM_COUNTS for _, number in self._rows]

    @property
    def is_in_range(self) -> bool:
        """The square needs no second, exact computation."""
        return is_in_range(self.square, self._numel)

    @property
    def is_plain(self) -> bool:
        """The condition of the op `decide`."""
        return self.is_in_range and not any(number for _, number in self._rows)


__all__ = ["ASKED", "LATE", "Agreement"]
