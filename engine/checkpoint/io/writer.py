"""Writes a file, computes checksums at the same time, and fsyncs it: as a function, and as a process.

The process (`python writer.py FD PARENT_PID`) writes from memory that it shares with a rank, while the rank
continues. It needs only Python's library, has the lowest priority, and exits when the rank has ended.

    stdin   {"path": "...", "size_bytes": n}            one job per line
    stdout  {"written_bytes": n}, ...                   then {"crc32": [...]} or {"error": "..."}
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import select
import signal
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any, final

BLOCK_BYTES = 8 << 20  # written at a time
DEPTH = 3  # blocks that are written at the same time
ALIGN_BYTES = 4096  # of memory, offset and length, for direct I/O
MIN_DIRECT_BYTES = 4 << 20  # smaller files are faster through the page cache
REPORT_BYTES = 8 * BLOCK_BYTES  # between two progress lines
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 4 << 10, 4 << 20
MAX_SUMS = 4096  # per file, unless its chunks have the maximum size
POLL_SECONDS = 1.0
BEAT_SECONDS = 1.0


class Abandoned(Exception):
    """The rank has ended; no process waits for the file."""


def chunk_bytes_of(size_bytes: int) -> int:
    """The size of the chunks that have a checksum each, in a file of `size_bytes`."""
    chunk_bytes = MIN_CHUNK_BYTES
    while chunk_bytes < MAX_CHUNK_BYTES and chunk_bytes * MAX_SUMS < size_bytes:
        chunk_bytes *= 2
    return chunk_bytes


@final
class Crcs:
    """Computes the CRC-32 of every `chunk_bytes` of the added bytes."""

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
    """Write `pieces`, `size_bytes` in total, to a new file and fsync it.

    Large files are written with direct I/O, several blocks at a time, while checksums are computed.
    Args:
        pieces: each is valid until the next one is requested.
        on_written: called after each block with the number of bytes written.
    Returns:
        the CRC-32 of every `chunk_bytes_of(size_bytes)` of the file.
    Raises OSError: from the file system; a partial file may remain.
    """
    return write_blocks(path, size_bytes, _packed(pieces, size_bytes), on_written)


def write_blocks(
    path: Path,
    size_bytes: int,
    blocks: Iterable[memoryview],
    on_written: Callable[[int], None] | None = None,
) -> list[int]:
    """Like `write_summed`, for page-aligned blocks of BLOCK_BYTES; the last one may be shorter.

    blocks: each is valid until DEPTH more are requested.
    """
    sums, at = Crcs(chunk_bytes_of(size_bytes)), 0
    fd = _open_new(path, is_direct=size_bytes >= MIN_DIRECT_BYTES)
    try:
        with ThreadPoolExecutor(DEPTH) as pool:
            pending: deque[Future[int]] = deque()
            for block in blocks:
                pending.append(pool.submit(_write_at, fd, block, at))
                sums.add(block)  # both release the GIL
                at += len(block)
                if len(pending) == DEPTH:
                    written_bytes = pending.popleft().result()
                    if on_written is not None:
                        on_written(written_bytes)
            for last in pending:
                last.result()
        os.fsync(fd)
    finally:
        os.close(fd)
    return sums.all()


def _packed(pieces: Iterable[memoryview], size_bytes: int) -> Iterator[memoryview]:
    """The same bytes in blocks, in DEPTH buffers that are reused in turn."""
    block_bytes = min(BLOCK_BYTES, -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES) or ALIGN_BYTES
    buffers = cycle([memoryview(mmap.mmap(-1, block_bytes)) for _ in range(DEPTH)])
    buffer, filled = next(buffers), 0
    for piece in pieces:
        at = 0
        while at < len(piece):
            part = piece[at : at + block_bytes - filled]
            buffer[filled : filled + len(part)] = part
            at, filled = at + len(part), filled + len(part)
            if filled == block_bytes:
                yield buffer
                buffer, filled = next(buffers), 0
    if filled:
        yield buffer[:filled]


def _open_new(path: Path, *, is_direct: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    if is_direct:
        try:
            return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: this file system has no direct I/O
                raise
            with suppress(FileNotFoundError):  # some create the file before they refuse
                path.unlink()
    return os.open(path, flags, 0o666)


def _write_at(fd: int, block: memoryview, at: int) -> int:
    """Write all of `block` at byte `at` and return its end. One system call may write only a part."""
    was_refused = False
    while block:
        whole = len(block) - len(block) % ALIGN_BYTES
        if not whole or at % ALIGN_BYTES:
            _use_page_cache(fd)  # the file's last bytes, or after a partial write
            whole = len(block)
        try:
            count = os.pwrite(fd, block[:whole], at)
        except OSError as error:
            if error.errno != errno.EINVAL or was_refused:
                raise
            _use_page_cache(fd)
            was_refused = True
            continue
        block, at = block[count:], at + count
    return at


def _use_page_cache(fd: int) -> None:
    """Switch off direct I/O: any length and offset can be written from now on."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))


# -- the process --------------------------------------------------------------------------------------------


def main(memory_fd: int, parent: int) -> None:
    """Process jobs until stdin ends or the parent has ended."""
    for name in (signal.SIGINT, signal.SIGTERM):  # meant for the ranks; this process ends with them
        signal.signal(name, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(19)
    if hasattr(os, "SCHED_IDLE"):  # a rank that wakes gets the core immediately
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    for line in _lines(parent):
        job = json.loads(line)
        path = Path(job["path"])
        try:
            _send(_serve(memory_fd, path, job["size_bytes"], parent))
        except OSError as error:
            _send({"error": f"{type(error).__name__}: {error}"})
        except Abandoned:
            with suppress(OSError):
                path.unlink()
            return


def _serve(memory_fd: int, path: Path, size_bytes: int, parent: int) -> dict[str, Any]:
    reported = written = 0

    def on_written(written_bytes: int) -> None:
        nonlocal reported, written
        written = written_bytes
        if written_bytes - reported >= REPORT_BYTES:
            reported = written_bytes
            if os.getppid() != parent or _has_ended():
                raise Abandoned
            _send({"written_bytes": written_bytes})

    def beat() -> None:
        """Send regular signs of life, even if the disk is slow."""
        while not is_over.wait(BEAT_SECONDS):
            with suppress(Abandoned):
                _send({"written_bytes": written})

    everything = memoryview(mmap.mmap(memory_fd, size_bytes, prot=mmap.PROT_READ))
    is_over = threading.Event()
    beats = threading.Thread(target=beat)
    beats.start()
    blocks = (everything[at : at + BLOCK_BYTES] for at in range(0, size_bytes, BLOCK_BYTES))
    try:
        crcs = write_blocks(path, size_bytes, blocks, on_written)
    finally:
        is_over.set()
        beats.join()
    return {"crc32": crcs}


def _send(answer: dict[str, Any]) -> None:
    try:
        os.write(1, json.dumps(answer).encode() + b"\n")  # whole lines, from two threads
    except OSError:
        raise Abandoned from None


def _has_ended() -> bool:
    """Whether stdin was closed: nothing else is sent while a job runs."""
    ready, _, _ = select.select([0], [], [], 0)
    return bool(ready)


def _lines(parent: int) -> Iterator[bytes]:
    """The lines of stdin until it ends or the parent has ended."""
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
