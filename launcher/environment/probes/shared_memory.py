"""Whether ranks of this machine can read each other's memory: the file, addresses for it, the native library.

The same conditions as in ops/comm/memory/segment.py, which needs torch. Nothing is built, and no page is used.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
from collections.abc import Iterator

from ....utils.errors import BuildError
from .line import Line, gib

SHM_FOLDER = "/dev/shm"
LEAST_SHARE = (
    0.25  # of the machine's memory, that must be free in SHM_FOLDER where there is no memfd
)
_OTHER_BYTES = 1 << 30  # of addresses, for all else that a rank maps
_LIMITS = (
    ("address space", resource.RLIMIT_AS, "ulimit -v"),
    ("file size", resource.RLIMIT_FSIZE, "ulimit -f"),
)


def shared_memory() -> Iterator[Line]:
    """The conditions, and with a sentence what xds does."""
    size_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fault = _memfd_fault(size_bytes)
    yield Line("memfd", fault or "works")
    for key, kind, command in _LIMITS:
        yield Line(key, f"{_shown(resource.getrlimit(kind)[0])} ({command})")
    why_not, remedy = _why_not(size_bytes, fault)
    if why_not:
        yield Line("shared memory", f"CPU ranks send messages through gloo: {why_not}", remedy)
        return
    found = _max_ranks(size_bytes)
    up_to = f"(up to {found}, for ulimit -v) " if found < math.inf else ""
    place = f"a file in {SHM_FOLDER}, as there is no memfd" if fault else "memfd"
    yield Line("shared memory", f"CPU ranks {up_to}read each other's memory ({place})")


def _memfd_fault(size_bytes: int) -> str:
    """Why no file as large as the machine's memory can be made; "" if it can."""
    try:
        fd = os.memfd_create("xds-env", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        return f"missing, {_text(error)}"
    try:
        os.truncate(fd, size_bytes)
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"a file of {gib(size_bytes)} cannot be used, {_text(error)}"
    finally:
        os.close(fd)
    return ""


def _text(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _why_not(size_bytes: int, fault: str) -> tuple[str, str]:
    """Why ranks do not share memory here, and the remedy; "" if they do."""
    library = _library_fault()
    if library:
        return f"the native library is missing: {library}", "see `xds ops build memory`"
    if fault and not fault.startswith("missing"):
        return fault, "`ulimit -f unlimited`, and mount /proc"
    if fault:
        free_bytes, need_bytes = _free_bytes(), int(LEAST_SHARE * size_bytes)
        if free_bytes < need_bytes:
            found = f"no memfd, and {SHM_FOLDER} has {gib(free_bytes)} free of {gib(need_bytes)}"
            return found, "a newer kernel, or start the container with a larger --shm-size"
    if _max_ranks(size_bytes) < 2:
        limit = _shown(resource.getrlimit(resource.RLIMIT_AS)[0])
        needs = f"a rank needs addresses for {gib(size_bytes)} times the number of ranks"
        return f"{needs}, and may use {limit}", "`ulimit -v unlimited`"
    return "", ""


def _free_bytes() -> int:
    try:
        return shutil.disk_usage(SHM_FOLDER).free
    except OSError:
        return 0


def _max_ranks(size_bytes: int) -> float:
    """A rank maps its own segment and those of its peers, each as large as the machine's memory."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return math.inf
    return (limit - _OTHER_BYTES) // size_bytes


def _library_fault() -> str:
    """Why the native library can neither be loaded nor built; "" if it can. Nothing is built."""
    from ....ops import libraries
    from ....ops.build import build

    try:
        build.find(libraries.LIBRARIES["memory"])
    except BuildError as error:
        return error.what
    return ""


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else gib(limit)


__all__ = ["LEAST_SHARE", "SHM_FOLDER", "shared_memory"]
