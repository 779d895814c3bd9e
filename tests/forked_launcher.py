"""Test helper: `xds WORDS` in a fork of a process that has imported torch, which would take seconds."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from helpers import _context as context


class ForkedLauncher:
    """A launcher in a session of its own; named and used as subprocess.Popen.

    Its /proc/PID/environ is not that of the run. The ranks' is.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        *,
        output: str = "",
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        """
        Args:
            folder: the working folder; the output goes to files there.
            output: a terminal or FIFO for both streams instead.
            seconds: other values of constants of xds, by "module:NAME", to wait for less long.
        """
        self.args = list(words)
        own = f"launcher.{uuid.uuid4().hex[:8]}"
        self._files = [Path(output or folder / f"{own}.{name}") for name in ("out", "err")]
        self._is_read = not output
        files = list(map(str, self._files))
        given = (self.args, str(folder), dict(environ), files, seconds or {})
        self._process = context.Process(target=_main, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; what it printed, if that went to files."""
        self.wait(timeout)
        out, err = (file.read_text() for file in self._files) if self._is_read else ("", "")
        return out, err


def _main(
    words: list[str],
    folder: str,
    environ: dict[str, str],
    files: list[str],
    seconds: dict[str, Any],
) -> None:
    from xds.launcher.cli import main

    os.setsid()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored where pytest runs in the background
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # found anew in this environment
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files, start=1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup around the tests would have it ignored
    faulthandler.enable()  # SIGABRT prints the stacks
    for place, value in seconds.items():
        module, _, name = place.partition(":")
        assert hasattr(import_module(module), name)
        setattr(import_module(module), name, value)
    sys.exit(main(words))
