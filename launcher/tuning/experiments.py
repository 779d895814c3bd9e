"""One experiment: an `xds` command in processes of its own, with its output in files, and how it ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from ...utils.small_files import read_small_file, read_small_text
from ..functions.launch import COMMAND

METRICS, STDOUT, STDERR = "metrics.json", "stdout.log", "stderr.log"
STOP_SECONDS = 10.0  # xds stops its ranks within 5
_MOST_BYTES = 1 << 22
_NO_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|^MemoryError|Cannot allocate memory",
    re.IGNORECASE | re.MULTILINE,
)
_WANTED = re.compile(r"allocate ([0-9.]+ ?[KMGT]?i?B|[0-9]+ bytes)", re.IGNORECASE)
_KILLED = re.compile(r"killed by (SIG\w+)")
_SENTENCE = re.compile(r"^(?:xds: )?((?:[\w.]*(?:Error|Exception|Preempted)|xds\.\w+): .+)$")
Kind = Literal["measured", "out of memory", "killed", "failed"]


@final
@dataclass(frozen=True)
class Outcome:
    """kind: how it ended. reason: one line; "" where it was measured. metrics: what the engine wrote."""

    kind: Kind
    reason: str
    seconds: float
    metrics: dict[str, Any]


def run_experiment(
    words: Sequence[str], folder: Path, most_seconds: float | None = None
) -> Outcome:
    """Run `xds words...`. Its output is in files of `folder`, where the engine writes metrics.json.

    An interrupt of this process stops the ranks, and is raised again. They also end if this process is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS).unlink(missing_ok=True)
    start = time.monotonic()
    with open(folder / STDOUT, "wb") as out, open(folder / STDERR, "wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = process.wait(most_seconds)
        except subprocess.TimeoutExpired:
            _stop(process)
            return Outcome(
                "failed", f"it ran longer than {most_seconds:.0f} s", most_seconds or 0, {}
            )
        except BaseException:
            _stop(process)
            raise
    seconds = time.monotonic() - start
    metrics = read_metrics(folder / METRICS)
    if code == 0 and metrics:
        return Outcome("measured", "", seconds, metrics)
    return _failed(code, folder, seconds)


def read_metrics(path: Path) -> dict[str, Any]:
    """What an experiment has written; {}: nothing that can be read."""
    try:
        found = json.loads(read_small_file(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _failed(code: int, folder: Path, seconds: float) -> Outcome:
    text = ""
    for name in (STDOUT, STDERR):
        try:
            text += read_small_text(folder / name, _MOST_BYTES)
        except OSError:
            continue
    lines = [line.strip() for line in text.splitlines()]
    sentences = [found[1] for line in lines if (found := _SENTENCE.match(line)) is not None]
    killed = _KILLED.search(text)
    if killed is not None:
        hint = ", as the kernel does without memory" if killed[1] == "SIGKILL" else ""
        return Outcome("killed", f"a rank was killed by {killed[1]}{hint}", seconds, {})
    if _NO_MEMORY.search(text):
        wanted = _WANTED.search(text)
        more = f" when it asked for {wanted[1]}" if wanted is not None else ""
        return Outcome("out of memory", f"out of memory{more}", seconds, {})
    if code == 0:
        reason = "the script ended before the last timed step"
    else:
        reason = sentences[-1] if sentences else (lines[-1] if lines else f"exit code {code}")
    return Outcome("failed", reason[:300], seconds, {})


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except BaseException as error:  # it takes too long, or a second interrupt
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


__all__ = ["METRICS", "Outcome", "read_metrics", "run_experiment"]
