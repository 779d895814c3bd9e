"""`xds.launch`: runs a function on several ranks, from a notebook or a script.

    notebook --call.pickle--> xds command --starts--> ranks: xds.launcher.functions.rank
             <-- output, the report of a failure --        |
             <------------- rank0.pickle, rank1.pickle ----+

The ranks are new processes. A fork of this one would share locks that its threads hold, and could not use a GPU
where this process has.
"""

from __future__ import annotations

import io
import linecache
import marshal
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import IO, Any

from ...engine.integrations.optional import need
from ...utils.errors import UsageError, XdsError
from ...utils.quoting import printable

CALL = "call.pickle"
# the kernel sends SIGTERM to the command when this process ends, even by SIGKILL
COMMAND = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
sys.path[:] = [path for path in sys.path if path]
from xds.launcher.cli import main
sys.exit(main())
"""
_RANK = "from xds.launcher.functions.rank import main\n\nmain(__file__)\n"


def launch(
    function: Callable[..., Any],
    nproc: int | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Sequence[str] = (),
) -> list[Any]:
    """Run `function(*args, **kwargs)` on `nproc` ranks of this machine, as `xds script.py` runs a script.

    Each rank is a new process. It gets copies of the function, of its arguments, and of the globals that it
    reads, also of those defined in a notebook. What it changes stays there: return it. Rank 0's output appears
    here. The working folder and the environment are those of this process.

    Args:
        nproc: the number of ranks; None: one for each GPU, 2 without a GPU.
        options: more options of the `xds` command, such as ["--log-dir", "logs"].

    Returns: what the function has returned, on each rank.

    Raises:
        UsageError: cloudpickle is not installed; the function, an argument or a global cannot be sent; or this
            process is a rank itself.
        XdsError: a rank has failed. The report of the failure is on standard error.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    if "TORCHELASTIC_RUN_ID" in os.environ or "XDS_RUN_FOLDER" in os.environ:
        raise UsageError(
            f"xds.launch({name}): this process is a rank that a launcher has started; call the function "
            "itself, or start this script with python"
        )
    with tempfile.TemporaryDirectory(prefix="xds-launch-") as folder:
        Path(folder, CALL).write_bytes(_pickled(name, function, args, dict(kwargs or {})))
        script = Path(folder, "rank.py")
        script.write_text(_RANK)
        words = ["--launcher", "local", *options, str(script)]
        if nproc is not None:
            words[:0] = ["--nproc-per-node", str(nproc)]
        code = _run([sys.executable, "-c", COMMAND, str(os.getpid()), *words])
        if code:
            raise XdsError(
                f"xds.launch({name}): the ranks ended with exit code {code}; the report is above"
            )
        results = sorted(Path(folder).glob("rank*.pickle"))
        return [
            pickle.loads(Path(folder, f"rank{rank}.pickle").read_bytes())
            for rank in range(len(results))
        ]


def _pickled(name: str, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    """What `read_call` reads. pickle alone sends names: no other process can import what a notebook defines."""
    cloudpickle = need("cloudpickle", f"xds.launch({name})", "notebook")

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(
                value, CodeType
            ):  # cloudpickle leaves out its file, which tracebacks show
                return marshal.loads, (marshal.dumps(value),)
            return super().reducer_override(value)

    call = io.BytesIO()
    cells = [file for file in list(linecache.cache) if not os.path.exists(file)]
    sources = {file: linecache.getlines(file) for file in cells}  # for tracebacks
    try:
        Pickler(call).dump((function, tuple(args), kwargs))
        return pickle.dumps((list(sys.path), sources, call.getvalue()))
    except Exception as error:
        raise UsageError(
            f"xds.launch({name}): the function, or what it reads, cannot be sent to new processes: "
            f"{printable(str(error))}; create such objects inside the function"
        ) from error


def read_call(data: bytes) -> Any:
    """The function, its arguments and keyword arguments. Sets `sys.path`, by which the rest is found."""
    sys.path[:], sources, call = pickle.loads(data)
    for file, lines in sources.items():
        linecache.cache.setdefault(file, (sum(map(len, lines)), None, lines, file))
    return pickle.loads(call)


def _run(command: list[str]) -> int:
    """The exit code of the command. An interrupt of this process goes to it; its output goes to the cell."""
    streams = [(sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)]
    pipes = [None if now is before else subprocess.PIPE for now, before in streams]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipes[0], stderr=pipes[1], start_new_session=True
    )
    copying = [
        threading.Thread(target=_copy, args=(source, stream), daemon=True)
        for source, (stream, _) in zip((process.stdout, process.stderr), streams, strict=True)
        if source is not None
    ]
    for thread in copying:
        thread.start()
    try:
        process.wait()
    except BaseException as error:  # KeyboardInterrupt, and what a handler of the script raises
        process.send_signal(
            signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        )
        process.wait()
        raise
    finally:
        for thread in copying:
            thread.join()
    return process.returncode


def _copy(source: IO[bytes], stream: Any) -> None:
    while data := os.read(source.fileno(), 65_536):
        stream.write(data.decode(errors="replace"))
        stream.flush()


__all__ = ["CALL", "COMMAND", "launch", "read_call"]
