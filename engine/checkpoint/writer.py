"""Writes bytes to a file, sums them on the way, makes them durable: as a function, and as a process.

The process (`python writer.py FD PARENT_PID`) writes what lies in memory that it shares with a rank, while the
rank goes on. It needs nothing but Python, has the lowest priority, and gives up when the rank is gone.

    stdin   {"path": "...", "size_bytes": n}            one job a line
    stdout  {"written_bytes": n}, ...                   then {"crc32": [...]} or {"error": "..."}
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, final

WRITE_BYTES = 4 << 20  # written at a time, and summed meanwhile
REPORT_BYTES = 16 * WRITE_BYTES  # between two lines about progress
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 16 << 10, 4 << 20
MAX_SUMS = 4096  # of one file, until its chunks are as large as they get
SMALL_BYTES = 1 << 16  # are summed sooner than a thread takes them
POLL_SECONDS = 1.0


class Abandoned(Exception):
    """Nobody waits for the file any more."""


def chunk_bytes_of(size_bytes: int) -> int:
    """What has a sum of its own in a file of `size_bytes`; a rank that needs some of it reads little else."""
    chunk_bytes = MIN_CHUNK_BYTES
    while chunk_bytes < MAX_CHUNK_BYTES and chunk_bytes * MAX_SUMS < size_bytes:
        chunk_bytes *= 2
    return chunk_bytes


@final
class _Sums:
    """The CRC-32 of every `chunk_bytes` of what was added."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._crcs: list[int] = []
        self._crc = 0
        self._filled = 0

    def add(self, part: memoryview) -> None:
        at = 0
        while at < len(part):
            here = part[at : at + self._chunk_bytes - self._filled]
            self._crc = zlib.crc32(here, self._crc)
            at, self._filled = at + len(here), self._filled + len(here)
            if self._filled == self._chunk_bytes:
                self._crcs.append(self._crc)
                self._crc, self._filled = 0, 0

    def all(self) -> list[int]:
        return [*self._crcs, self._crc] if self._filled else self._crcs


def write_summed(
    path: Path,
    size_bytes: int,
    pieces: Iterable[memoryview],
    on_written: Callable[[int], None] | None = None,
) -> list[int]:
    """Write `pieces`, `size_bytes` in all, to a new file and fsync it.

    Args:
        pieces: each is valid until the next is asked for.
        on_written: told, after each part, how many bytes the file has.
    Returns:
        the CRC-32 of every `chunk_bytes_of(size_bytes)` of it.
    Raises OSError: as the file system does; the file may be there in part.
    """
    sums, written = _Sums(chunk_bytes_of(size_bytes)), 0
    with ThreadPoolExecutor(1) as pool, open(path, "xb", buffering=0) as file:
        for piece in pieces:
            for at in range(0, len(piece), WRITE_BYTES):
                part = piece[at : at + WRITE_BYTES]
                # large parts: sum and write at the same time; both let go of the interpreter lock
                pending = pool.submit(sums.add, part) if len(part) > SMALL_BYTES else None
                write_all(file.fileno(), part)
                if pending is None:
                    sums.add(part)
                else:
                    pending.result()
                written += len(part)
                if on_written is not None:
                    on_written(written)
        os.fsync(file.fileno())
    return sums.all()


def write_all(fd: int, part: memoryview) -> None:
    """Write the whole of `part`: the system may take less at a time."""
    while part:
        part = part[os.write(fd, part) :]


# -- the process --------------------------------------------------------------------------------------------


def main(memory_fd: int, parent: int) -> None:
    """Serve one job after the other until stdin ends or the parent is gone."""
    for name in (signal.SIGINT, signal.SIGTERM):  # meant for the ranks; with them this one ends
        signal.signal(name, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(19)
    for line in _lines(parent):
        job = json.loads(line)
        path = Path(job["path"])
        try:
            _say(_serve(memory_fd, path, job["size_bytes"], parent))
        except OSError as error:
            _say({"error": f"{type(error).__name__}: {error}"})
        except Abandoned:
            with suppress(OSError):
                path.unlink()
            return


def _serve(memory_fd: int, path: Path, size_bytes: int, parent: int) -> dict[str, Any]:
    reported = 0

    def watch(written_bytes: int) -> None:
        nonlocal reported
        if written_bytes - reported >= REPORT_BYTES:
            reported = written_bytes
            if os.getppid() != parent or _has_ended():
                raise Abandoned
            _say({"written_bytes": written_bytes})

    everything = memoryview(mmap.mmap(memory_fd, size_bytes, prot=mmap.PROT_READ))
    pieces = (everything[at : at + WRITE_BYTES] for at in range(0, size_bytes, WRITE_BYTES))
    crcs = write_summed(path, size_bytes, pieces, watch)
    return {"crc32": crcs}


def _say(answer: dict[str, Any]) -> None:
    try:
        print(json.dumps(answer), flush=True)
    except OSError:
        raise Abandoned from None


def _has_ended() -> bool:
    """stdin was closed: while a job runs nothing else is sent."""
    ready, _, _ = select.select([0], [], [], 0)
    return bool(ready)


def _lines(parent: int) -> Iterator[bytes]:
    """Lines of stdin until it ends, or until the parent does."""
    text = b""
    while True:
        ready, _, _ = select.select([0], [], [], POLL_SECONDS)
        if not ready:
            if os.getppid() != parent:
                return
            continue
        more = os.read(0, 1 << 16)
        if not more:
            return
        *lines, text = (text + more).split(b"\n")
        yield from lines


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
