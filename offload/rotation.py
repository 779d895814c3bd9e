"""A few buffers of host memory that are used in turn, each until its last reader is done."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from .lanes import Done, Ticket
from .pinned import host_memory


@final
class Rotation:
    """Owns the buffers, pinned if `pin`; they grow to the largest size asked for. For one thread."""

    def __init__(self, num_buffers: int, *, pin: bool) -> None:
        self._pin = pin
        self._buffers = [host_memory(0, pin=False) for _ in range(num_buffers)]
        self._readers: list[Ticket] = [Done() for _ in range(num_buffers)]
        self._next = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An undefined [numel] tensor. Waits for the reader that its buffer had before."""
        at = self._next
        self._readers[at].wait()
        need_bytes = numel * dtype.itemsize
        if self._buffers[at].numel() < need_bytes:
            self._buffers[at] = host_memory(need_bytes, pin=self._pin)
        return self._buffers[at][:need_bytes].view(dtype)

    def lend(self, reader: Ticket) -> None:
        """The tensor that `take` returned last is read until `reader` is done."""
        self._readers[self._next] = reader
        self._next = (self._next + 1) % len(self._buffers)

    def release(self) -> None:
        """Free the buffers, which nobody reads any more."""
        self._buffers = [host_memory(0, pin=False) for _ in self._buffers]
        self._readers = [Done() for _ in self._buffers]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.numel() for buffer in self._buffers)


__all__ = ["Rotation"]
