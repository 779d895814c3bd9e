"""Allocates host memory of exact size for copies to and from a device, and for direct I/O.

torch's own pinned allocator rounds sizes up to a power of two: 33 GiB of states would take 64 GiB.
Here the memory is an anonymous mapping that is registered with the device. Where that is not possible, torch
pins it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import count

import torch
from torch import Tensor

from ..ops.device import Device, present
from ..utils.errors import UsageError
from ..utils.sizes import size_text


class PageableWarning(UserWarning):
    """Host memory cannot be pinned. Copies to and from the device are slower."""


def host_memory(num_bytes: int, *, pin: bool) -> Tensor:
    """Zeroed host memory: a uint8 tensor of shape [num_bytes], aligned to a page.

    The memory is freed with the last tensor of the storage. It does not exist in forked processes.
    Args:
        pin: page-lock the memory. Ignored where no device reads that faster. If it fails, the memory is
            pageable, and the process warns once.
    Raises:
        UsageError: the system has too little memory.
    """
    assert num_bytes >= 0
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if pin and present().pins_memory and not present().registers_memory:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    return tensor_over(_mapped(num_bytes), num_bytes, pin=pin)


def tensor_over(mapping: mmap.mmap, num_bytes: int, *, pin: bool) -> Tensor:
    """The memory of `mapping`: a uint8 tensor of shape [num_bytes], at least 1. It keeps the mapping.

    pin: as in `host_memory`; ignored where the device cannot register memory.
    """
    # torch keeps this array, and the array keeps the mapping, which cannot be closed meanwhile
    array = (ctypes.c_ubyte * num_bytes).from_buffer(mapping)
    address = ctypes.addressof(array)
    device = present() if pin else None
    if device is not None and not _is_registered(device, address, num_bytes):
        device = None
    # an mmap object unmaps before its own finalizers run; this one runs first, and holds the mapping
    end = weakref.finalize(array, _release, mapping, address, device, os.getpid())
    end.atexit = False  # tensors may still be in use then, and the system frees everything
    return torch.frombuffer(array, dtype=torch.uint8)


def _mapped(num_bytes: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise UsageError(
            f"cannot allocate {size_text(num_bytes)} of host memory for offloading "
            f"({error.strerror}); use more hosts, or a smaller model"
        ) from None
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    # After a fork the first write to a page would move it away from the device's registration.
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def _release(mapping: mmap.mmap, address: int, device: Device | None, pid: int) -> None:
    """Unregister the memory from `device`. The mapping ends with the last reference, the caller's."""
    if os.getpid() != pid:
        # A forked process has no such mapping; something else may be at the address. So never unmap it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
    elif device is not None:
        device.unregister(address)


def _is_registered(device: Device, address: int, num_bytes: int) -> bool:
    """Whether the device has registered the memory now; where it refuses, the process has warned once."""
    if not device.registers_memory:
        return False
    error = device.register(address, num_bytes)
    if error and next(_failures()) == 0:
        warnings.warn(_failure_text(error, num_bytes), PageableWarning, stacklevel=3)
    return not error


@cache
def _failures() -> Iterator[int]:
    """Counts the failed registrations of this process: 0, 1, 2, ..."""
    return count()


def _failure_text(error: str, num_bytes: int) -> str:
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit_bytes == resource.RLIM_INFINITY
    limit = "unlimited" if unlimited else f"{limit_bytes // 1024} KiB"
    remedy = "free memory of the host" if unlimited else "raise it (ulimit -l unlimited)"
    return (
        f"xds: cannot pin {size_text(num_bytes)} of host memory "
        f"({error}; the limit of locked memory, ulimit -l, is {limit}): "
        f"copies to and from the device will be slower; {remedy}, or set pin_memory to false"
    )
