"""Runs many local commands, a bounded number at once, and collects what each says within its time."""

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
_READ_BYTES = 1 << 16
_MAX_BYTES = 4 << 20  # of one stream: what comes after is dropped


@final
@dataclass(frozen=True)
class Answer:
    """How a command ended.

    code: its exit code, negative for a signal; None: it could not be started, or was out of time.
    output, errors: its two streams.
    answered_at: seconds since 1970 at which the last of `output` came.
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
    """Run every command; the answers by name, in the order of `commands`.

    Each has `timeout_seconds` from its own start, then it is killed with what it started. So is all that
    runs when this is interrupted.
    """
    return asyncio.run(_all(commands, timeout_seconds, at_once))


async def _all(
    commands: Mapping[str, Sequence[str]], timeout_seconds: float, at_once: int
) -> dict[str, Answer]:
    turn = asyncio.Semaphore(at_once)

    async def one(words: Sequence[str]) -> Answer:
        async with turn:
            return await _ask(words, timeout_seconds)

    answers = await asyncio.gather(*(one(words) for words in commands.values()))
    return dict(zip(commands, answers, strict=True))


async def _ask(words: Sequence[str], timeout_seconds: float) -> Answer:
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that it can be killed with what it started, and nothing else
        )
    except OSError as error:
        return Answer(None, "", "", time.time(), f"cannot start {words[0]}: {error.strerror}")
    assert process.stdout is not None and process.stderr is not None
    output, errors = _Stream(process.stdout), _Stream(process.stderr)
    trouble = ""
    try:
        await asyncio.wait_for(_end_of(process, output, errors), timeout_seconds)
    except asyncio.TimeoutError:  # noqa: UP041 (two classes before Python 3.11)
        trouble = f"no end within {timeout_seconds:g} s"
    finally:
        _kill(process.pid, process.returncode)
        with contextlib.suppress(asyncio.TimeoutError):  # something else holds its streams open
            await asyncio.wait_for(process.wait(), _LAST_SECONDS)
    code = None if trouble else process.returncode
    return Answer(code, output.text(), errors.text(), output.ended_at, trouble)


async def _end_of(process: asyncio.subprocess.Process, *streams: _Stream) -> None:
    await asyncio.gather(*(stream.read() for stream in streams), process.wait())


def _kill(pid: int, code: int | None) -> None:
    """Its whole session while its number is still its own; once it is reaped the number may be another's."""
    if code is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


@final
class _Stream:
    """A stream's bytes, and when the last of them came."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.ended_at = time.time()
        self._reader = reader
        self._data = bytearray()

    async def read(self) -> None:
        while data := await self._reader.read(_READ_BYTES):
            self.ended_at = time.time()
            self._data += data[: _MAX_BYTES - len(self._data)]

    def text(self) -> str:
        return self._data.decode(errors="replace")
