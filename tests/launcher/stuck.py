"""Waiting for a launcher: one that does not end in time prints its stacks into the failure."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

# for the environment of the launcher: SIGABRT prints the stack of each of its threads
STACKS_ON_ABORT = {"PYTHONFAULTHANDLER": "1"}


def finish(process, seconds):
    """Its exit code, and what it printed."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        running = _running()
        os.kill(process.pid, signal.SIGABRT)
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            out, err = "", "nothing: what it started holds its output open"
        pytest.fail(f"{process.args} runs after {seconds} s\n{running}\nout: {out}\nerr: {err}")
    return process.returncode, out, err


def _running():
    """Every process of the machine: its parent, its state, what it waits for, its command."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            waits = (entry / "wchan").read_text()
        except OSError:
            continue
        lines.append(f"{entry.name} of {fields[1]}: {fields[0]} {waits} {words[:200]}")
    return "\n".join(sorted(lines))
