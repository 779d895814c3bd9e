"""Test helper: a disk on which one call fails. Counts the calls of this process that change a folder."""

from __future__ import annotations

import builtins
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

PATH_CALLS = ("rename", "replace", "mkdir", "unlink", "rmdir", "link")
FD_CALLS = ("write", "pwrite", "writev", "pwritev", "fsync", "fdatasync", "ftruncate")
READ_CALLS = ("pread", "preadv")  # only in tests that ask for them
SPACE_CALLS = ("posix_fallocate",)  # the same
TRANSFERS = ("write", "pwrite", "pwritev", *READ_CALLS)


_OS_OPEN = os.open
_NAMELESS = getattr(os, "O_TMPFILE", 0)


def first_half(arg: Any) -> Any:
    """The first half of what a call transfers: a buffer, a list of one buffer, or a length. None: too short."""
    if isinstance(arg, int):
        return arg // 2 or None
    if isinstance(arg, (list, tuple)):
        (buffer,) = arg
        return [first_half(buffer)] if len(buffer) > 1 else None
    return memoryview(arg)[: len(arg) // 2] if len(arg) > 1 else None


class BrokenDisk:
    """The call with number `fails_at` fails, in one of these ways.

    eio: nothing of it is done. full: half of a write is done, and no later call can write or make anything.
    short: half of a read or write is done, and it says so, as systems may; other calls succeed.
    `more_calls` are calls of `os` that fail as well: READ_CALLS, SPACE_CALLS. A full disk can be read.
    """

    def __init__(
        self, folder: Path, fails_at: int, kind: str, more_calls: tuple[str, ...] = ()
    ) -> None:
        self.folder = str(folder)
        self.fails_at = fails_at
        self.kind = kind
        self.more_calls = more_calls
        self.count = 0
        self.hit = ""  # the call that failed
        self._counting = threading.Lock()

    def call(self, name: str, where: str, action: Any, half: Any = None) -> Any:
        """Do `action`, or fail. `half` does the first half of it."""
        with self._counting:
            number, self.count = self.count, self.count + 1
        if self.kind == "full" and name in READ_CALLS:
            return action()
        is_hit = number == self.fails_at
        if is_hit and (half or self.kind == "eio"):
            self.hit = f"{name} {where}"
        if is_hit and half and self.kind != "eio":
            done = half()
            if self.kind == "short":
                return done
        if is_hit and self.kind == "eio":
            raise OSError(errno.EIO, "Input/output error", where)
        stays_full = number >= self.fails_at and name not in ("unlink", "rmdir")
        if self.kind == "full" and stays_full:
            self.hit = self.hit or f"{name} {where}"
            raise OSError(errno.ENOSPC, "No space left on device", where)
        return action()

    def _on_path(self, name: str) -> Any:
        original = getattr(os, name)

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            inside = str(path).startswith(self.folder) or kwargs.get("dir_fd") is not None
            if not inside:
                return original(path, *args, **kwargs)
            return self.call(name, str(path), lambda: original(path, *args, **kwargs))

        return call

    def _on_fd(self, name: str) -> Any:
        original = getattr(os, name)

        def call(fd: int, *args: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{fd}")
            if not path.startswith(self.folder):
                return original(fd, *args)
            half = None
            first = first_half(args[0]) if name in TRANSFERS else None
            if first is not None:
                half = lambda: original(fd, first, *args[1:])  # noqa: E731
            return self.call(name, path, lambda: original(fd, *args), half)

        return call

    def _os_open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        creates = flags & os.O_CREAT or (_NAMELESS and flags & _NAMELESS == _NAMELESS)
        if not creates or not str(path).startswith(self.folder):
            return _OS_OPEN(path, flags, *args, **kwargs)
        return self.call("open", str(path), lambda: _OS_OPEN(path, flags, *args, **kwargs))

    def _open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode[0] not in "xwa" or not str(path).startswith(self.folder):
            return builtins.open(path, mode, *args, **kwargs)
        file = self.call("open", str(path), lambda: builtins.open(path, mode, *args, **kwargs))
        return _File(file, self)

    @contextmanager
    def in_place(self, *modules: ModuleType) -> Iterator[BrokenDisk]:
        """Meanwhile the calls of `os`, and `open` in `modules`, go through here."""
        doubles: list[Any] = [
            mock.patch.object(os, name, self._on_path(name)) for name in PATH_CALLS
        ]
        doubles += [
            mock.patch.object(os, name, self._on_fd(name)) for name in (*FD_CALLS, *self.more_calls)
        ]
        doubles += [mock.patch.object(os, "open", self._os_open)]
        doubles += [mock.patch.object(one, "open", self._open, create=True) for one in modules]
        for double in doubles:
            double.start()
        try:
            yield self
        finally:
            for double in doubles:
                double.stop()


class _File:
    """A file whose `write` goes through the disk."""

    def __init__(self, file: Any, disk: BrokenDisk) -> None:
        self._file = file
        self._disk = disk

    def write(self, content: Any) -> Any:
        half = lambda: self._file.write(memoryview(content)[: len(content) // 2])  # noqa: E731
        is_short = self._disk.kind == "short"  # Python's own files write all, or raise
        return self._disk.call(
            "write",
            self._file.name,
            lambda: self._file.write(content),
            None if is_short else half,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()
