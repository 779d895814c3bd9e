"""Reads short files that a user names: a config, a list of hosts, a list of variables.

A device, a folder, a pipe without a writer and a file of gigabytes are refused at once or within seconds.
A pipe with a writer is read, as in `xds check <(make-config)`.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path

MOST_BYTES = 1 << 20
PIPE_SECONDS = 3.0
_CHUNK_BYTES = 1 << 20
_TICK_SECONDS = 0.05


def read_small_file(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: the file cannot be read, is too long or is not a regular file or pipe. See its `strerror`.
    """
    # without O_NONBLOCK opening a pipe waits for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "a device, not a file")
        parts: list[bytes] = []
        left = most_bytes
        while data := _read(descriptor, left + 1, waits=stat.S_ISFIFO(mode) and not parts):
            left -= len(data)
            if left < 0:
                reason = f"longer than {most_bytes >> 20} MiB; is it the right file?"
                raise OSError(errno.EFBIG, reason)
            parts.append(data)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _read(descriptor: int, most_bytes: int, *, waits: bool) -> bytes:
    """The next bytes; b"" at the end. With `waits`, wait for the first writer of a pipe."""
    deadline = time.monotonic() + PIPE_SECONDS
    while True:
        try:
            data = os.read(descriptor, min(most_bytes, _CHUNK_BYTES))
            if data or not waits:
                return data
            time.sleep(_TICK_SECONDS)
        except BlockingIOError:
            select.select([descriptor], [], [], _TICK_SECONDS)
        if time.monotonic() > deadline:
            raise TimeoutError(
                errno.ETIMEDOUT, f"a pipe that received no data for {PIPE_SECONDS:.0f} s"
            )
