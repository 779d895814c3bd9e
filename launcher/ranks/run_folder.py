"""The run folder: holds the output and the failure records of the ranks of one run, on each host.

Only the user may read it, because a script may print secrets. The newest runs are kept. An older one is removed
when the next run begins, unless its launcher still holds the lock on the file `running`.

Other users may write to the folder of `--log-dir`, and other runs may use it. So it only has the logs: the run
folder has a link to each open log. Records are copied there after the end, and nothing there is ever read.

    run folder  rank1.log -> /proc/PID/fd/9   rank1.error.json   rank1.ended
                     |                              | at the end
    --log-dir   rank1.log (new, locked)       rank1.error.json (new)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from ...ops.build.build_cache import default_folder
from ...utils.errors import UsageError
from ...utils.quoting import printable
from ...utils.small_files import open_no_link, try_lock
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
_RECORD_FILES = (".error.json", ".fault.txt", ".collectives.json")  # a user may read them
_LOCK_PATIENCE_SECONDS = 5.0  # ranks may move from one host of a run to another
_TICK_SECONDS = 0.1


@final
class RunFolder:
    """The paths of each rank's files.

    path: the run's folder, which no other user may change. log_dir: the folder that the user named, if any.
    began_seconds: the clock at the start of the launcher.
    """

    def __init__(self, path: Path, log_dir: Path | None = None) -> None:
        self.path = path
        self.began_seconds = time.time()
        self.log_dir = log_dir
        self.ranks: set[int] = set()  # of this host
        self.log_begins: dict[int, int] = {}  # where this start's output begins in each log
        self._opened: dict[int, int] = {}  # descriptors of the logs in `log_dir`

    def log(self, rank: int) -> Path:
        """The rank's output, of all starts."""
        return self.path / f"rank{rank}.log"

    def shown(self) -> Path:
        """The folder of the logs, for messages."""
        return self.path if self.log_dir is None else self.log_dir

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
        """Remove the failure records of an earlier start, and before the first start also old logs.

        Raises:
            UsageError: another run writes a log of these ranks in `log_dir`, or it cannot be replaced.
        """
        self.ranks = self.ranks | set(ranks)  # another thread may read the former set
        if is_first and 0 in ranks:
            (self.path / _RECORD).unlink(missing_ok=True)
        for rank in set(self._opened) - set(ranks):
            self._close_log(rank)
        for rank in ranks:
            endings = (*_FAILURE_FILES, *([".log"] if is_first else []))
            for ending in endings:
                (self.path / f"rank{rank}{ending}").unlink(missing_ok=True)
            log = self.log(rank)
            if self.log_dir is not None and rank not in self._opened:
                self._opened[rank] = _open_log(self.log_dir, log.name, is_new=is_first)
                log.symlink_to(f"/proc/{os.getpid()}/fd/{self._opened[rank]}")
                if is_first:
                    self._remove_records(self.log_dir, rank)
            self.log_begins[rank] = log.stat().st_size if log.exists() else 0

    def close(self) -> None:
        """Remove what is not needed after the end, and copy the records to `log_dir`."""
        for rank in self.ranks:  # other hosts may write into the same folder
            self._remove_temporary_files(rank)
            if self.log_dir is not None:
                self._copy_records(self.log_dir, rank)
        for rank in list(self._opened):
            self._close_log(rank)
        if self.log_dir is not None and 0 in self.ranks:
            (self.path / _RECORD).unlink(missing_ok=True)

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
            with open((self.path / _RECORD).read_text(), "a", opener=open_no_link) as file:
                line = {"kind": "failure", "time": time.time(), "text": failure[:_MOST_CHARS]}
                file.write(f"\n{json.dumps(line)}\n")  # rank 0 may have written half a line

    def grace_seconds(self) -> float:
        """The longest time that any rank requested; 0 if none did."""
        requested = [0.0]
        for file in self.path.glob("rank*.grace"):
            with contextlib.suppress(OSError, ValueError):
                requested.append(float(file.read_text()))
        return max(requested)

    def _close_log(self, rank: int) -> None:
        self.log(rank).unlink(missing_ok=True)  # first: another file may get the descriptor
        os.close(self._opened.pop(rank))

    def _remove_temporary_files(self, rank: int) -> None:
        """Remove an empty fault file, markers, pipes."""
        fault = self.fault(rank)
        with contextlib.suppress(OSError):
            if not fault.stat().st_size:
                fault.unlink()
        for ending in _TEMPORARY_FILES:
            (self.path / f"rank{rank}{ending}").unlink(missing_ok=True)

    def _copy_records(self, log_dir: Path, rank: int) -> None:
        """Move the records of a rank to `log_dir`. One that cannot be written there stays."""
        for ending in _RECORD_FILES:
            record = self.path / f"rank{rank}{ending}"
            with contextlib.suppress(OSError):
                content = record.read_bytes()
                with os.fdopen(_create(log_dir / record.name), "wb") as file:
                    file.write(content)
                record.unlink()

    def _remove_records(self, log_dir: Path, rank: int) -> None:
        for ending in _RECORD_FILES:
            with contextlib.suppress(OSError):
                (log_dir / f"rank{rank}{ending}").unlink()


@contextlib.contextmanager
def run_folder(log_dir: str, run_id: str = "") -> Iterator[RunFolder]:
    """A new folder for this run under the cache folder. Logs, and at the end records, go to `log_dir` if given.

    Logs and failure records are kept after the run.

    Raises:
        UsageError: `log_dir` cannot be created or written.
    """
    given = _given_folder(log_dir) if log_dir else None
    folder = RunFolder(_own_folder(run_id), given)
    try:
        with _locked(folder.path):
            yield folder
    finally:
        folder.close()
        with contextlib.suppress(OSError):
            folder.path.rmdir()  # succeeds only if it is empty


def _given_folder(log_dir: str) -> Path:
    path = Path(log_dir)
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, ValueError) as error:
        reason = str(error.strerror if isinstance(error, OSError) else error)
        raise _unusable(log_dir, reason) from None
    return path.absolute()


def _unusable(log_dir: Path | str, reason: str) -> UsageError:
    remedy = "name a folder that can be created and written, and that no other run uses"
    return UsageError(f"--log-dir = {printable(log_dir)}: {reason}; {remedy}")


def _open_log(log_dir: Path, name: str, *, is_new: bool) -> int:
    """A descriptor of the log `name`, which only this run writes: new, or a file that the user has begun."""
    former = _open_own(log_dir / name)
    if former is not None:
        is_free = _lock_in_time(former)
        if is_free and not is_new:
            return former
        os.close(former)
        if not is_free:
            raise _unusable(log_dir, f"another run writes {name} there")
    try:
        log = _create(log_dir / name)
    except OSError as error:
        raise _unusable(log_dir, f"{name} there cannot be replaced: {error.strerror}") from None
    try_lock(log)
    return log


def _lock_in_time(descriptor: int) -> bool:
    deadline = time.monotonic() + _LOCK_PATIENCE_SECONDS
    while (is_locked := try_lock(descriptor)) is False and time.monotonic() < deadline:
        time.sleep(_TICK_SECONDS)
    return is_locked is not False  # None: this file system has no locks


def _open_own(path: Path) -> int | None:
    """A descriptor that appends to the file at `path`; None if there is no file of this user alone."""
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return None
    status = os.fstat(descriptor)
    is_own = status.st_uid == os.geteuid() and status.st_nlink == 1
    if is_own and stat.S_ISREG(status.st_mode):
        return descriptor
    os.close(descriptor)
    return None


def _create(path: Path) -> int:
    """A descriptor that appends to a new file at `path`. What was there is removed, and never followed."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, _LOG_MODE)


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
