"""Sends new parameter values from the host to the device through a few pinned buffers.

update writes buffer 0 ──to_device──> parameters      meanwhile the next update writes buffer 1
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from .lanes import Lanes, Mark, Ticket
from .rotation import Rotation

NUM_BUFFERS = 2


@final
class Sender:
    """Owns the buffers. Used by one thread: the one that runs the updates."""

    def __init__(self, lanes: Lanes, *, pin: bool) -> None:
        self._lanes = lanes
        self._buffers = Rotation(NUM_BUFFERS, pin=pin)

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An undefined [numel] tensor to write values to, for the next `send`."""
        return self._buffers.take(numel, dtype)

    def send(
        self,
        values: Tensor,
        target: Tensor,
        after: Mark | None = None,
    ) -> Ticket:
        """Start to copy `values`, the tensor that `buffer` returned last, to `target` [numel].

        after: see `Lane.run`.
        """
        ticket = self.copy(values, target, after)
        self._buffers.lend(ticket)
        return ticket

    def copy(self, values: Tensor, target: Tensor, after: Mark | None = None) -> Ticket:
        """The same for `values` in other memory of the host."""
        return self._lanes.to_device.run(lambda: target.copy_(values, non_blocking=True), after)

    def release(self) -> None:
        """Free the buffers, when all is sent."""
        self._buffers.release()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers."""
        return self._buffers.allocated_bytes


__all__ = ["Sender"]
