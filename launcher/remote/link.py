"""The head's side of one connection: a local process (ssh, srun, ...), its streams, and its messages."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from ...utils.quoting import printable
from .messages import Decoder

_READ_BYTES = 1 << 16
_TAIL_LINES = 5
Write = Callable[[int, bytes], None]


@final
class NodeLink:
    """A process whose standard streams are connected to one node process, or to all of them.

    All streams are non-blocking. The head's loop calls `read` when the selector reports data.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        token: str,
        selector: selectors.BaseSelector,
        write: Write,
        environment: Mapping[str, str] | None = None,
        *,
        holds_stderr: bool = False,
    ) -> None:
        """holds_stderr: until the first message, keep standard error for `last_error_lines` only."""
        self.name = name
        self.last_received = self.started = time.monotonic()
        self.has_ended = False  # the streams are closed
        self._token, self._selector, self._write = token, selector, write
        self._decoder = Decoder(token)
        self._holds_stderr = holds_stderr
        self._queue: deque[bytes] = deque()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        # A new session, so that Ctrl-C at the terminal reaches only the head. No descriptor is inheritable,
        # so the child need not close them, which would take most of the time with thousands of links.
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if environment is None else dict(environment),
            start_new_session=True,
            close_fds=False,
        )
        process = self._process
        assert process.stdin and process.stdout and process.stderr
        self._stdin = process.stdin
        self._open = {process.stdout.fileno(): 1, process.stderr.fileno(): 2}
        self._files = (process.stdout, process.stderr)
        for file in (process.stdin, *self._files):
            os.set_blocking(file.fileno(), False)
        for descriptor in self._open:
            selector.register(descriptor, selectors.EVENT_READ, self)

    # -- out ----------------------------------------------------------------------------------------------

    def send(self, kind: str, **more: Any) -> None:
        """Queue one message for the node process."""
        self._send_line({"kind": kind, **more})

    def send_handshake(self, host: str, heartbeat_seconds: float, head: int | None) -> None:
        """Send the first line: the token, the host's name, the heartbeat timeout, and the number of this head.

        head: None without recovery.
        """
        first = {"token": self._token, "host": host, "heartbeat_seconds": heartbeat_seconds}
        self._send_line({**first, "head": head})

    def _send_line(self, message: Mapping[str, Any]) -> None:
        if not self._stdin.closed:
            self._queue.append(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            self.flush()

    def flush(self) -> None:
        """Write as much as the pipe accepts now."""
        try:
            while self._queue:
                line = self._queue[0]
                written = os.write(self._stdin.fileno(), line)
                if written < len(line):
                    self._queue[0] = line[written:]
                    return
                self._queue.popleft()
        except BlockingIOError:
            return
        except OSError:  # the process is ending, which `read` detects
            self.close_input()

    def close_input(self) -> None:
        """Close the node process's standard input, which ends it."""
        self._queue.clear()
        with contextlib.suppress(OSError):
            self._stdin.close()

    # -- in -----------------------------------------------------------------------------------------------

    def read(self, descriptor: int) -> list[dict[str, Any]]:
        """Read the available data. Returns its messages; other bytes are written to the head's own streams."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._close(descriptor)
            return []
        self.last_received = time.monotonic()
        if self._open[descriptor] == 2:
            self._keep(data)
            if not self._holds_stderr:
                self._write(2, data)
            return []
        messages = []
        for piece in self._decoder.feed(data):
            if isinstance(piece, bytes):
                self._write(1, piece)
            else:
                messages.append(piece)
                self._holds_stderr = False
        return messages

    def _keep(self, data: bytes) -> None:
        self._tail += [line for line in data.decode(errors="replace").splitlines() if line.strip()]

    def _close(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)
        self._open.pop(descriptor, None)
        if not self._open and not self.has_ended:
            self.has_ended = True
            rest = self._decoder.rest()
            if rest:
                self._write(1, rest)

    # -- the process --------------------------------------------------------------------------------------

    def exit_code(self) -> int | None:
        """The exit code as in a shell (128 + signum after a signal); None while the process runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def last_error_lines(self) -> str:
        """The last lines of its standard error, joined into one line."""
        return "; ".join(map(printable, self._tail))

    def signal(self, signum: int) -> None:
        """Send a signal to the process and its child processes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signum)

    def end(self, patience_seconds: float) -> None:
        """Close the streams; kill the process if it does not end by itself in time."""
        self.close_input()
        try:
            self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self._process.wait()
        for descriptor in list(self._open):
            self._close(descriptor)
        for file in self._files:
            file.close()
