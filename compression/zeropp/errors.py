"""The running error of quantised gradients (LoCo), or none.

    compensated = gradient + error          sent = rounded(compensated)
    error       = beta * error + (1 - beta) * (compensated - sent)        0 after every `reset_steps` steps

Source: Xie et al., LoCo, 2024, algorithm 1, https://arxiv.org/abs/2407.04480. Differs: the error is fp32; what
the second hop loses joins the error of the rank that lost it; a skipped step resets it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from ..scheme import PendingError
from ..unit import GradientUnit
from .packets import QuantizedPackets


class Errors(ABC):
    """Packs parts of a flat buffer [numel], and keeps what that loses."""

    @abstractmethod
    def begin(self, device: torch.device) -> None:
        """A reduction starts."""

    @abstractmethod
    def pack(self, packets: QuantizedPackets, values: Tensor, packet: Tensor, start: int) -> None:
        """Write `values` [n], which begin at element `start` of the buffer, to `packet`."""

    @abstractmethod
    def pack_again(
        self, packets: QuantizedPackets, values: Tensor, packet: Tensor, start: int
    ) -> None:
        """The same for partial sums, in the second hop of a reduction."""

    @abstractmethod
    def end_step(self) -> None:
        """The step is done, or skipped."""

    @abstractmethod
    def undo(self) -> None:
        """The step is skipped."""

    @property
    @abstractmethod
    def pending_error(self) -> PendingError | None:
        """The error; None: there is none yet."""

    @abstractmethod
    def restore(self, pending: PendingError | None) -> None:
        """Replace the error."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of the error."""

    @property
    @abstractmethod
    def are_kept(self) -> bool:
        """Errors are kept between steps."""


@final
class NoErrors(Errors):
    """What a message loses is not kept."""

    are_kept = False
    held_bytes = 0
    pending_error = None

    def begin(self, device: torch.device) -> None:
        return

    def pack(self, packets: QuantizedPackets, values: Tensor, packet: Tensor, start: int) -> None:
        packets.pack(values, packet)

    def pack_again(
        self, packets: QuantizedPackets, values: Tensor, packet: Tensor, start: int
    ) -> None:
        packets.pack(values, packet)

    def end_step(self) -> None:
        return

    def undo(self) -> None:
        return

    def restore(self, pending: PendingError | None) -> None:
        return


@final
class RunningErrors(Errors):
    """A running mean of what was lost, for each element of the buffer: 4 bytes."""

    are_kept = True

    def __init__(self, numel: int, beta: float, reset_steps: int, unit: GradientUnit) -> None:
        self._numel = numel
        self._beta = beta
        self._reset_steps = reset_steps
        self._unit = unit
        self._error: Tensor | None = None
        self._in_unit = 1.0
        self._steps = 0  # since the error was 0

    @torch.no_grad()
    def begin(self, device: torch.device) -> None:
        unit = self._unit.value
        if self._error is None:
            self._error = torch.zeros(self._numel, dtype=torch.float32, device=device)
        elif unit != self._in_unit:  # a power of 2, so it is exact
            self._error.mul_(self._in_unit / unit)
        self._in_unit = unit

    @torch.no_grad()
    def pack(self, packets: QuantizedPackets, values: Tensor, packet: Tensor, start: int) -> None:
        assert self._error is not None
        error = self._error[start : start + values.numel()]
        lost = error.clone()
        packets.pack(values, packet, lost)
        error.lerp_(lost, 1.0 - self._beta)

    @torch.no_grad()
    def pack_again(
        self, packets: QuantizedPackets, values: Tensor, packet: Tensor, start: int
    ) -> None:
        assert self._error is not None
        lost = torch.zeros(values.numel(), dtype=torch.float32, device=values.device)
        packets.pack(values, packet, lost)
        self._error[start : start + values.numel()].add_(lost, alpha=1.0 - self._beta)

    def end_step(self) -> None:
        if self._error is None:
            return
        self._steps += 1
        if self._steps >= self._reset_steps:
            self.undo()

    def undo(self) -> None:
        if self._error is not None:
            self._error.zero_()
        self._steps = 0

    @property
    def pending_error(self) -> PendingError | None:
        if self._error is None:
            return None
        return PendingError(self._error, None, self._in_unit, self._steps)

    def restore(self, pending: PendingError | None) -> None:
        self._error, self._steps = None, 0
        if pending is not None:
            self._error, self._in_unit, self._steps = pending.error, pending.unit, pending.steps

    @property
    def held_bytes(self) -> int:
        return 0 if self._error is None else self._error.nbytes


__all__ = ["Errors", "NoErrors", "RunningErrors"]
