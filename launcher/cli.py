"""The `xds` command: starts a script on every device, checks a config, shows the machine.

Torch is imported only once ranks are to be started: `xds --help` and `xds check` answer at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from ..utils.errors import UsageError, XdsError
from ..utils.messages import never, write_stderr

if TYPE_CHECKING:
    from .command_line.options import Asked
    from .command_line.where import Hosts, Local

# subcommands import what they need themselves: `check` reads configs, `env` asks torch
_COMMANDS = {
    "bench": ".bench",
    "check": ".check",
    "checkpoint": ".checkpoint",
    "elastic": ".elasticity",
    "env": ".environment.command",
    "ops": ".native_ops",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own); the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in _COMMANDS:
            code: int = import_module(_COMMANDS[words[0]], __package__).main(words[1:])
            return code
        return _start(words)
    except XdsError as error:
        write_stderr(f"xds: {error}\n", never)
        return 2


def _start(words: list[str]) -> int:
    from .command_line.options import help_text, judge, read

    asked = read(words)
    if asked.has("help"):
        print(help_text(), end="")
        return 0
    if asked.has("version"):
        from ..utils.version import __version__

        print(f"xds {__version__}")
        return 0
    if not asked.command:
        print(help_text(), end="", file=sys.stderr)
        return 2
    from .command_line import own_allocation
    from .command_line.where import where_to_run

    notes = judge(asked)
    if own_allocation.is_asked_for(asked, os.environ):
        return own_allocation.run(asked, os.environ)
    where = where_to_run(asked, os.environ)
    for note in [] if asked.has("quiet") else notes:
        write_stderr(f"xds: {note}\n", never)
    with _saved_pid(asked):
        return _run(where, is_dry=asked.has("dry_run"))


def _run(where: Local | Hosts, *, is_dry: bool) -> int:
    from .command_line.where import Hosts

    if is_dry:
        code: int = import_module(".command_line.dry_run", __package__).show(where)
        return code
    if isinstance(where, Hosts):
        from .remote import head
        from .remote.backends import backend_named

        backend = backend_named(where.launcher)
        return head.run(where.job, where.hosts, where.remote, backend, where.restarts)
    from .ranks import local

    if (
        where.devices is not None
    ):  # by number, as the driver counts: what was visible before is not asked
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, where.devices))
    return local.run(where.job, where.rendezvous, where.restarts)


@contextlib.contextmanager
def _saved_pid(asked: Asked) -> Iterator[None]:
    """deepspeed's --save_pid: a file with the process id, for as long as the run lasts."""
    if not asked.has("save_pid"):
        yield
        return
    path = os.path.join(tempfile.gettempdir(), f"{os.getpid()}.ds")
    with contextlib.suppress(OSError):
        os.unlink(path)  # of an earlier process with our number
    try:
        with open(path, "x") as file:
            file.write(str(os.getpid()))
    except OSError as error:
        raise UsageError(
            f"--save-pid: {path}: {error.strerror}; remove it, or set TMPDIR"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


if __name__ == "__main__":
    sys.exit(main())
