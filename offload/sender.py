"""Sends new parameter values from the host to the device through a few pinned buffers.

update writes buffer 0 ──to_device──> parameters      meanwhile the next update writes buffer 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from .lanes import Done, Lanes, Mark, Ticket
from .pinned import host_memory

NUM_BUFFERS = 2


@final
class Sender:
    """Owns the buffers. Used by one thread: the one that runs the updates."""

    def __init__(self, lanes: Lanes, *, pin: bool) -> None:
        self._lanes = lanes
        self._pin = pin
        self._buffers = [host_memory(0, pin=False) for _ in range(NUM_BUFFERS)]
        self._tickets: list[Ticket] = [Done() for _ in range(NUM_BUFFERS)]
        self._next = 0

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An undefined [numel] tensor to write values to, for the next `send`."""
        at = self._next
        self._tickets[at].wait()
        need_bytes = numel * dtype.itemsize
        if self._buffers[at].numel() < need_bytes:
            self._buffers[at] = host_memory(need_bytes, pin=self._pin)
        return self._buffers[at][:need_bytes].view(dtype)

    def send(
        self,
        values: Tensor,
        target: Tensor,
        after: Mark | None = None,
        then: Callable[[], None] | None = None,
    ) -> Ticket:
        """Start to copy `values`, the tensor that `buffer` returned last, to `target` [numel].

        after: see `Lane.run`. then: is called in the lane after the copy.
        """

        def copy() -> None:
            target.copy_(values, non_blocking=True)
            if then is not None:
                then()

        ticket = self._lanes.to_device.run(copy, after)
        self._tickets[self._next] = ticket
        self._next = (self._next + 1) % NUM_BUFFERS
        return ticket

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.numel() for buffer in self._buffers)


__all__ = ["Sender"]
