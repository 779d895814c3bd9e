"""What is said about a file system that refuses or fails: the call, the place, the reason, the remedy."""

from __future__ import annotations

import errno
from pathlib import Path

from ...utils.errors import UsageError, XdsError
from ...utils.sizes import size_text

_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ANOTHER = "set nvme_path to a folder on another disk"
_REMEDIES = {
    errno.EIO: f"the disk is failing: look at the kernel log (dmesg), or {_ANOTHER}",
    **dict.fromkeys(_IS_FULL, f"free space there, {_ANOTHER}, or use more ranks"),
    errno.EACCES: "give this user the right to write there, or set nvme_path to another folder",
    errno.EPERM: "give this user the right to write there, or set nvme_path to another folder",
    errno.ENOENT: f"the folder cannot be created there: {_ANOTHER}",
    errno.EROFS: f"the file system is read-only: {_ANOTHER}",
    errno.ENOTDIR: "set nvme_path to a folder",
    errno.EEXIST: "set nvme_path to a folder",
    errno.ENOTCONN: f"its file system was unmounted or lost: mount it again, or {_ANOTHER}",
    errno.ESTALE: f"its file system was unmounted or lost: mount it again, or {_ANOTHER}",
    errno.ENODEV: f"its disk was removed: look at the kernel log (dmesg), or {_ANOTHER}",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def transfer_failed(
    error: OSError, operation: str, num_bytes: int, offset: int, file: str
) -> XdsError:
    """The error of one block. `operation` is "read" or "write"; `file` is a `DiskFile.label`."""
    return XdsError(
        f"cannot {operation} {num_bytes} bytes at byte {offset} of {file}: {reason(error)}; {remedy(error)}"
    )


def creation_failed(error: OSError, folder: Path, rank: int) -> UsageError:
    """The error of a folder or a file that cannot be created."""
    return UsageError(
        f"nvme_path = {folder}: rank {rank} cannot create its file there: {reason(error)}; {remedy(error)}"
    )


def too_little_space(folder: Path, rank: int, needed_bytes: int, free_bytes: int) -> UsageError:
    """The file system of `folder` cannot hold the file."""
    return UsageError(
        f"nvme_path = {folder}: rank {rank} needs {size_text(needed_bytes)} ({needed_bytes} bytes) there, and "
        f"{size_text(free_bytes)} ({free_bytes} bytes) are free; {_REMEDIES[errno.ENOSPC]}"
    )


def is_full(error: OSError) -> bool:
    """Whether the file system has no space left, for this user or for a file of this size."""
    return error.errno in _IS_FULL


def reason(error: OSError) -> str:
    """ "EIO, Input/output error"."""
    name = errno.errorcode.get(error.errno or 0, f"errno {error.errno}")
    return f"{name}, {error.strerror}"


def remedy(error: OSError) -> str:
    """What to do about it, without a full stop."""
    return _REMEDIES.get(error.errno or 0, f"look at the kernel log (dmesg), or {_ANOTHER}")
