"""Where a run keeps states in memory that outlives its processes: folders and slots. Imports no torch.

    /dev/shm/xds-states-<launcher>-versions/host1/rank3/0    the newest two versions of what rank 3 holds,
                                                       /1    in the memory of host 1
    /dev/shm/xds-states-<launcher>-<random>                  what a rank has written for a new process

All names have the process id of the launcher on this host, which removes the folders when the run ends. Its
guard process does so if the launcher is killed. A version is complete when its slot has the file `step`, which
is removed first and written last. A file that both versions share has its content in its name, and is linked.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import final

_PREFIX = "xds-states-"
NUM_SLOTS = 2
NONE = -1  # instead of a step: there is no version
SHARED = "shared-"  # names of files that versions share begin so
_STEP, _PARTIAL = "step", ".partial"


def _parent() -> Path:
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def all_folders(launcher_pid: int) -> str:
    """A pattern of the names of all folders of a run."""
    return str(_parent() / f"{_PREFIX}{launcher_pid}-*")


def versions_of(launcher_pid: int) -> Path:
    """The folder of all versions in the memory of this host, by the launcher."""
    return _parent() / f"{_PREFIX}{launcher_pid}-versions"


def launchers_with_versions() -> list[int]:
    """The process ids of launchers that have such a folder on this host."""
    found = (path.name.split("-")[2] for path in _parent().glob(f"{_PREFIX}*-versions"))
    return sorted(int(number) for number in found if number.isdecimal())


def are_complete(launcher_pid: int) -> bool:
    """A launcher on this host has left complete versions of all its ranks."""
    ranks = [Slots(path) for path in versions_of(launcher_pid).glob("host*/rank*")]
    return bool(ranks) and all(max(rank.steps) != NONE for rank in ranks)


def has_versions(launcher_pid: int) -> bool:
    """Any rank of a launcher on this host has a complete version."""
    return any(versions_of(launcher_pid).glob(f"host*/rank*/*/{_STEP}"))


def take_over(launcher_pid: int) -> None:
    """In a launcher: its ranks have the versions of the ranks of another one, which was killed."""
    versions_of(launcher_pid).rename(versions_of(os.getpid()))


def new_folder() -> Path:
    """An empty folder, for a rank of the launcher."""
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getppid()}-", dir=_parent()))


def own_host() -> int:
    """The number of this rank's host, by the launcher. Ranks of one host have one memory."""
    return int(os.environ.get("GROUP_RANK", "0"))


def versions_folder(rank: int) -> Path:
    """The folder of versions of `rank` in the memory of this host, for a rank of the launcher."""
    return versions_of(os.getppid()) / f"host{own_host()}" / f"rank{rank}"


def ranks_with_versions() -> list[int]:
    """The ranks of which this host has folders of versions, also those of other hosts."""
    found = versions_folder(0).parent.glob("rank*")
    return sorted(int(path.name.removeprefix("rank")) for path in found)


@final
class Slots:
    """The versions of what one rank holds, in two folders. One process writes them at a time."""

    def __init__(self, folder: Path) -> None:
        """Those that are in the folder are complete, though nobody has checked their bytes."""
        self.folder = folder
        self.paths = [folder / str(number) for number in range(NUM_SLOTS)]
        for path in self.paths:
            path.mkdir(parents=True, exist_ok=True)
        self._steps = [_step_in(path) for path in self.paths]

    @property
    def steps(self) -> list[int]:
        """Of the complete versions, newest first; NONE where there are fewer."""
        return sorted(self._steps, reverse=True)

    def path_of(self, step: int) -> Path:
        """Where a complete version is."""
        return self.paths[self._steps.index(step)]

    def begin(self) -> Path:
        """Where the next version is written, over the older one, which is complete no longer."""
        number = self._steps.index(min(self._steps))
        self._drop(number)
        return self.paths[number]

    def commit(self, path: Path, step: int) -> None:
        """All files of the version of `step` are there."""
        partial = path / f"{_STEP}{_PARTIAL}"
        partial.write_text(str(step))
        partial.rename(path / _STEP)
        self._steps[self.paths.index(path)] = step

    def keep(self, steps: Collection[int]) -> None:
        """Versions of other steps are none any more. Their memory stays for the next ones."""
        for number, step in enumerate(self._steps):
            if step not in steps:
                self._drop(number)

    def drop(self, path: Path) -> None:
        """The version there is none, and another one must not share its files."""
        self._drop(self.paths.index(path))
        for each in files_of(path):
            if each.name.startswith(SHARED):
                each.unlink()

    def drop_after(self, step: int) -> None:
        """Versions after `step` are none any more."""
        self.keep([there for there in self._steps if there <= step])

    def _drop(self, number: int) -> None:
        with suppress(FileNotFoundError):
            (self.paths[number] / _STEP).unlink()
        self._steps[number] = NONE

    def reserve(self, name: str, size_bytes: int) -> None:
        """Take the memory of a file of both versions now. Raises OSError: there is too little."""
        for path in self.paths:
            descriptor = os.open(path / name, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size_bytes)
            finally:
                os.close(descriptor)

    # -- files that versions share ----------------------------------------------------------------------

    def reserve_shared(self, size_bytes: int) -> None:
        """Take the memory of a file that versions share. Raises OSError: there is too little."""
        descriptor = os.open(self._reserved, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        finally:
            os.close(descriptor)

    @property
    def _reserved(self) -> Path:
        return self.folder / "reserved"

    def shared(self) -> list[str]:
        """The names of whole files that a version may share."""
        found = {each.name for path in self.paths for each in files_of(path)}
        return sorted(name for name in found if name.startswith(SHARED))

    def begin_shared(self, path: Path, name: str) -> Path:
        """Where a new one of the version in `path` is written."""
        partial = path / f"{name}{_PARTIAL}"
        with suppress(FileNotFoundError):
            self._reserved.rename(partial)
        return partial

    def share(self, path: Path, name: str) -> None:
        """Let the version in `path` have this file, which was written now, or is that of the other version.

        Raises OSError: there is none.
        """
        if (path / f"{name}{_PARTIAL}").exists():
            (path / f"{name}{_PARTIAL}").rename(path / name)
        if not (path / name).exists():
            other = next(each for each in self.paths if each != path)
            os.link(other / name, path / name)

    def remove(self) -> None:
        """No version is needed any more."""
        shutil.rmtree(self.folder, ignore_errors=True)


def files_of(path: Path) -> list[Path]:
    """The files of a version."""
    found = (each for each in path.iterdir() if not each.name.endswith(_PARTIAL))
    return sorted(each for each in found if each.name != _STEP)


def _step_in(path: Path) -> int:
    try:
        return int((path / _STEP).read_text())
    except (FileNotFoundError, ValueError):
        return NONE


__all__ = [
    "NONE",
    "NUM_SLOTS",
    "SHARED",
    "Slots",
    "all_folders",
    "are_complete",
    "files_of",
    "has_versions",
    "launchers_with_versions",
    "new_folder",
    "own_host",
    "ranks_with_versions",
    "take_over",
    "versions_folder",
    "versions_of",
]
