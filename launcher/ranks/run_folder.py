"""The folder in which the ranks of one run leave their output and their last words, on each host.

Only the user may read it: what a script prints can hold anything. The newest runs stay; an older one goes when
the next begins, unless it is still going on: then its launcher holds the lock on `running`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from ...ops.build.build_cache import default_folder
from ...utils.trust import make_folders, why_not_trusted

_RUNS_KEPT = 20
_DAY_SECONDS = 86400.0
_NAME = re.compile(r"\d{8}-\d{6}-(.+)")  # when it began, and of which run it is
_LOCK = "running"
_LOG_MODE = 0o600
_PASSING = (".ended", ".grace", ".out", ".err")
_LAST_WORDS = (".error.json", ".fault.txt", ".ended", ".grace")


@final
class RunFolder:
    """Names the files of each rank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ranks: set[int] = set()  # of this host

    def log(self, rank: int) -> Path:
        """Everything it printed, of every start."""
        return self.path / f"rank{rank}.log"

    def error(self, rank: int) -> Path:
        return self.path / f"rank{rank}.error.json"

    def fault(self, rank: int) -> Path:
        return self.path / f"rank{rank}.fault.txt"

    def ended(self, rank: int) -> Path:
        """There once the rank's script has ended well."""
        return self.path / f"rank{rank}.ended"

    def grace(self, rank: int) -> Path:
        """Holds the seconds that the rank wants between SIGTERM and SIGKILL."""
        return self.path / f"rank{rank}.grace"

    def prepare(self, ranks: Sequence[int], *, is_first: bool) -> None:
        """Rid `ranks` of an earlier start's last words, and before the first start of old logs."""
        self.ranks |= set(ranks)
        for rank in ranks:
            endings = (*_LAST_WORDS, *([".log"] if is_first else []))
            for ending in endings:
                (self.path / f"rank{rank}{ending}").unlink(missing_ok=True)

    def first_error_seconds(self, ranks: Sequence[int]) -> float | None:
        """When the first rank wrote that it failed (wall clock), None while none has."""
        times = []
        for rank in ranks:
            with contextlib.suppress(FileNotFoundError):
                times.append(self.error(rank).stat().st_mtime)
        return min(times, default=None)

    def forget_passing(self, rank: int) -> None:
        """Remove what nobody reads after the end: an empty fault file, marks, pipes."""
        fault = self.fault(rank)
        with contextlib.suppress(OSError):
            if not fault.stat().st_size:
                fault.unlink()
        for ending in _PASSING:
            (self.path / f"rank{rank}{ending}").unlink(missing_ok=True)

    def grace_seconds(self) -> float:
        """The longest time any rank asked for, 0 when none did."""
        asked = [0.0]
        for file in self.path.glob("rank*.grace"):
            with contextlib.suppress(OSError, ValueError):
                asked.append(float(file.read_text()))
        return max(asked)


@contextlib.contextmanager
def run_folder(asked: str, run_id: str = "") -> Iterator[RunFolder]:
    """The folder asked for, or one of this run under the cache folder, where the newest stay.

    What stays are logs, and what a rank wrote when it failed.
    """
    if asked:
        path = Path(asked)
        path.mkdir(0o700, parents=True, exist_ok=True)
    else:
        path = _own_folder(run_id)
    folder = RunFolder(path)
    try:
        with contextlib.nullcontext() if asked else _locked(path):
            yield folder
    finally:
        for rank in folder.ranks:  # other hosts may write into the same folder
            folder.forget_passing(rank)
        if not asked:
            with contextlib.suppress(OSError):
                folder.path.rmdir()  # only if nothing was kept


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let no later run take this one for an old one. Hosts that share the folder share the lock."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _LOG_MODE)
    except OSError:
        yield
        return
    with contextlib.suppress(OSError):  # a file system without locks: see _is_over
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # held by another host still: it removes the file
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / _LOCK).unlink()
        os.close(lock)


def _own_folder(run_id: str) -> Path:
    started = time.strftime("%Y%m%d-%H%M%S")
    name = f"{started}-{run_id[:8] or uuid.uuid4().hex[:8]}"
    try:
        runs = default_folder() / "runs"
        make_folders(runs)
        runs.chmod(0o700)
        (runs / name).mkdir(0o700, exist_ok=True)
        is_ours = not why_not_trusted(runs / name)
    except OSError:  # no home, or read-only
        is_ours = False
    if not is_ours:  # or somebody else may lay links there, which we would write through
        return Path(tempfile.mkdtemp(prefix=f"xds-{name}-"))
    with contextlib.suppress(OSError):
        _forget_old_runs(runs)
    return runs / name


def _forget_old_runs(runs: Path) -> None:
    """Remove runs beyond the newest, unless they go on. Hosts that share the folder have one each for a run."""
    found: dict[str, list[Path]] = {}  # by run, the newest first
    for path in sorted(runs.iterdir(), reverse=True):
        match = _NAME.fullmatch(path.name)
        if match is not None and path.is_dir():
            found.setdefault(match[1], []).append(path)
    for paths in list(found.values())[_RUNS_KEPT:]:
        for path in paths:
            with contextlib.suppress(OSError):
                if _is_over(path):
                    shutil.rmtree(path)


def _is_over(folder: Path) -> bool:
    """Whether no launcher holds its lock; where there are no locks, whether nothing was written for a day."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:  # it came to its end
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        newest = max(file.stat().st_mtime for file in (folder, *folder.iterdir()))
        return time.time() - newest > _DAY_SECONDS
    finally:
        os.close(lock)
    return True
