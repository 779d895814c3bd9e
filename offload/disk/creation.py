"""Creates the file of a rank: without a name, with its space reserved, for direct I/O where possible.

A file without a name disappears with its process, also after a SIGKILL.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ...utils.errors import UsageError
from .failures import creation_failed, is_full, too_little_space
from .options import ALIGN_BYTES

log = logging.getLogger("xds")
_DIRECT = getattr(os, "O_DIRECT", 0)
_NAMELESS = getattr(os, "O_TMPFILE", 0)
# What systems say that know no files without a name (O_TMPFILE): old kernels EISDIR or ENOENT
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
# EBADF: the C library would have written to every block instead, see `_reserve`
_NO_RESERVING = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


@final
@dataclass(frozen=True)
class OpenFile:
    """An open file without a name."""

    fd: int  # is not inherited by programs that are started
    is_direct: bool  # whether it bypasses the page cache


def create_file(folder: Path, total_bytes: int, rank: int) -> OpenFile:
    """A new file of `total_bytes` zeros in `folder`, which is created where it is missing.

    total_bytes: a multiple of 4096.
    Raises:
        UsageError: the folder cannot be written to, or has too little space.
    """
    fd = -1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = _open(folder, rank)
        _reserve(fd, folder, total_bytes, rank)
        is_direct = bool(_DIRECT) and _try_direct(fd, total_bytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise creation_failed(error, folder, rank) from error
    except UsageError:
        os.close(fd)
        raise
    if not is_direct:
        log.info("xds: %s has no direct I/O; rank %d uses the page cache", folder, rank)
    return OpenFile(fd, is_direct)


def _open(folder: Path, rank: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    if _NAMELESS:
        try:
            return os.open(folder, flags | _NAMELESS | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno not in _NO_NAMELESS:
                raise
    # A SIGKILL between the two calls leaves an empty file.
    path = folder / f".xds-rank{rank}-{os.getpid()}-{secrets.token_hex(8)}"
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        path.unlink()
    except OSError:
        os.close(fd)
        raise
    return fd


def _reserve(fd: int, folder: Path, total_bytes: int, rank: int) -> None:
    """Reserve the space, so that no later write can lack it."""
    if total_bytes == 0:
        return
    free_bytes = _free_bytes(fd)
    if free_bytes < total_bytes:
        raise too_little_space(folder, rank, total_bytes, free_bytes)
    try:
        # Where a file system cannot reserve, glibc writes to every block, for hours; not with O_APPEND.
        with _flag(fd, os.O_APPEND):
            os.posix_fallocate(fd, 0, total_bytes)
    except OSError as error:
        if is_full(error):  # other ranks reserve at the same time, or a quota is smaller
            with suppress(OSError):
                os.ftruncate(fd, 0)
            raise too_little_space(folder, rank, total_bytes, _free_bytes(fd)) from error
        if error.errno not in _NO_RESERVING:
            raise
        os.ftruncate(fd, total_bytes)


def _free_bytes(fd: int) -> int:
    space = os.fstatvfs(fd)
    if space.f_blocks == 0:  # some network file systems do not say
        return 1 << 62
    return space.f_bavail * space.f_frsize


def _try_direct(fd: int, total_bytes: int) -> bool:
    """Switch on direct I/O and use it once; some file systems refuse only the first call."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _DIRECT)
        if total_bytes:
            page = mmap.mmap(-1, ALIGN_BYTES)  # aligned to a page, zeros
            os.pwritev(fd, [page], 0)
            os.preadv(fd, [page], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)
        return False
    return True


@contextmanager
def _flag(fd: int, flag: int) -> Iterator[None]:
    """Meanwhile the open file has `flag`."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag)
    try:
        yield
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
