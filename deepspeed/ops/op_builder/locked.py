"""The op "pin_memory": tensors in page-locked memory, which the system never swaps out.

torch's pinned memory needs a GPU and rounds sizes up to a power of two; this needs neither.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from functools import cache
from typing import Any, final

import torch
from torch import Tensor


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


@final
class LockedMemory:
    """DeepSpeed's `pin_handle`. The memory of a tensor is released with the last tensor that uses it."""

    def __init__(self) -> None:
        self._num_bytes: dict[int, int] = {}  # of each locked region, by its address

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """A page-locked tensor [num_elem] of zeros, of the example's dtype.

        Raises:
            RuntimeError: the system's limit is reached.
        """
        dtype = example_tensor.dtype
        num_bytes = max(1, num_elem * dtype.itemsize)
        pages = math.ceil(num_bytes / mmap.PAGESIZE) * mmap.PAGESIZE
        region = mmap.mmap(-1, pages)
        flat = torch.frombuffer(region, dtype=torch.uint8)  # keeps the region
        address = flat.data_ptr()
        if _libc().mlock(ctypes.c_void_p(address), ctypes.c_size_t(pages)):
            error = os.strerror(ctypes.get_errno())
            raise RuntimeError(
                f"pin_memory: {pages} bytes cannot be page-locked ({error}): raise the limit, see `ulimit -l`"
            )
        self._num_bytes[address] = pages
        return flat[: num_elem * dtype.itemsize].view(dtype)

    def free_cpu_locked_tensor(self, locked_tensor: Tensor) -> bool:
        return self.free_cpu_locked_tensor_by_ptr(locked_tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Unlock a region. Its tensors stay valid. False: it is not, or no more, a locked one."""
        num_bytes = self._num_bytes.pop(address, None)
        if num_bytes is None:
            return False
        return not _libc().munlock(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))

    def is_pinned(self, buffer: Tensor) -> bool:
        begin = buffer.data_ptr()
        return any(at <= begin < at + size for at, size in self._num_bytes.items())


@final
class PinMemoryOps:
    """What `PinMemoryBuilder().load()` returns."""

    pin_handle = LockedMemory


__all__ = ["LockedMemory", "PinMemoryOps"]
