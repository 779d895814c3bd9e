"""A file in memory that is written again and again."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import final


@final
class SharedFile:
    """A file in memory, which stays mapped as long as this object: its pages are looked up once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory = memoryview(b"")
        self._size_bytes = 0

    @property
    def words(self) -> memoryview:
        """Its bytes, and zeros up to a multiple of 8."""
        return self._memory[: -(-self._size_bytes // 8) * 8]

    def whole(self) -> memoryview:
        """Its bytes. Raises OSError: it is missing."""
        return self._map(self._path.stat().st_size, allocates=False)

    def resized(self, size_bytes: int) -> memoryview:
        """Its bytes, which are to be written. Raises OSError: there is no memory for so many."""
        return self._map(size_bytes, allocates=True)

    def _map(self, size_bytes: int, *, allocates: bool) -> memoryview:
        if size_bytes != len(self._memory):
            self._memory = memoryview(b"")
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT * allocates, 0o600)
            try:
                if allocates:
                    os.ftruncate(descriptor, size_bytes)
                    os.posix_fallocate(descriptor, 0, size_bytes)  # later errors kill the process
                self._memory = memoryview(mmap.mmap(descriptor, size_bytes))
            finally:
                os.close(descriptor)
        return self._memory


__all__ = ["SharedFile"]
