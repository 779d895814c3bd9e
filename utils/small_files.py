"""Reads short files that a user names, and JSON in them: a config, a list of hosts, an index. Writes them.

A device, a folder, a pipe without a writer and a file of gigabytes are refused at once or within seconds.
A pipe with a writer is read, as in `xds check <(make-config)`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import select
import stat
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from .quoting import quoted

MOST_BYTES = 1 << 20
PIPE_SECONDS = 3.0
_CHUNK_BYTES = 1 << 20
_TICK_SECONDS = 0.05


def read_small_file(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: the file cannot be read, is too long or is not a regular file or pipe. See its `strerror`.
    """
    try:
        # without O_NONBLOCK opening a pipe waits for a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except ValueError:  # a null character, or half of a surrogate pair
        raise OSError(errno.EINVAL, "its name is no name of a file") from None
    try:
        found = os.fstat(descriptor)
        is_pipe = stat.S_ISFIFO(found.st_mode)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not (stat.S_ISREG(found.st_mode) or is_pipe):
            raise OSError(errno.EINVAL, "a device, not a file")
        if found.st_size > most_bytes:
            _too_long(most_bytes)
        parts: list[bytes] = []
        left = most_bytes
        while data := _read(descriptor, left + 1, waits=is_pipe and not parts):
            left -= len(data)
            if left < 0:
                _too_long(most_bytes)
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(descriptor)


def read_small_text(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file in UTF-8, without a byte order mark.

    Raises:
        OSError: as `read_small_file`, or the file is not UTF-8. See its `strerror`.
    """
    data = read_small_file(path, most_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8 text: save the file as UTF-8"
        raise OSError(errno.EILSEQ, reason) from None


def open_no_link(path: str, flags: int) -> int:
    """An `opener` of `open` for a file at a fixed name, in a folder that others may write to.

    Raises:
        OSError: the file is a link, which another user may have put there.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NOCTTY, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed", path) from None
        raise


def parse_json(text: str | bytes) -> Any:
    """The JSON value in `text`, which has no key twice in an object, and no NaN or Infinity. Bytes are UTF-8.

    Raises:
        ValueError: it is not such JSON. The message completes "it ...".
    """
    try:
        if isinstance(text, bytes):  # else `json` takes UTF-16 and UTF-32 as well
            text = text.decode()
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except _RefusedError:
        raise
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError:  # also bytes that are no text, and numbers of thousands of digits
        raise ValueError("is not JSON") from None


class _RefusedError(ValueError):
    """Python reads it, and no writer of JSON wrote it."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise _RefusedError(f"has the key {quoted(twice)} twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise _RefusedError(f"has the number {name}, which JSON does not have")


def _too_long(most_bytes: int) -> NoReturn:
    reason = f"longer than {most_bytes >> 20} MiB; is it the right file?"
    raise OSError(errno.EFBIG, reason)


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


# -- writing ----------------------------------------------------------------------------------------------


def replace_small_file(path: str | Path, content: str | bytes) -> None:
    """Write a file at once: a reader finds the former content or the new one. A link at `path` is replaced.

    The folder may be another user's, so the temporary file has a name that nobody can know, and is new.

    Raises:
        OSError: the file cannot be written, or `path` is no name of a file. The former content stays.
    """
    data = content.encode(errors="replace") if isinstance(content, str) else content
    part = Path(path).parent / f".part-{secrets.token_hex(8)}"
    try:
        with open(part, "xb") as file:  # new, so no link is followed
            file.write(data)
        os.replace(part, path)
    except ValueError:
        raise OSError(errno.EINVAL, "its name is no name of a file") from None
    finally:
        with suppress(OSError, ValueError):
            part.unlink()


# -- locks on open files, which end with the process that holds them -------------------------------------


def try_lock(fd: int, *, shared: bool = False) -> bool | None:
    """Lock the file `fd` without waiting. A shared lock excludes only locks that are not shared.

    Returns: whether this process holds the lock now; None where the file system has no locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
