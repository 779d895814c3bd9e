"""Where checkpoints are stored: the only file of a save and a load that touches the file system.

    Disk       whole files, folders, renames, locks                   folders.py
    NewFile    written once, at any offset, by several threads        tensor_file.py
    OldFile    read in ranges, by several threads                     checked_file.py

Another storage is another class with the methods of `Disk`, which `storage_of` chooses by the path. A rename
must be atomic there, and what is synced must stay when power is lost. Every method may raise OSError.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import final

from ....utils.small_files import read_small_file, try_lock

ALIGN_BYTES = 4096  # of memory, offset and length, for direct I/O
MIN_DIRECT_BYTES = 4 << 20  # smaller files are faster through the page cache
_DIRECT: int = getattr(os, "O_DIRECT", 0)


@final
class Disk:
    """A file system that is mounted here, and that all ranks see."""

    def create(self, path: Path, size_bytes: int) -> NewFile:
        """A new file that will have `size_bytes`."""
        return NewFile(path, size_bytes)

    def open(self, path: Path) -> OldFile:
        """A file that is read in parts."""
        return OldFile(path)

    def write(self, path: Path, content: bytes) -> None:
        """Write a new small file, durably."""
        with open(path, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def read(self, path: Path, most_bytes: int) -> bytes:
        """The bytes of a small file."""
        return read_small_file(path, most_bytes)

    def names(self, folder: Path) -> list[str]:
        """What is in a folder, sorted; [] if there is none."""
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_folder(self, path: Path) -> bool:
        """There is such a folder."""
        return path.is_dir()

    def size_of(self, path: Path) -> int:
        """The bytes of a file; -1 if there is none."""
        try:
            return path.stat().st_size
        except OSError:
            return -1

    def make_folder(self, folder: Path) -> None:
        """Make a folder and those above it, durably."""
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in made:
            self.sync(path.parent)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file, replacing another, or a folder. Durable after `sync` of the folders around."""
        os.replace(old, new)

    def sync(self, path: Path) -> None:
        """Make the names in a folder durable, or the content of a file."""
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with all in it; errors are ignored."""
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()

    def claim(self, folder: Path) -> Claim:
        """Lock a folder, unless another process has locked it."""
        return Claim(folder)


_DISK = Disk()


def storage_of(path: Path) -> Disk:
    """The storage of the checkpoints below `path`."""
    return _DISK


@final
class Claim:
    """The lock on the folder of a running save, so that no other save removes it as a leftover.

    The lock ends with the process. On a file system without locks there is no lock.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fd = os.open(folder, os.O_RDONLY | os.O_NONBLOCK)
        self.is_taken = try_lock(self._fd) is False  # by another save

    def release(self) -> None:
        """Unlock the folder, once."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@final
class NewFile:
    """A file that is written once, by several threads. Large ones with direct I/O, if the disk has it."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        self._fd = -1
        if size_bytes >= MIN_DIRECT_BYTES:
            try:
                self._fd = os.open(path, flags | _DIRECT, 0o666)
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: this file system has no direct I/O
                    raise
                with suppress(FileNotFoundError):  # some create the file before they refuse
                    path.unlink()
        if self._fd < 0:
            self._fd = os.open(path, flags, 0o666)

    def write(self, block: memoryview, at: int) -> None:
        """Write all of `block`, which is page-aligned, at byte `at`. Releases the GIL."""
        was_refused = False
        while block:
            whole = len(block) - len(block) % ALIGN_BYTES
            if not whole or at % ALIGN_BYTES:
                self._use_page_cache()  # the file's last bytes, or after a partial write
                whole = len(block)
            try:
                count = os.pwrite(self._fd, block[:whole], at)
            except OSError as error:
                if error.errno != errno.EINVAL or was_refused:
                    raise
                self._use_page_cache()
                was_refused = True
                continue
            block, at = block[count:], at + count

    def _use_page_cache(self) -> None:
        """Switch off direct I/O: any length and offset can be written from now on."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~_DIRECT)

    def sync(self) -> None:
        """Make the content durable."""
        os.fsync(self._fd)

    def close(self) -> None:
        """No more writes."""
        os.close(self._fd)


@final
class OldFile:
    """A file that is read in parts, by several threads."""

    def __init__(self, path: Path) -> None:
        # without O_NONBLOCK opening a pipe waits for a writer; its length is 0
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.size_bytes = os.fstat(self._fd).st_size

    def fill(self, view: memoryview, at: int) -> int:
        """Read bytes from `at` on into `view`; how many, fewer only at the file's end. Releases the GIL."""
        filled = 0
        while filled < len(view):
            count = os.preadv(self._fd, [view[filled:]], at + filled)
            if not count:
                break
            filled += count
        return filled

    def close(self) -> None:
        """No more reads."""
        os.close(self._fd)
