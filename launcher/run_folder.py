"""The folder in which the ranks of one run leave their output and their last words."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import final


@final
class RunFolder:
    """Names the files of each rank; `is_kept` once a report has named one of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_kept = False

    def log(self, rank: int) -> Path:
        return self.path / f"rank{rank}.log"

    def error(self, rank: int) -> Path:
        return self.path / f"rank{rank}.error.json"

    def fault(self, rank: int) -> Path:
        return self.path / f"rank{rank}.fault.txt"

    def ended(self, rank: int) -> Path:
        """There once the rank's script has ended well."""
        return self.path / f"rank{rank}.ended"

    def first_error_seconds(self, num_ranks: int) -> float | None:
        """When the first rank wrote that it failed (wall clock), None while none has."""
        times = []
        for rank in range(num_ranks):
            with contextlib.suppress(FileNotFoundError):
                times.append(self.error(rank).stat().st_mtime)
        return min(times, default=None)

    def logs(self, num_ranks: int) -> dict[int, Path]:
        """Rank 0 has none: it owns the terminal."""
        return {rank: self.log(rank) for rank in range(1, num_ranks)}


@contextlib.contextmanager
def run_folder(asked: Path | None) -> Iterator[RunFolder]:
    """The folder asked for, rid of an older run's files, or a temporary one that goes."""
    if asked is not None:
        asked.mkdir(parents=True, exist_ok=True)
        for old in _files(asked):
            old.unlink()
    folder = RunFolder(asked or Path(tempfile.mkdtemp(prefix="xds-")))
    try:
        yield folder
    finally:
        for file in _files(folder.path):
            if not file.stat().st_size:  # the fault file of a rank that did not crash
                file.unlink()
        if asked is None and not (folder.is_kept and any(folder.path.glob("*.log"))):
            shutil.rmtree(folder.path, ignore_errors=True)


def _files(path: Path) -> list[Path]:
    patterns = ("rank*.log", "rank*.error.json", "rank*.fault.txt", "rank*.ended")
    return [file for pattern in patterns for file in path.glob(pattern)]
