"""This process's segment: memory that the other ranks of its machine can read.

    /proc/PID/fd/N ── mapped by peers of the same user
    [ control | data ............................................. ]   as large as the machine's memory,
              | messages and tensors, at the first place that fits     of which pages exist once they are used

The file has no name: a memfd, or a file in /dev/shm that is deleted before anything is in it. So it ends with
the last process that maps it, however that ends.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import secrets
import tempfile
import threading
import weakref
from contextlib import suppress
from ctypes import c_char_p, c_int, c_int64, c_uint64, c_void_p
from typing import Any, final

import torch
from torch import Tensor

from ....utils.errors import BuildError
from ... import libraries

SHM_FOLDER = "/dev/shm"
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
LEAST_SHARE = (
    0.25  # of the machine's memory, that must be free in SHM_FOLDER where there is no memfd
)
LEAST_BYTES = 1 << 16  # smaller tensors are copied when they are sent

# -- the native functions that post and read messages in shared memory (ops/csrc/memory) ---------------------

DONE, PENDING, ENDED, LEFT, SIZE_DIFFERS, NO_MEMORY = range(6)

_ARGUMENTS: dict[str, tuple[Any, tuple[Any, ...]]] = {  # name -> result, arguments
    "map": (c_void_p, (c_int, c_uint64, c_uint64, c_int)),
    "unmap": (None, (c_void_p, c_uint64)),
    "control_bytes": (c_uint64, ()),
    "open": (None, (c_int, c_void_p, c_void_p, c_uint64, c_uint64, c_uint64, c_uint64)),
    "stop": (None, ()),
    "find_peer": (c_void_p, (c_uint64, c_uint64)),
    "open_peer": (c_void_p, (c_void_p, c_void_p, c_uint64, c_int, c_int, c_uint64, c_uint64)),
    "release_peer": (None, (c_void_p,)),
    "open_group": (c_void_p, (c_uint64, c_int, c_int, c_void_p)),
    "leave_group": (None, (c_void_p,)),
    "close_group": (None, (c_void_p,)),
    "first_reader": (c_int, (c_void_p,)),
    "allocate": (c_int64, (c_uint64,)),
    "free": (None, (c_uint64, c_uint64)),
    "all_gather": (c_void_p, (c_void_p, c_uint64, c_void_p, c_void_p, c_uint64)),
    "gather_parts": (c_void_p, (c_void_p, c_uint64, c_void_p, c_uint64, c_int, c_void_p)),
    "sum": (
        c_void_p,
        (c_void_p, c_uint64, c_void_p, c_int64, *(c_int,) * 5, c_void_p),
    ),
    "transfer": (c_void_p, (c_void_p, c_uint64, c_int, c_void_p, c_int, c_void_p)),
    "wait": (c_int, (c_void_p, c_int64, c_int64, c_int)),
    "about": (c_int, (c_void_p,)),
    "status": (c_int, (c_void_p,)),
    "progress": (None, ()),
    "end": (None, (c_void_p,)),
    "explain_writes": (None, (c_void_p, c_uint64, c_char_p)),
    "forget_writes": (None, (c_void_p,)),
}


@final
class Native:
    """The functions as attributes, without their prefix.

    They release the interpreter's lock. `quick` has the same functions, which keep it: taking the lock again
    can take longer than they do.
    """

    def __init__(self) -> None:
        """Raises BuildError: the library cannot be built or loaded on this machine."""
        library = libraries.open_plain("memory")
        self._declare(self, library)
        self.quick = Quick(ctypes.PyDLL(library._name))

    @staticmethod
    def _declare(target: object, library: ctypes.CDLL) -> None:
        for name, (result, arguments) in _ARGUMENTS.items():
            function = getattr(library, f"xds_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(target, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@final
class Quick:
    """The functions of `Native`, which keep the interpreter's lock."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        Native._declare(self, library)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


# -- the segment --------------------------------------------------------------------------------------------


class NoSegment(Exception):
    """This process has no shared memory. The text is the reason."""


@final
class Segment:
    """The segment of one process.

    Attributes:
        token: Identifies it.
        fd: Its file.
        dropped: Operations for which nobody waits, with their memory, until they are done.
        interrupted: Memory of operations that have no handle, because a signal came in between. An engine that
            ends leaves both here.
    """

    def __init__(self, native: Native) -> None:
        """Raises NoSegment."""
        self.native = native
        self.pid = os.getpid()
        self.dropped: list[tuple[int, Any]] = []
        self.interrupted: list[Any] = []
        self.forgetting = threading.Lock()  # a thread looks for those that are done
        self.size_bytes = _memory_bytes()
        self.fd, self._is_limited = open_file(self.size_bytes)
        self.control_bytes = int(native.control_bytes())
        self.token = (secrets.randbits(64), secrets.randbits(64))
        if self._is_limited:
            reserve(self.fd, 0, self.control_bytes)
        data_bytes = self.size_bytes - self.control_bytes
        control = native.map(self.fd, 0, self.control_bytes, True)
        self._data = native.map(self.fd, self.control_bytes, data_bytes, True)
        if not control or not self._data:
            os.close(self.fd)
            raise NoSegment(
                f"{self.size_bytes >> 30} GiB of addresses cannot be mapped (ulimit -v)"
            )
        reserve_from = self.control_bytes if self._is_limited else 0
        native.open(self.fd, control, self._data, data_bytes, reserve_from, *self.token)
        atexit.register(self._stop)

    @property
    def why_full(self) -> str:
        """The reason why there is no room for another message, and a remedy."""
        if not self._is_limited:
            return f"{self.size_bytes >> 30} GiB of shared memory are in use"
        return (
            f"{SHM_FOLDER} is full; free a part of it, start the container with a larger one (--shm-size), or "
            'set "communication": {"shared_memory": false}'
        )

    def _stop(self) -> None:
        if os.getpid() == self.pid:
            self.native.stop()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory [numel] that peers can read, if it is at least `LEAST_BYTES` and there is room."""
        size_bytes = numel * dtype.itemsize
        place = self._take(size_bytes) if size_bytes >= LEAST_BYTES else None
        return (
            torch.empty(numel, dtype=dtype)
            if place is None
            else torch.frombuffer(place, dtype=dtype)
        )

    def _take(self, size_bytes: int) -> Any:
        """Allocate a block, which is freed with the returned object. None: there is no room."""
        offset = self.native.allocate(size_bytes)
        if offset < 0:
            return None
        if self._is_limited:  # without room the first write would end the process
            try:
                reserve(self.fd, self.control_bytes + offset, size_bytes)
            except NoSegment:
                self._free(offset)
                return None
        place = (ctypes.c_uint8 * size_bytes).from_address(self._data + offset)
        weakref.finalize(place, self._free, offset).atexit = False
        return place

    def _free(self, offset: int) -> None:
        if os.getpid() == self.pid:  # a forked child has only a view of it
            self.native.quick.free(offset, self.control_bytes + offset)


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def open_file(size_bytes: int) -> tuple[int, bool]:
    """Open a new file without a name. Returns its number, and whether its folder limits its size."""
    fd, is_limited = -1, False
    try:
        try:
            fd = _memfd()
        except (AttributeError, OSError):
            fd, is_limited = _open_in_folder(), True
        os.fchmod(fd, 0o600)
        os.truncate(fd, size_bytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise NoSegment(
            f"a file of {size_bytes >> 30} GiB cannot be made in memory: {error}"
        ) from error
    if not is_limited:
        _seal(fd)
    return fd, is_limited


def _memfd() -> int:
    """Open a memfd. Raises AttributeError or OSError where the system has none."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("xds", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    libc = ctypes.CDLL(None, use_errno=True)  # a Python that was built on an older system
    fd = int(libc.memfd_create(b"xds", _MFD_CLOEXEC | _MFD_ALLOW_SEALING))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "memfd_create")
    return fd


def _open_in_folder() -> int:
    free_bytes, need_bytes = _free_bytes(), int(LEAST_SHARE * _memory_bytes())
    if free_bytes < need_bytes:
        raise NoSegment(
            f"this system has no memfd, and {SHM_FOLDER} has {free_bytes >> 20} MiB free of the "
            f"{need_bytes >> 20} MiB that are needed: start the container with a larger one (--shm-size)"
        )
    fd, path = tempfile.mkstemp(dir=SHM_FOLDER, prefix="xds-")
    os.unlink(path)
    return fd


def _free_bytes() -> int:
    file_system = os.statvfs(SHM_FOLDER)
    return file_system.f_bavail * file_system.f_frsize


def reserve(fd: int, offset: int, size_bytes: int) -> None:
    """Reserve bytes of the file. Raises NoSegment where there is no room."""
    try:
        os.posix_fallocate(fd, offset, size_bytes)
    except OSError as error:
        raise NoSegment(
            f"{SHM_FOLDER} is full ({errno.errorcode.get(error.errno or 0)})"
        ) from error


def _seal(fd: int) -> None:
    """Let nobody shorten the file, because that would end the processes that read it."""
    import fcntl

    with suppress(AttributeError, OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


# by process: peers find one segment, in which all engines have their tensors. A forked child opens its own
_opened: dict[int, Segment | str] = {}
_opening: dict[int, threading.Lock] = {}


def segment() -> Segment:
    """Return the segment of this process, opened on first use. Raises NoSegment, always with the same text."""
    pid = os.getpid()
    with _opening.setdefault(pid, threading.Lock()):  # a process has one
        found = _opened.get(pid)
        if found is None:
            found = _opened[pid] = _open()
    if isinstance(found, str):
        raise NoSegment(found)
    return found


def _open() -> Segment | str:
    try:
        return Segment(Native())
    except BuildError as error:
        return f"its native library is missing: {error.what}"
    except NoSegment as error:
        return str(error)


__all__ = ["NoSegment", "Segment", "open_file", "reserve", "segment"]
