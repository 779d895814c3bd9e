"""A pool of flat buffers: the next unit reuses the buffer that a unit returns.

Freed host blocks of more than 32 MiB are returned to the kernel, and cost a page fault for every 4 KiB when
they are allocated again. torch's allocator for devices is such a pool itself, so there blocks are freed. The
pool's size is the peak of the bytes in use at one time; it is reported as a named bucket.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

Empty = Callable[[int, torch.dtype, torch.device], Tensor]  # numel, dtype, device -> [numel]


@final
class BufferPool:
    """1-D buffers by dtype and device, best fit. Contents are undefined when taken."""

    def __init__(self, empty: Empty | None = None) -> None:
        """empty: allocates a block; None: as torch does."""
        self._empty = empty or _empty
        self._free: list[
            Tensor
        ] = []  # of the host; each 1-D, its whole storage; the smallest first
        self._taken_bytes = 0
        self._most_taken_bytes = 0  # on a device

    @property
    def allocated_bytes(self) -> int:
        """Bytes of free and taken blocks together; on a device the most that were taken at once."""
        free_bytes = sum(block.numel() for block in self._free)
        return max(self._most_taken_bytes, self._taken_bytes + free_bytes)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous [numel] tensor; the smallest free block that fits, or a new one."""
        need_bytes = numel * dtype.itemsize
        if device.type != "cpu":
            self._taken_bytes += need_bytes
            self._most_taken_bytes = max(self._most_taken_bytes, self._taken_bytes)
            return self._empty(numel, dtype, device)
        place = bisect_left(self._free, need_bytes, key=Tensor.numel)
        if place < len(self._free):
            block = self._free.pop(place)
        else:
            block = self._replace_smaller(need_bytes, device)
        self._taken_bytes += block.numel()
        return block[:need_bytes].view(dtype)

    def _replace_smaller(self, need_bytes: int, device: torch.device) -> Tensor:
        """Allocate a block. Drops one free block that is too small, so sizes converge to the largest in use."""
        if self._free:
            self._free.pop()
        return self._empty(need_bytes, torch.uint8, device)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[numel] of the same memory, which does not belong to the pool."""
        return self._empty(numel, dtype, device)

    def clear(self) -> None:
        """Release the free blocks."""
        self._free = []
        self._most_taken_bytes = self._taken_bytes

    def give(self, buffer: Tensor) -> None:
        """Return a buffer of `take` to the pool. It must not be used afterwards."""
        storage = buffer.untyped_storage()
        self._taken_bytes -= storage.nbytes()
        if buffer.device.type != "cpu":
            return
        block = torch.empty(0, dtype=torch.uint8, device=buffer.device)
        insort(self._free, block.set_(storage, 0, (storage.nbytes(),), (1,)), key=Tensor.numel)


def _empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)
