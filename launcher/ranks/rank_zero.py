"""Copies rank 0's output live to the launcher's own streams, and to a log.

    rank 0 --stdout--> a pseudo-terminal or a FIFO --thread--> the log, then the launcher's stdout
           --stderr--> the same, or another one

If the launcher's stream is a terminal, rank 0 gets a pseudo-terminal of the same size, so progress bars and
colours work. The worker opens the streams by name, because torch's agent closes inherited descriptors. Rank 0
may end and start again. So the launcher also keeps each writing end open, and closes it only to detect the
end (`drain`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import struct
import tempfile
import termios
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, final

from ...utils.messages import write_whole

Write = Callable[[int, bytes], None]

_VARIABLES = {1: "XDS_RANK_OUT", 2: "XDS_RANK_ERR"}
_CHUNK_BYTES = 65_536
_FINISH_SECONDS = 0.5
_TICK_SECONDS = 0.05
_SLOW_READER_SECONDS = 30.0
_SIGNAL_SECONDS = 1.0  # a batch system that ends the reader may also be about to stop the launcher


@final
class RankZero:
    """A context that receives rank 0's output.

    folder: holds the FIFOs that the worker opens. log: gets both streams, appended in order of arrival.
    write: takes (1 or 2, bytes); it raises OSError if the stream has no reader any more.
    is_stopping: whether the ranks were requested to stop. They may then be saving a checkpoint, so without a
        reader their output goes only to the log. None means never.
    """

    def __init__(
        self,
        folder: Path,
        log: Path,
        write: Write = write_whole,
        is_stopping: Callable[[], bool] | None = None,
    ) -> None:
        self._folder, self._write, self._is_stopping = folder, write, is_stopping
        self._log = _Log(log)
        self._streams: list[_Stream] = []
        self._environment: dict[str, str] = {}
        self._own_folder = ""
        self._before: Any = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables with the paths that rank 0's worker opens; none for a stream that it inherits."""
        return self._environment

    def __enter__(self) -> RankZero:
        try:
            for descriptors in _distinct_streams():
                self._open(descriptors)
        # no pseudo-terminals or FIFOs here: rank 0 inherits the streams, and is not logged
        except OSError:
            pass
        if any(stream.is_terminal for stream in self._streams) and _is_main_thread():
            self._before = signal.signal(signal.SIGWINCH, self._resized)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGWINCH, self._before)
        for stream in self._streams:
            stream.finish()
        if self._own_folder:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def drain(self, timeout_seconds: float, is_hurried: Callable[[], bool] | None = None) -> bool:
        """After rank 0 has ended: wait until all of its output is written to the stream and the log.

        Waits for a slow reader (`| less`, a stopped terminal) as rank 0 itself would: until `is_hurried`
        returns True after a signal, or without it for 30 s. Returns False if a child process of rank 0 keeps
        a stream open for so long, or if the reader did not read everything.
        """
        for stream in self._streams:
            stream.close_writer()
        ended = [stream.wait_for_end(timeout_seconds, is_hurried) for stream in self._streams]
        for stream in self._streams:
            stream.reopen_writer()
        return all(ended)

    def _open(self, descriptors: tuple[int, ...]) -> None:
        first = descriptors[0]
        stream = _Stream(first, self._write, self._log, self._is_stopping)
        if os.isatty(first):
            stream.open_terminal()
        else:
            # hosts may share the folder, and their process ids may be equal
            name = f"rank0.{uuid.uuid4().hex[:12]}.{first}"
            try:
                stream.open_fifo(str(self._folder.absolute() / name))
            except OSError:  # a file system without FIFOs
                self._own_folder = self._own_folder or tempfile.mkdtemp(prefix="xds-")
                stream.open_fifo(os.path.join(self._own_folder, name))
        stream.start()
        self._streams.append(stream)
        self._environment |= {_VARIABLES[descriptor]: stream.path for descriptor in descriptors}

    def _resized(self, signum: int, frame: FrameType | None) -> None:
        for stream in self._streams:
            stream.copy_size()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _distinct_streams() -> list[tuple[int, ...]]:
    """stdout and stderr, grouped if they are the same file. Closed streams are skipped.

    If both go to the same file (a terminal, `2>&1`), one stream keeps the order of the writes.
    """
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            there = os.fstat(descriptor)
            key = (there.st_dev, there.st_ino)
            found[key] = (*found.get(key, ()), descriptor)
    return list(found.values())


@final
class _Log:
    """The log file, opened at the first write. An error such as a full disk ends the log, but not the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._is_broken = False
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        with self._lock:
            if self._is_broken:
                return
            try:
                if self._descriptor < 0:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                    self._descriptor = os.open(self._path, flags, 0o600)
                write_whole(self._descriptor, data)
            except OSError:
                self._is_broken = True

    @property
    def path(self) -> Path:
        return self._path

    def __del__(self) -> None:  # the stream threads may outlive the context
        if self._descriptor >= 0:
            os.close(self._descriptor)


@final
class _Stream(threading.Thread):
    """A thread that copies bytes from rank 0 to one stream of the launcher."""

    def __init__(
        self,
        descriptor: int,
        write: Write,
        log: _Log,
        is_stopping: Callable[[], bool] | None,
    ) -> None:
        super().__init__(name=f"xds-rank0-{descriptor}", daemon=True)
        self.path = ""
        self.is_terminal = False
        self._descriptor, self._write, self._log = descriptor, write, log
        self._is_stopping, self._is_unread = is_stopping, False
        self._reader = self._writer = -1
        self._lock = threading.Lock()  # protects the two descriptors
        self._seen_end, self._resume = threading.Event(), threading.Event()
        self._is_finishing = self._is_broken = self._is_writing = False
        self._last_write = 0.0  # time of the last completed write

    def open_terminal(self) -> None:
        """Open a pseudo-terminal with the attributes of the launcher's terminal; bytes pass unchanged."""
        self._reader, self._writer = os.openpty()
        self.path, self.is_terminal = os.ttyname(self._writer), True
        with contextlib.suppress(termios.error):
            attributes = termios.tcgetattr(self._descriptor)
            attributes[1] &= ~termios.OPOST
            termios.tcsetattr(self._writer, termios.TCSANOW, attributes)
        self.copy_size()

    def open_fifo(self, path: str) -> None:
        """Open a FIFO, used if the launcher's stream is not a terminal."""
        os.mkfifo(path, 0o600)
        self.path = path
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(self._reader, True)
        self._writer = os.open(path, os.O_WRONLY)

    def copy_size(self) -> None:
        """Set the pseudo-terminal to the size of the launcher's terminal."""
        if not self.is_terminal or self._reader < 0:
            return
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(self._descriptor, termios.TIOCGWINSZ, struct.pack("4H", 0, 0, 0, 0))
            fcntl.ioctl(self._reader, termios.TIOCSWINSZ, size)

    def run(self) -> None:
        while not self._is_broken:
            data = self._read()
            if data:
                self._forward(data)
                continue
            self._seen_end.set()
            if self._is_finishing:
                break
            self._resume.wait()
            self._resume.clear()
        self._close()

    def _read(self) -> bytes:
        try:
            return os.read(self._reader, _CHUNK_BYTES)
        except OSError as error:
            if error.errno == errno.EIO:  # on Linux: the terminal has no writer left
                return b""
            raise

    def _forward(self, data: bytes) -> None:
        self._log.write(data)
        if self._is_unread:
            return
        self._is_writing = True
        try:
            self._write(self._descriptor, data)
        except OSError:
            if self._is_about_to_stop():
                self._is_unread = True  # a failing write could end rank 0 before it has saved
            else:
                self._stop_reading()
        self._is_writing, self._last_write = False, time.monotonic()

    def _is_about_to_stop(self) -> bool:
        deadline = time.monotonic() + _SIGNAL_SECONDS
        while self._is_stopping is not None and not self._is_finishing:
            if self._is_stopping():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_TICK_SECONDS)
        return False

    def _stop_reading(self) -> None:
        """The stream has no reader: close our end, so that rank 0 gets the same error as without the launcher.

        A worker that starts later must not block on a FIFO without a reader.
        """
        self._is_broken = True
        if not self.is_terminal:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
                os.symlink(self._log.path.absolute(), self.path)

    def _close(self) -> None:
        with self._lock:
            for descriptor in (self._reader, self._writer):
                if descriptor >= 0:
                    os.close(descriptor)
            self._reader = self._writer = -1
        self._seen_end.set()

    def close_writer(self) -> None:
        """Close the launcher's writing end, so that the reader detects the end of rank 0."""
        with self._lock:
            if self._writer >= 0:
                self._seen_end.clear()
                self._resume.clear()
                os.close(self._writer)
                self._writer = -1

    def wait_for_end(
        self, timeout_seconds: float, is_hurried: Callable[[], bool] | None = None
    ) -> bool:
        """Whether the end was reached. Stops waiting after `timeout_seconds` of silence, or if hurried."""
        begun = time.monotonic()
        while not self._seen_end.wait(_TICK_SECONDS):
            now = time.monotonic()
            if not self._is_writing and now - max(begun, self._last_write) > timeout_seconds:
                return False
            is_over = is_hurried() if is_hurried else now - begun > _SLOW_READER_SECONDS
            if is_over and now - begun > timeout_seconds:
                return False
        return True

    def reopen_writer(self) -> None:
        """Reopen the writing end for the next start of rank 0."""
        with self._lock:
            if self._reader >= 0 and self._writer < 0:
                with contextlib.suppress(FileNotFoundError):  # the run folder was removed
                    self._writer = os.open(self.path, os.O_WRONLY | os.O_NOCTTY)
        self._resume.set()

    def finish(self) -> None:
        """End the thread. If another process still writes, the thread ends with that process or with us."""
        self._is_finishing = True
        self.close_writer()
        self._resume.set()
        self.join(_FINISH_SECONDS)
        if not self.is_terminal:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
