"""Test helper: ranks that fork from their launcher, where the import of torch would be most of a short run.

torch's agent starts `python -u worker.py ...` for each rank. A `ForkedRank` is this program in a fork of the
launcher, which has imported torch and what the script imports. Ranks of tests/launcher are real programs.
"""

from __future__ import annotations

import ast
import atexit
import faulthandler
import gc
import importlib
import importlib.util
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).parent)


def fork_ranks(words: Sequence[str], is_as_deepspeed: bool) -> None:
    """Have torch's agent in this process fork its ranks. words: those of `xds`, with the script."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = lambda self, args, env: ForkedRank(args, env)
    if is_as_deepspeed:
        _activate()
    script = next((word for word in words if word.endswith(".py")), "")
    if Path(script).is_file():
        for name in sorted(_imports(Path(script))):
            with suppress(ImportError):
                importlib.import_module(name)


def _activate() -> None:
    """Also transformers, which the fork server has loaded, finds the stand-in when it is imported anew."""
    from xds.engine.deepspeed import stand_in

    for name in list(sys.modules):
        if name.partition(".")[0] in ("transformers", "accelerate", "peft"):
            del sys.modules[name]
    stand_in.activate()


def _imports(script: Path) -> set[str]:
    """The modules of other packages that a script and the files beside it import at their start."""
    found = set[str]()
    for file in {script, *script.parent.glob("*.py")} if "examples" in script.parts else {script}:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
    return {name for name in found if _is_installed(name.partition(".")[0])}


def _is_installed(name: str) -> bool:
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        return spec is not None and "site-packages" in str(spec.origin)
    return False


class ForkedRank:
    """What torch's agent uses of subprocess.Popen."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str]) -> None:
        self.args, self.returncode = args, None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _be_program(list(args), dict(env))  # does not return

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 0)
        while self._wait(os.WNOHANG if timeout is not None else 0) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def _wait(self, flags: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, flags)
            except ChildProcessError:  # waited for elsewhere: as subprocess.Popen tells it
                self.returncode = 0
                return 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _be_program(args: list[str], env: dict[str, str]) -> None:
    """Run `python -u file ...` in this fork of a process with threads, and end it. Nothing is unwound."""
    code: Any = 1
    try:
        os.setsid()
        _forget_parent()
        os.environ.clear()
        os.environ.update(env)
        _prepare(env)
        file = args[2]
        sys.argv = args[2:]
        sys.path.insert(0, os.path.dirname(file))
        runpy.run_path(file, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    for finish in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        with suppress(Exception):
            finish()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _forget_parent() -> None:
    """No handler, file or finalizer of the launcher is this process's."""
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            own = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
            signal.signal(signum, own)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    faulthandler.disable()
    gc.freeze()
    os.closerange(3, 1024)
    tracker, server = resource_tracker._resource_tracker, forkserver._forkserver
    tracker._fd = tracker._pid = server._forkserver_alive_fd = server._forkserver_pid = None  # type: ignore[attr-defined]
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit.register(util._exit_function)  # type: ignore[attr-defined]


def _prepare(env: Mapping[str, str]) -> None:
    """Paths, threads and modules as at the start of a program."""
    import torch

    sys.path[:] = [path for path in sys.path if not os.path.realpath(path or ".").startswith(TESTS)]
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(TESTS):
            del sys.modules[name]
    logging.disable(logging.NOTSET)  # the launcher has disabled all, for torch says much
    for name, level in (("xds", logging.NOTSET), ("", logging.WARNING)):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).setLevel(level)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS") or 1))
