"""Runs a measurement in a process of its own. If it runs out of memory or time, others are not affected."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIME, MEMORY, ERROR = "time", "memory", "error"  # reasons of a failure


class ChildFailed(Exception):
    """The process raised, was killed, or did not finish in time; the message is one line.

    reason: `TIME`, `MEMORY` or `ERROR`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def results_of(work: Callable[..., Iterator[Any]], *args: Any, until: float) -> Iterator[Any]:
    """What `work(*args)` yields in a new process, as it comes.

    Args:
        until: in seconds of `time.monotonic`; the process is killed then.
    Raises:
        ChildFailed: it did not finish in time, had too little memory, or raised.
    """
    if time.monotonic() >= until:
        raise ChildFailed(TIME, TIME)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "xds"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(work, theirs, args), daemon=True)
    process.start()
    theirs.close()
    try:
        while True:
            if not ours.poll(max(0.0, until - time.monotonic())):
                raise ChildFailed(TIME, TIME)
            try:
                kind, payload = ours.recv()
            except EOFError:
                process.join()
                raise _failure_of(process.exitcode) from None
            if kind == "end":
                return
            if kind == "error":
                raise ChildFailed(*payload)
            yield payload
    finally:
        ours.close()
        if process.is_alive():
            process.join(timeout=5)
        if process.is_alive():
            process.kill()
        process.join()


def _failure_of(code: int | None) -> ChildFailed:
    if code == -9:
        return ChildFailed(MEMORY, "killed, probably for host memory")
    return ChildFailed(ERROR, f"the process ended with code {code}")


def _described(error: BaseException) -> tuple[str, str]:
    """The reason, and one line."""
    text = (str(error).strip() or "no message").split("\n")[0][:160]
    if type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU
        return MEMORY, "too little device memory"
    if isinstance(error, MemoryError) or "cannot allocate" in text:
        return MEMORY, "too little host memory"
    return ERROR, f"{type(error).__name__}: {text}"


def _main(work: Callable[..., Iterator[Any]], pipe: Connection, args: tuple[Any, ...]) -> None:
    os.dup2(2, 1)  # the lines that libraries print must not mix with rows
    # if host memory runs out, the system kills this process, not its parent
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        for found in work(*args):
            pipe.send(("result", found))
        pipe.send(("end", None))
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        pipe.send(("error", _described(error)))
    finally:
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads and exit hooks of libraries may abort a finished process


__all__ = ["ERROR", "MEMORY", "TIME", "ChildFailed", "results_of"]
