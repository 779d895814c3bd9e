"""Runs many local commands, a bounded number in parallel, and collects their output within a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

AT_ONCE = 64
_LAST_SECONDS = 5.0
_OUTPUT, _ERRORS = 1, 2
_MAX_BYTES = 4 << 20  # of one stream; the rest is dropped


@final
@dataclass(frozen=True)
class Answer:
    """How a command ended.

    code: its exit code, negative for a signal; None if it could not be started, or exceeded the time limit.
    output, errors: its two streams.
    answered_at: the time in seconds since 1970 at which the last part of `output` arrived.
    trouble: why there is no exit code.
    """

    code: int | None
    output: str
    errors: str
    answered_at: float
    trouble: str = ""


def fan_out(
    commands: Mapping[str, Sequence[str]], timeout_seconds: float, at_once: int = AT_ONCE
) -> dict[str, Answer]:
    """Run every command. Returns the answers by name, in the order of `commands`.

    Each command has `timeout_seconds` from its own start. Then it is killed with its child processes. An
    interrupt kills all running commands in the same way.
    """
    return asyncio.run(_all(commands, timeout_seconds, at_once))


async def _all(
    commands: Mapping[str, Sequence[str]], timeout_seconds: float, at_once: int
) -> dict[str, Answer]:
    semaphore = asyncio.Semaphore(at_once)

    async def one(command: Sequence[str]) -> Answer:
        async with semaphore:
            return await _run(command, timeout_seconds)

    # return_exceptions: an interrupt waits until each command has been killed
    runs = (one(command) for command in commands.values())
    answers: dict[str, Answer] = {}
    for name, answer in zip(
        commands, await asyncio.gather(*runs, return_exceptions=True), strict=True
    ):
        if isinstance(answer, BaseException):
            raise answer
        answers[name] = answer
    return answers


async def _run(command: Sequence[str], timeout_seconds: float) -> Answer:
    try:
        transport, output = await _start(command)
    except OSError as error:
        return Answer(None, "", "", time.time(), f"cannot start {command[0]}: {error.strerror}")
    trouble = ""
    try:
        await asyncio.wait_for(output.has_ended.wait(), timeout_seconds)
    except asyncio.TimeoutError:  # noqa: UP041 (two classes before Python 3.11)
        trouble = f"did not end within {timeout_seconds:g} s"
    finally:
        await _end(transport, output)
    code = None if trouble else transport.get_returncode()
    return Answer(code, output.text(_OUTPUT), output.text(_ERRORS), output.last_output_at, trouble)


async def _start(command: Sequence[str]) -> tuple[asyncio.SubprocessTransport, _Output]:
    starting = asyncio.ensure_future(
        asyncio.get_running_loop().subprocess_exec(
            _Output,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # so that exactly the command and its child processes can be killed
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:  # asyncio does not clean up after an interrupted start
        await _end(*await starting)
        raise


async def _end(transport: asyncio.SubprocessTransport, output: _Output) -> None:
    _kill(transport.get_pid(), transport.get_returncode())
    with contextlib.suppress(asyncio.TimeoutError):  # another process holds its streams open
        await asyncio.wait_for(output.has_ended.wait(), _LAST_SECONDS)
    transport.close()  # while the event loop still runs


def _kill(pid: int, code: int | None) -> None:
    """Kill the whole session, unless the process was reaped: then its id may belong to another process."""
    if code is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


@final
class _Output(asyncio.SubprocessProtocol):
    """The output of a command on both streams, and the time of its last output."""

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()  # it exited, and both streams are closed
        self.last_output_at = time.time()
        self._streams = {_OUTPUT: bytearray(), _ERRORS: bytearray()}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == _OUTPUT:
            self.last_output_at = time.time()
        stream = self._streams[fd]
        stream += data[: _MAX_BYTES - len(stream)]

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended.set()

    def text(self, fd: int) -> str:
        return self._streams[fd].decode(errors="replace")
