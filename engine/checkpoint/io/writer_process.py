"""The rank's side of the process that writes a file from memory that both share."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from torch import Tensor

from ....offload.pinned import tensor_over
from ....utils.errors import XdsError
from . import writer
from .tensor_file import Sums

CLOSE_SECONDS = 5.0


@final
class WriterProcess:
    """Writes one file at a time. The process starts with the first file; its memory is reused."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._memory: Tensor | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, WriterProcess] | None = None

    def memory(self, size_bytes: int) -> Tensor:
        """`size_bytes` of shared memory, uint8, on the CPU; not initialized. Page-locked, if there is a GPU."""
        if self._memory is None or len(self._memory) < size_bytes:
            self._memory = None
            self._fd = _new_memory() if self._fd is None else self._fd
            os.ftruncate(self._fd, size_bytes)
            mapped = mmap.mmap(self._fd, size_bytes, flags=mmap.MAP_SHARED | _POPULATE)
            self._memory = tensor_over(mapped, size_bytes, pin=True, can_warn=False)
        return self._memory[:size_bytes]

    def write(self, path: Path, size_bytes: int, on_written: Callable[[int], None]) -> Sums:
        """Write the first bytes of the memory to a new file and fsync it. Blocks.

        Raises:
            XdsError: writing failed, or the process was killed.
        """
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        job = {"path": str(path.absolute()), "size_bytes": size_bytes}
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended: there is no answer
        for line in process.stdout:
            answer = json.loads(line)
            if "error" in answer:
                raise XdsError(answer["error"])
            if "crc32" in answer:
                return Sums(size_bytes, tuple(answer["crc32"]))
            on_written(answer["written_bytes"])
        code = process.wait()
        self._process = None
        raise XdsError(f"the process that writes {path.name} in the background ended with {code}")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            assert self._fd is not None
            # isolated, without site-packages: it starts in some 20 ms
            command = [sys.executable, "-I", "-S", str(Path(writer.__file__).absolute())]
            self._process = subprocess.Popen(
                [*command, str(self._fd), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[self._fd],
            )
            self._end = weakref.finalize(self, _end, self._process)
        return self._process

    def close(self) -> None:
        """End the process and free the memory. A file that is being written is abandoned."""
        if self._end is not None:
            self._end()
        self._process = self._memory = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


# pages are allocated at once, which is much faster than one page fault each
_POPULATE: int = getattr(mmap, "MAP_POPULATE", 0)


def _new_memory() -> int:
    """A file descriptor of anonymous memory, or of an unlinked file if the system has no memfd."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("xds-checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass
    try:
        process.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
