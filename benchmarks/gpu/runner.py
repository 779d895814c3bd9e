"""Runs parts as processes with limits, several at a time, and says how each ended.

A part gets a session of its own. At its limit Python prints the stacks of all its threads, and then the whole
process group is killed, and whatever else the part has started in other sessions.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LEAST_SECONDS = 3.0  # a part with less time is not started
KEPT_LINES = 40
MARK = "XDS_BENCH_PART"  # a variable that is in the environment of all that a part starts


@dataclass(frozen=True)
class Part:
    """One process. seconds: its limit. needs: less time than this is not enough to start it."""

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: float = LEAST_SECONDS
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Phase:
    """Parts of which `jobs` run at a time, for `seconds` in all."""

    parts: tuple[Part, ...]
    seconds: float
    jobs: int = 1


def run(
    phase: Phase, env: Mapping[str, str], folder: Path, until: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the parts in order; the name and the result of each one when it ends.

    env: variables of every part. folder: for logs and records. until: when all have ended, of time.monotonic().
    A result has `state` ("right", "wrong" or "not run"), `reason`, `seconds`, `records` and the last `lines`.
    """
    waiting, running = list(phase.parts), list[_Running]()
    until = min(until, time.monotonic() + phase.seconds)
    try:
        while waiting or running:
            while waiting and len(running) < phase.jobs:
                part = waiting.pop(0)
                left = until - time.monotonic()
                if left < part.needs:
                    reason = f"{max(0, left):.0f} s were left"
                    yield part.name, {"state": "not run", "reason": reason, "records": []}
                    continue
                running.append(_Running(part, env, folder, min(part.seconds, left)))
            for each in [each for each in running if each.is_over()]:
                running.remove(each)
                yield each.part.name, each.result()
            time.sleep(0.05)
    finally:
        for each in running:
            each.kill()


class _Running:
    """A part that was started."""

    def __init__(self, part: Part, env: Mapping[str, str], folder: Path, seconds: float) -> None:
        self.part, self.seconds = part, seconds
        stem = part.name.replace(" ", "-").replace(",", "")
        self._log, self._records = folder / f"{stem}.log", folder / f"{stem}.jsonl"
        self._records.unlink(missing_ok=True)
        self._mark = f"{folder}:{part.name}"
        settings = {"XDS_BENCH_RECORDS": str(self._records)}
        settings |= {"XDS_BENCH_END": f"{time.time() + seconds:.1f}"}
        settings |= {MARK: self._mark, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
        self._start = time.monotonic()
        self._is_late = False
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                part.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**env, **part.env, **settings},
                cwd=folder,
                start_new_session=True,
            )

    def is_over(self) -> bool:
        """It has ended, or its time has; then it is killed."""
        if self._process.poll() is None:
            if time.monotonic() - self._start < self.seconds:
                return False
            self._is_late = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGABRT)  # faulthandler prints the stacks
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
        self.kill()
        return True

    def kill(self) -> None:
        """End its process group, and what left it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for _ in range(50):  # until they have gone, with what they hold on the device
            if not (pids := _marked(self._mark)):
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def result(self) -> dict[str, Any]:
        """See `run`."""
        lines = self._log.read_text(errors="replace").splitlines()
        records = _read_records(self._records)
        wrong = [each["case"] for each in records if "case" in each and not each["ok"]]
        reason = self._reason(lines)
        if not reason and not records:
            reason = "it ended without a record"
        if not reason and wrong:
            reason = f"wrong: {wrong[0]}" + f" and {len(wrong) - 1} more" * (len(wrong) > 1)
        return {
            "state": "wrong" if reason else "right",
            "reason": reason,
            "seconds": round(time.monotonic() - self._start, 1),
            "records": records,
            "lines": last_lines(lines) if reason else [],
        }

    def _reason(self, lines: list[str]) -> str:
        """Why the process did not end well; empty if it did. Cases print "# name" when they begin."""
        at = next((line[2:] for line in reversed(lines) if line.startswith("# ")), "")
        where = f" in: {at}" if at else ""
        code = self._process.returncode
        if self._is_late:
            return f"killed after {self.seconds:.0f} s{where}"
        if code == -signal.SIGKILL:
            return f"killed by the system, which may be out of memory{where}"
        if code < 0:
            return f"{signal.Signals(-code).name}{where}"
        return f"exit code {code}{where}" if code else ""


def _marked(mark: str) -> list[int]:
    """The processes that have this mark in their environment."""
    wanted, found = f"{MARK}={mark}\0".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes() + b"\0":
                found.append(int(folder.name))
    return found


def _read_records(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    found = []
    for line in file.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):  # the line in which the process died
            found.append(json.loads(line))
    return found


def last_lines(lines: list[str]) -> list[str]:
    """The end of a log. Where Python has printed stacks, that of the thread which failed comes first."""
    noise = ("Extension modules", '  File "<frozen importlib')
    lines = [line for line in lines if line.strip() and not line.startswith(noise)]
    fatal = next((n for n, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    if fatal is None:
        return lines[-KEPT_LINES:]
    threads = range(fatal, len(lines))
    at = next((n for n in threads if lines[n].startswith("Current thread")), fatal)
    return [lines[fatal], *lines[max(at, fatal + 1) :][: KEPT_LINES - 1]]
