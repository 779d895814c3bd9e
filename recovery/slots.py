"""Where a run keeps states in memory that outlives its processes: names of folders. Imports no torch.

    /dev/shm/xds-states-<launcher>-versions/rank3/0    the newest two versions of what rank 3 holds
                                                 /1
    /dev/shm/xds-states-<launcher>-<random>            what a rank has written for a new process

All names have the process id of the launcher, which removes the folders when the run ends. Its guard process
does so if the launcher is killed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_PREFIX = "xds-states-"


def _parent() -> Path:
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def all_folders(launcher_pid: int) -> str:
    """A pattern of the names of all folders of a run."""
    return str(_parent() / f"{_PREFIX}{launcher_pid}-*")


def new_folder() -> Path:
    """An empty folder, for a rank of the launcher."""
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getppid()}-", dir=_parent()))


def versions_folder(rank: int) -> Path:
    """The folder of the versions of `rank`, which may not exist yet, for a rank of the launcher."""
    return _parent() / f"{_PREFIX}{os.getppid()}-versions" / f"rank{rank}"


__all__ = ["all_folders", "new_folder", "versions_folder"]
