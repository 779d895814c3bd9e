"""Allocates host memory of exact size for copies to and from a device, and for direct I/O.

torch's own pinned allocator rounds sizes up to a power of two: 33 GiB of states would take 64 GiB.
Here the memory is an anonymous mapping that is registered with CUDA.
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
from typing import Any

import torch
from torch import Tensor

from ..utils.errors import UsageError
from ..utils.sizes import size_text


class PageableWarning(UserWarning):
    """Host memory cannot be pinned. Copies to and from the device are slower."""


def host_memory(num_bytes: int, *, pin: bool) -> Tensor:
    """Zeroed host memory: a uint8 tensor of shape [num_bytes], aligned to a page.

    The memory is freed with the last tensor of the storage. It does not exist in forked processes.
    Args:
        pin: register the memory with CUDA. Ignored where CUDA is not available. If the registration
            fails, the memory is pageable, and the process warns once.
    Raises:
        UsageError: the system has too little memory.
    """
    assert num_bytes >= 0
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return tensor_over(_mapped(num_bytes), num_bytes, pin=pin)


def tensor_over(mapping: mmap.mmap, num_bytes: int, *, pin: bool) -> Tensor:
    """The memory of `mapping`: a uint8 tensor of shape [num_bytes], at least 1. It keeps the mapping.

    pin: as in `host_memory`.
    """
    # torch keeps this array, and the array keeps the mapping, which cannot be closed meanwhile
    array = (ctypes.c_ubyte * num_bytes).from_buffer(mapping)
    address = ctypes.addressof(array)
    is_pinned = pin and torch.cuda.is_available() and _register(address, num_bytes)
    device = torch.cuda.current_device() if is_pinned else None
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


def _release(mapping: mmap.mmap, address: int, device: int | None, pid: int) -> None:
    """Unregister the memory from `device`. The mapping ends with the last reference, the caller's."""
    if os.getpid() != pid:
        # A forked process has no such mapping; something else may be at the address. So never unmap it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
    elif device is not None:
        # Any thread may be the last to use the memory. The current device of a new thread is device 0,
        # where a call of CUDA would allocate a context.
        with suppress(RuntimeError), torch.cuda.device(device):  # an earlier error of the device
            torch.cuda.synchronize()  # copies from or to this memory may be in flight
        with torch.cuda.device(device):
            _runtime().cudaHostUnregister(address)


def _register(address: int, num_bytes: int) -> bool:
    """Whether CUDA has registered the memory; otherwise the process has warned once."""
    runtime = _runtime()
    code = runtime.cudaHostRegister(address, num_bytes, 0)
    if int(code) == 0:
        return True
    # The runtime returns the error once more after the next launch of a kernel in this thread.
    with suppress(RuntimeError, AssertionError):  # AssertionError: torch without CUDA
        torch.ones(1, device="cuda")
    if next(_failures()) == 0:
        warnings.warn(_failure_text(runtime, code, num_bytes), PageableWarning, stacklevel=3)
    return False


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@cache
def _failures() -> Iterator[int]:
    """Counts the failed registrations of this process: 0, 1, 2, ..."""
    return count()


def _failure_text(runtime: Any, code: Any, num_bytes: int) -> str:
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit_bytes == resource.RLIM_INFINITY
    limit = "unlimited" if unlimited else f"{limit_bytes // 1024} KiB"
    remedy = "free memory of the host" if unlimited else "raise it (ulimit -l unlimited)"
    return (
        f"xds: cannot pin {size_text(num_bytes)} of host memory "
        f"({runtime.cudaGetErrorString(code)}; the limit of locked memory, ulimit -l, is {limit}): "
        f"copies to and from the device will be slower; {remedy}, or set pin_memory to false"
    )
