"""The `xds` command: starts a script on every device, checks a config, prints facts about the machine.

Torch is imported only when ranks are started, so `xds --help` and `xds check` respond quickly.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from ..utils.errors import UsageError, XdsError
from ..utils.messages import never, write_stderr
from ..utils.quoting import printable
from ..utils.schema.section import nearest

if TYPE_CHECKING:
    from .command_line.where import Hosts, Local

# subcommands import what they need themselves: `check` reads configs, `env` queries torch
_SUBCOMMANDS = {
    "bench": ".bench",
    "check": ".check",
    "checkpoint": ".checkpoint",
    "completion": ".command_line.completion",
    "data": ".data",
    "elastic": ".elasticity",
    "env": ".environment",
    "ops": ".native_ops",
    "plan": ".plan",
    "report": ".report",
    "tune": ".tune",
}
LOG_LEVEL = "XDS_LOG_LEVEL"  # read by the engine, see engine/telemetry/screen.py
AS_DEEPSPEED = (
    "XDS_AS_DEEPSPEED"  # read at the start of a process, see engine/deepspeed/stand_in.py
)
COMMAND = "XDS_COMMAND"  # read by the record of a run, see engine/telemetry/record.py
INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 + SIGINT, SIGPIPE, as a shell reports other commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of this process) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run_command(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except XdsError as error:
        write_stderr(f"xds: {error}\n", never)
        return 2
    except KeyboardInterrupt:  # before ranks run, which handle signals themselves
        return INTERRUPTED
    except BrokenPipeError:  # nobody reads the output
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        write_stderr(f"xds: standard output: {error.strerror}; it is incomplete\n", never)
        return 1


def _discard_output() -> None:
    """Send what is left in the buffer nowhere: the interpreter writes it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_command(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in _SUBCOMMANDS:
        _refuse_mistyped(arguments[:1])
        return _start(arguments)
    code: int = import_module(_SUBCOMMANDS[arguments[0]], __package__).main(arguments[1:])
    return code


def _refuse_mistyped(first: list[str]) -> None:
    """Raise a UsageError if a word that is no file is nearly a subcommand."""
    for word in first:
        is_meant = not word.isalpha() or os.path.exists(word)
        near = [] if is_meant else nearest(word, _SUBCOMMANDS)
        if near:
            hint = " or ".join(f"`xds {name}`" for name in near)
            raise UsageError(
                f"{printable(word)}: neither a command nor a file; did you mean {hint}?"
            )


def _start(arguments: list[str]) -> int:
    from .command_line.options import check_options, help_text, read

    args = read(arguments)
    if args.has("help"):
        print(help_text(), end="")
        return 0
    if args.has("version"):
        from ..utils.version import __version__

        print(f"xds {__version__}")
        return 0
    if not args.command and args.given:
        raise UsageError(
            f"no script is named after the options; write `xds {printable(shlex.join(arguments))} train.py`"
        )
    if not args.command:
        print(help_text(), end="", file=sys.stderr)
        return 2
    from .command_line.where import where_to_run

    notes = check_options(args)
    if args.has("as_deepspeed"):
        os.environ[AS_DEEPSPEED] = "1"  # ranks inherit it; other machines get every XDS_ variable
    level = "warning" if args.has("quiet") else args.text("log_level")
    if level:
        os.environ[LOG_LEVEL] = level
    os.environ[COMMAND] = shlex.join(["xds", *arguments])
    if args.has("autotuning"):
        from .tuning.autotuning import main as tune

        words = tune(args, args.text("autotuning"))
        return 0 if words is None else _start(words)
    where = where_to_run(args, os.environ)
    for note in [] if args.has("quiet") else notes:
        write_stderr(f"xds: {note}\n", never)
    return _run(where)


def _run(where: Local | Hosts) -> int:
    from .command_line.where import Hosts

    if isinstance(where, Hosts):
        return _run_on_hosts(where)
    from .ranks import local

    if where.devices is not None:  # the driver's numbers: what was visible before is not considered
        from ..ops.device import show_only

        show_only(where.devices)
    return local.run(where.job, where.rendezvous, where.restarts)


def _run_on_hosts(where: Hosts) -> int:
    """Rank 0 is on the first host and writes to this process's streams; others write to files."""
    from .remote.backends import AllAtOnce, PerHost, backend_named
    from .remote.start import check_hosts

    backend = backend_named(where.launcher)
    check_hosts(where.hosts, where.restarts)
    if isinstance(backend, AllAtOnce):
        from .remote.head_at_once import run_at_once

        return run_at_once(where.job, where.hosts, where.remote, backend, where.restarts)
    from .remote.head_per_host import run_per_host

    assert isinstance(backend, PerHost)
    return run_per_host(where.job, where.hosts, where.remote, backend, where.restarts)


if __name__ == "__main__":
    sys.exit(main())
