"""Runs a user's script as one rank, like `python script.py`, and records its failure in a file.

    python -u worker.py script  train.py --lr 1e-3
    python -u worker.py module  project.train --lr 1e-3
    python -u worker.py program ./train.sh --lr 1e-3

This file is started by its path and imports only the standard library. With `-m` the current folder would come
first on sys.path, and a folder there may have the name of a standard module. It reads these variables:

    TORCHELASTIC_ERROR_FILE       path of the failure record, in torch's format
    XDS_LAUNCHER_PID              process id of the launcher
    XDS_RANK_FILES                common prefix of this rank's other files (see run_folder.py)
    XDS_RANK_OUT, XDS_RANK_ERR    paths of the output streams, for rank 0 only (see rank_zero.py)
    XDS_RANK_CORES                the cores of this rank
    XDS_SPARES                    set for the process that forks spares (see recovery/spares.py)

The traceback is not printed on the terminal. Rank 0's output is shown live, and when any rank fails, rank 0
usually fails too because it lost a peer. So each rank writes its traceback to a file, and the launcher prints
one of them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import io
import json
import os
import re
import runpy
import signal
import sys
import time
import types
import zipfile
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_FILES = "XDS_RANK_FILES"
# what ranks with recovery import, and most of them
_IMPORTED = (
    *("xds.engine.initialize", "xds.engine.recovering", "xds.engine.optim.schedules"),
    *("xds.ops.comm.waiting", "xds.ops.optim.adam", "xds.ops.watch.watcher", "torch._dynamo"),
)


class _Outcome:
    """How the script ended; `code` is not 0 if it failed."""

    def __init__(self, files: _Files) -> None:
        self.code = 0
        self.files = files


class _Files:
    """Paths of this rank's files. A spare gets others with its place, in its environment."""

    def __init__(self, is_spare: bool) -> None:
        self._prefix = os.environ.pop(_FILES, "")
        if is_spare:
            os.environ[_FILES] = self._prefix

    @property
    def prefix(self) -> str:
        return os.environ.get(_FILES, self._prefix)

    @property
    def log(self) -> str:
        return f"{self.prefix}.log" if self.prefix else ""

    @property
    def error(self) -> str:
        return os.environ.get("TORCHELASTIC_ERROR_FILE", "")


def main() -> None:
    kind, target, *args = sys.argv[1:]
    launcher_pid = os.environ.pop("XDS_LAUNCHER_PID", "")
    _exit_with_launcher(launcher_pid)
    is_spare = "XDS_SPARES" in os.environ
    if is_spare:
        from xds.recovery import spares

        spares.serve(launcher_pid, _IMPORTED)
        _exit_with_launcher(launcher_pid)
    files = _Files(is_spare)
    _take_streams(files)
    _set_affinity(os.environ.pop("XDS_RANK_CORES", ""))
    if kind == "program":
        if is_spare:
            spares.take_place()
        _exec_program(target, args, files.error)
    if files.prefix and not faulthandler.is_enabled():
        # the file stays open until this process ends
        faulthandler.enable(open(f"{files.prefix}.fault.txt", "w", opener=_for_user))
    if is_spare:
        spares.begin_script()
    outcome = _Outcome(files)
    # registered first, so it runs after all handlers of the script
    atexit.register(_at_exit, outcome)
    try:
        (_run_module if kind == "module" else _run_script)(target, args)
    except KeyboardInterrupt:
        outcome.code = 128 + signal.SIGINT
    except SystemExit as request:
        if request.code is None or request.code == 0:
            raise
        is_number = isinstance(request.code, int)
        outcome.code = int(request.code) & 0xFF if is_number else 1
        text = "" if is_number else f"{request.code}\n"
        _write_failure(files.error, f"exit code {outcome.code}", text, outcome.code, files.log)
    except BaseException as error:
        outcome.code = 1
        sys.last_type = type(error)  # as python does: handlers at exit see that it failed
        summary = f"{type(error).__name__}: {error}"
        _write_failure(files.error, summary, _traceback_text(error), 1, files.log)
    sys.exit(outcome.code)


def _exit_with_launcher(launcher_pid: str) -> None:
    """Have the kernel kill this process when the launcher ends, even by SIGKILL (Linux)."""
    if not launcher_pid:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(launcher_pid):  # the launcher ended before the request was active
        os._exit(1)


def _take_streams(files: _Files) -> None:
    if files.prefix and os.environ.get("RANK") != "0":
        _redirect_streams(files.log, files.log)
    else:
        _redirect_streams(os.environ.pop("XDS_RANK_OUT", ""), os.environ.pop("XDS_RANK_ERR", ""))


def _redirect_streams(out: str, err: str) -> None:
    """Redirect both output streams to the given files. One file for both keeps the order of the writes."""
    opened: dict[str, int] = {}
    for number, path in ((1, out), (2, err)):
        if path and path not in opened:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY
            with contextlib.suppress(FileNotFoundError):  # the run folder was removed
                opened[path] = os.open(path, flags, 0o600)
        if path in opened:
            os.dup2(opened[path], number)
    for descriptor in opened.values():
        os.close(descriptor)


def _for_user(path: str, flags: int) -> int:
    """An opener for files that only the user may read."""
    return os.open(path, flags, 0o600)


def _set_affinity(cores: str) -> None:
    """Bind this process and its future threads to the given cores."""
    if cores and sys.platform == "linux":
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])


def _exec_program(program: str, args: list[str], error_file: str) -> NoReturn:
    try:
        os.execvp(program, [program, *args])
    except OSError as error:
        text = f"{program}: {error.strerror}\n"
        _write_failure(error_file, text.strip(), text, 127, "")
        os._exit(127)


def _run_script(path: str, args: list[str]) -> None:
    """Run `path` as __main__, with what `python path` would set up around it."""
    sys.argv = [path, *args]
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        runpy.run_path(path, run_name="__main__")
        return
    _replace_own_folder(os.path.dirname(os.path.realpath(path)))
    full_path = os.path.abspath(path)
    # Not with runpy, which removes its __main__ module before the atexit handlers run.
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=full_path, __cached__=None, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    with io.open_code(full_path) as file:
        source = file.read()
    exec(compile(source, full_path, "exec", dont_inherit=True), module.__dict__)


def _run_module(name: str, args: list[str]) -> None:
    sys.argv = [name, *args]
    # for a module of xds the user has not named the working folder, where another user may have put modules
    _replace_own_folder("" if name.startswith("xds.") else os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _replace_own_folder(folder: str) -> None:
    """Replace this file's folder on sys.path by `folder`, if any. Under PYTHONSAFEPATH it is not on sys.path.

    Python puts the resolved folder there, and `__file__` may go through a link (an installation of links).
    """
    if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        sys.path[:1] = [folder] if folder else []


def _traceback_text(error: BaseException) -> str:
    """The text that Python would print for `error`, without this file's frames.

    Calls sys.excepthook, so that a hook of the script (such as a crash reporter) still runs.
    """
    trace = error.__traceback__
    own = (__file__, "<frozen runpy>", runpy.__file__)
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    # torch.distributed's hook prefixes each line with "[rank1]: "; the launcher prints the rank once
    # with recovery each opening of groups adds a hook
    return re.sub(r"(?m)^(\[rank\d+\]: ?)+", "", text.getvalue())


def _write_failure(error_file: str, summary: str, text: str, exit_code: int, log: str) -> None:
    """Write the failure to `error_file`, atomically, and whole to the log if there is one.

    Rank 0's standard error is also on the terminal, where the launcher prints a shorter text.
    """
    now = time.time()
    # the disk is full, or the stream has no reader: the record below is still written
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
        if log:
            with open(log, "a", encoding="utf-8", opener=_for_user) as file:
                file.write(text)
        elif not error_file:
            sys.stderr.write(text)
            sys.stderr.flush()
    if not error_file:
        return
    extra = {"py_callstack": text or summary, "timestamp": str(int(now))}
    record = {
        "message": {"message": summary, "extraInfo": extra},
        "xds": {"time_seconds": now, "exit_code": exit_code, "text": text},
    }
    # if the folder was removed or the disk is full, the launcher still has the exit code
    with contextlib.suppress(OSError):
        with open(f"{error_file}.part", "w", encoding="utf-8", opener=_for_user) as file:
            json.dump(record, file)
        os.replace(f"{error_file}.part", error_file)


def _at_exit(outcome: _Outcome) -> None:
    """The last atexit handler: destroys the process group after success, skips C++ teardown after a failure."""
    if outcome.code:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(outcome.code)  # live gloo threads would abort here and hide the exit code
    if outcome.files.prefix:  # before the peers can notice the end of this rank
        open(f"{outcome.files.prefix}.ended", "w").close()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None:
        # errors are ignored: the script has already succeeded
        with contextlib.suppress(Exception):
            if distributed.is_available() and distributed.is_initialized():
                distributed.destroy_process_group()


if __name__ == "__main__":
    main()
