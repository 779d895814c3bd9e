"""Ends a command quietly where nobody reads its output, and in one sentence where it cannot be written.

Python's own answer to both is a traceback, and a second one from its flush at exit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast, final

from ...utils.messages import never, write_stderr

FAILED = 1
PIPE_CLOSED = 141  # 128 + SIGPIPE, as a shell reports other commands


@final
class _Unwritable(Exception):
    """Standard output cannot be written. It is no OSError, so no command takes it for one of its own files."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@final
class _Checked:
    """A stream whose failed writes raise `_Unwritable`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise _Unwritable(error) from None

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise _Unwritable(error) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def with_checked_output(command: Callable[[], int]) -> int:
    """The exit code of `command`, or that of an output that cannot be written.

    Sends everything before it returns, so that the interpreter has nothing to send at exit.
    """
    stream = sys.stdout
    if stream is None:  # started without one
        return command()
    checked = cast(TextIO, _Checked(stream))
    sys.stdout = checked
    try:
        try:
            return command()
        finally:
            if sys.stdout is checked and not stream.closed:
                checked.flush()
    except _Unwritable as unwritable:
        _drop(stream)
        return _code(unwritable.error)
    finally:
        if sys.stdout is checked:
            sys.stdout = stream


def _code(error: OSError) -> int:
    if error.errno == errno.EPIPE:
        return PIPE_CLOSED
    write_stderr(
        f"xds: standard output: {error.strerror}; the output is incomplete, so write it to another file\n",
        never,
    )
    return FAILED


def _drop(stream: TextIO) -> None:
    """What is left in the buffer goes nowhere: the interpreter sends it at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


__all__ = ["FAILED", "PIPE_CLOSED", "with_checked_output"]
