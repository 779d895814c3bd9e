"""Spare host memory for updates that may have to be undone. Its size has a limit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor

from ..utils.available_memory import available_bytes
from .lanes import Done, Ticket
from .pinned import host_memory

MAX_SHARE_OF_FREE = 0.5  # of the free memory that this rank has
ALIGN_BYTES = 64


def aligned_bytes(tensor: Tensor) -> int:
    """The bytes of `tensor`, rounded up so that the next one is aligned."""
    return -(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES


@final
class Room:
    """Memory for one update: copies of what it overwrites, and its new values for forward."""

    def __init__(self, old: Tensor, values: Tensor) -> None:
        self._old = old
        self._values = values
        self.reader: Ticket = Done()  # of the values

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes for copies and for values."""
        return self._old.numel(), self._values.numel()

    def values(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] for new values, undefined."""
        return self._values[: numel * dtype.itemsize].view(dtype)

    def copies(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """For each tensor flat memory of its size and dtype, undefined."""
        found, start = [], 0
        for tensor in tensors:
            found.append(self._old[start : start + tensor.nbytes].view(tensor.dtype))
            start += aligned_bytes(tensor)
        return found


@final
class Spare:
    """Gives out rooms, as much as `limit_bytes` in all. Threads may share it.

    limit_bytes: None computes it when it is first needed: half of the free memory of this rank.
    """

    def __init__(self, *, pin: bool, limit_bytes: int | None = None) -> None:
        self.allocated_bytes = 0
        self._pin = pin
        self._limit_bytes = limit_bytes
        self._free: list[Room] = []
        self._lock = threading.Lock()

    def take(self, old_bytes: int, values_bytes: int) -> Room | None:
        """A room of at least these sizes; None if the limit is reached."""
        with self._lock:
            fitting = [
                room
                for room in self._free
                if room.sizes[0] >= old_bytes and room.sizes[1] >= values_bytes
            ]
            if fitting:
                smallest = min(fitting, key=lambda room: sum(room.sizes))
                self._free.remove(smallest)
                return smallest
            return self._new(old_bytes, values_bytes)

    def give(self, room: Room) -> None:
        """Return `room`; its values may still be read until `room.reader` is done."""
        with self._lock:
            self._free.append(room)

    def _new(self, old_bytes: int, values_bytes: int) -> Room | None:
        if self._limit_bytes is None:
            self._limit_bytes = _limit_of_rank()
        if self.allocated_bytes + old_bytes + values_bytes > self._limit_bytes:
            return None
        self.allocated_bytes += old_bytes + values_bytes
        # only the values are copied to the device
        return Room(host_memory(old_bytes, pin=False), host_memory(values_bytes, pin=self._pin))


def _limit_of_rank() -> int:
    ranks_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return int(available_bytes() * MAX_SHARE_OF_FREE / ranks_here)


__all__ = ["Room", "Spare", "aligned_bytes"]
