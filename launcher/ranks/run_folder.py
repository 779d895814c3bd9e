"""The folder in which the ranks of one run leave their output and their last words, on each host."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from ...ops.build_cache import default_folder

_RUNS_KEPT = 20
_DAY_SECONDS = 86400.0
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
    folder = RunFolder(_folder(asked, run_id))
    try:
        yield folder
    finally:
        for rank in folder.ranks:  # other hosts may write into the same folder
            folder.forget_passing(rank)
        if not asked:
            with contextlib.suppress(OSError):
                folder.path.rmdir()  # only if nothing was kept


def _folder(asked: str, run_id: str) -> Path:
    if asked:
        path = Path(asked)
        path.mkdir(parents=True, exist_ok=True)
        return path
    started = time.strftime("%Y%m%d-%H%M%S")
    name = f"{started}-{run_id[:8] or uuid.uuid4().hex[:8]}"
    try:
        runs = default_folder() / "runs"
        (runs / name).mkdir(parents=True, exist_ok=True)
    except OSError:  # no home, or read-only
        return Path(tempfile.mkdtemp(prefix=f"xds-{name}-"))
    _forget_old_runs(runs)
    return runs / name


def _forget_old_runs(runs: Path) -> None:
    """Remove runs beyond the newest, unless they were written to within a day: they may go on."""
    old = sorted(runs.iterdir(), reverse=True)[_RUNS_KEPT:]
    for path in old:
        with contextlib.suppress(OSError):
            newest = max(file.stat().st_mtime for file in (path, *path.iterdir()))
            if time.time() - newest > _DAY_SECONDS:
                shutil.rmtree(path)
