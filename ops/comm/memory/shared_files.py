"""Opens flat buffers that the ranks of a machine have in common: a file without a name, mapped by each of them.

The first rank makes the file. The others open it as /proc/PID/fd/N. Then all close it: the memory ends with the
last process that maps it, however that ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import weakref
from typing import Any

import torch
from torch import Tensor

from ..backend import Gather, SharedFlat
from .peers import Neighbours
from .segment import Native, NoSegment, open_file, reserve

PAGE_BYTES = 4096


def open_shared(
    neighbours: Neighbours, rank: int, gather: Gather, numel: int, dtype: torch.dtype, text: str
) -> SharedFlat | None:
    """Open a flat buffer [numel] for all ranks of a group. **Collective.** None if one of them cannot have it.

    Args:
        gather: Gathers a few numbers of every rank.
        text: Is printed when a script writes to `values`.
    """
    filler = neighbours.ranks[0]
    size_bytes = -(-numel * dtype.itemsize // PAGE_BYTES) * PAGE_BYTES
    file = _new_file(size_bytes) if rank == filler else -1
    try:
        mine = [os.getpid(), file, *_identity(file)]
        pid, number, *identity = gather(torch.tensor(mine))[filler].tolist()
        if rank != filler and number >= 0:
            file = _open(int(pid), int(number), identity)
        addresses = _map(neighbours.segment.native, file, size_bytes) if file >= 0 else None
        have_all = gather(torch.tensor([addresses is not None])).all()
    finally:
        if file >= 0:
            os.close(file)
    if addresses is None:
        return None
    native = neighbours.segment.native
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # first: so the line of the script follows the text
    native.explain_writes(addresses[0], size_bytes, text.encode())
    values, writable = (
        _tensor(native, address, size_bytes, numel, dtype, explained=explained)
        for address, explained in zip(addresses, (True, False), strict=True)
    )
    if not have_all:
        return None
    return SharedFlat(values, writable, len(neighbours.ranks), is_filler=rank == filler)


def _new_file(size_bytes: int) -> int:
    """Open a file without a name. -1: there is no memory for it."""
    try:
        file, is_limited = open_file(size_bytes)
    except NoSegment:
        return -1
    try:
        if is_limited:
            reserve(file, 0, size_bytes)
    except NoSegment:
        os.close(file)
        return -1
    return file


def _identity(file: int) -> tuple[int, int]:
    if file < 0:
        return 0, 0
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def _open(pid: int, number: int, identity: list[int]) -> int:
    """Open the file `number` of process `pid`. -1: it cannot be opened."""
    try:
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return -1
    if list(_identity(file)) != identity:
        os.close(file)
        return -1
    return file


def _map(native: Native, file: int, size_bytes: int) -> tuple[int, int] | None:
    """Map the file to read and to write, and return both addresses. None: there are no addresses left."""
    reads = native.map(file, 0, size_bytes, False)
    writes = native.map(file, 0, size_bytes, True)
    if reads and writes:
        return int(reads), int(writes)
    for address in filter(None, (reads, writes)):
        native.unmap(address, size_bytes)
    return None


def _tensor(
    native: Native,
    address: int,
    size_bytes: int,
    numel: int,
    dtype: torch.dtype,
    *,
    explained: bool,
) -> Tensor:
    """Return the memory at `address` as a tensor, which unmaps it at its end."""
    place: Any = (ctypes.c_uint8 * size_bytes).from_address(address)
    weakref.finalize(place, _unmap, native, address, size_bytes, explained=explained).atexit = False
    return torch.frombuffer(place, dtype=dtype, count=numel)


def _unmap(native: Native, address: int, size_bytes: int, *, explained: bool) -> None:
    if explained:
        native.forget_writes(address)
    native.unmap(address, size_bytes)


__all__ = ["open_shared"]
