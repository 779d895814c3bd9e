"""Locks on open files, which end with the process that holds them."""

from __future__ import annotations

import fcntl


def try_lock(fd: int, *, shared: bool = False) -> bool | None:
    """Lock the file `fd` without waiting. A shared lock excludes only locks that are not shared.

    Returns: whether this process holds the lock now; None where the file system has no locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


__all__ = ["try_lock"]
