"""The run folder: holds the output and the failure records of the ranks of one run, on each host.

Only the user may read it, because a script may print secrets. The newest runs are kept. An older one is removed
when the next run begins, unless its launcher still holds the lock on the file `running`.
"""

from __future__ import annotations

import contextlib
import json
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
from ...utils.errors import UsageError
from ...utils.quoting import printable
from ...utils.small_files import try_lock
from ...utils.trust import make_folders, why_not_trusted

_RUNS_KEPT = 20
_DAY_SECONDS = 86400.0
_NAME = re.compile(r"\d{8}-\d{6}-(.+)")  # start time and run id
_LOCK = "running"
_LOG_MODE = 0o600
_MOST_CHARS = 4000
_RECORD = "record"  # names the record of the run, see engine/telemetry/record.py
_TEMPORARY_FILES = (".ended", ".grace", ".out", ".err")
_FAILURE_FILES = (".error.json", ".fault.txt", ".ended", ".grace")


@final
class RunFolder:
    """The paths of each rank's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ranks: set[int] = set()  # of this host
        self.log_begins: dict[int, int] = {}  # where this start's output begins in each log

    def log(self, rank: int) -> Path:
        """The rank's output, of all starts."""
        return self.path / f"rank{rank}.log"

    def error(self, rank: int) -> Path:
        return self.path / f"rank{rank}.error.json"

    def fault(self, rank: int) -> Path:
        return self.path / f"rank{rank}.fault.txt"

    def ended(self, rank: int) -> Path:
        """Exists once the rank's script has ended successfully."""
        return self.path / f"rank{rank}.ended"

    def grace(self, rank: int) -> Path:
        """Holds the seconds that the rank needs between SIGTERM and SIGKILL."""
        return self.path / f"rank{rank}.grace"

    def prepare(self, ranks: Sequence[int], *, is_first: bool) -> None:
        """Remove the failure records of an earlier start, and before the first start also old logs."""
        self.ranks = self.ranks | set(ranks)  # another thread may read the former set
        if is_first and 0 in ranks:
            (self.path / _RECORD).unlink(missing_ok=True)
        for rank in ranks:
            endings = (*_FAILURE_FILES, *([".log"] if is_first else []))
            for ending in endings:
                (self.path / f"rank{rank}{ending}").unlink(missing_ok=True)
            log = self.log(rank)
            self.log_begins[rank] = log.stat().st_size if log.exists() else 0

    def first_error_seconds(self, ranks: Sequence[int]) -> float | None:
        """When the first rank wrote its failure record (wall clock); None if there is none."""
        times = []
        for rank in ranks:
            with contextlib.suppress(FileNotFoundError):
                times.append(self.error(rank).stat().st_mtime)
        return min(times, default=None)

    def record(self, failure: str) -> None:
        """Append why ranks have ended to the record of the run, if rank 0 writes one."""
        with contextlib.suppress(OSError, ValueError):
            with open((self.path / _RECORD).read_text(), "a") as file:
                line = {"kind": "failure", "time": time.time(), "text": failure[:_MOST_CHARS]}
                file.write(f"\n{json.dumps(line)}\n")  # rank 0 may have written half a line

    def remove_temporary_files(self, rank: int) -> None:
        """Remove files that are not needed after the end: an empty fault file, markers, pipes."""
        fault = self.fault(rank)
        with contextlib.suppress(OSError):
            if not fault.stat().st_size:
                fault.unlink()
        for ending in _TEMPORARY_FILES:
            (self.path / f"rank{rank}{ending}").unlink(missing_ok=True)

    def grace_seconds(self) -> float:
        """The longest time that any rank requested; 0 if none did."""
        requested = [0.0]
        for file in self.path.glob("rank*.grace"):
            with contextlib.suppress(OSError, ValueError):
                requested.append(float(file.read_text()))
        return max(requested)


@contextlib.contextmanager
def run_folder(log_dir: str, run_id: str = "") -> Iterator[RunFolder]:
    """The folder `log_dir`, or else a new folder for this run under the cache folder.

    Logs and failure records are kept after the run.

    Raises:
        UsageError: `log_dir` cannot be created or written.
    """
    if log_dir:
        path = _given_folder(log_dir)
    else:
        path = _own_folder(run_id)
    folder = RunFolder(path)
    try:
        with contextlib.nullcontext() if log_dir else _locked(path):
            yield folder
    finally:
        for rank in folder.ranks:  # other hosts may write into the same folder
            folder.remove_temporary_files(rank)
        if not log_dir:
            with contextlib.suppress(OSError):
                folder.path.rmdir()  # succeeds only if it is empty


def _given_folder(log_dir: str) -> Path:
    path = Path(log_dir)
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--log-dir = {printable(log_dir)}: {reason}; name a folder that can be created and written"
        ) from None
    return path


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Prevent later runs from removing this folder. Hosts that share the folder share the lock."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _LOG_MODE)
    except OSError:
        yield
        return
    try_lock(lock, shared=True)
    try:
        yield
    finally:
        if try_lock(lock):  # else another host still holds it, and removes the file later
            with contextlib.suppress(OSError):
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
    except OSError:  # no home folder, or read-only
        is_ours = False
    if not is_ours:  # another user could place links there, and we would write through them
        return Path(tempfile.mkdtemp(prefix=f"xds-{name}-"))
    with contextlib.suppress(OSError):
        _remove_old_runs(runs)
    return runs / name


def _remove_old_runs(runs: Path) -> None:
    """Remove all but the newest runs, unless they are running. Each host of a run has its own folder."""
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
    """Whether no launcher holds the lock; without support for locks, whether nothing was written for a day."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:  # the run has ended
        return True
    try:
        is_free = try_lock(lock)
    finally:
        os.close(lock)
    if is_free is None:
        newest = max(file.stat().st_mtime for file in (folder, *folder.iterdir()))
        return time.time() - newest > _DAY_SECONDS
    return is_free
