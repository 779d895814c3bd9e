"""The `xds` command: starts a script on every device, checks a config, shows the machine.

Torch is imported only once ranks are to be started: `xds --help` and `xds check` answer at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, final

from ..ops.errors import UsageError, XdsError

if TYPE_CHECKING:
    from .local import LocalJob

_USAGE = """\
xds [options] script.py [arguments of the script]
       xds check config.json [--world-size N]   print the resolved config and what each choice does
       xds checkpoint info|verify|export|import|diff   look into checkpoints, take models out and in
       xds ops build|list|clean                 compile the native ops ahead of time, look at them
       xds env                                  print versions, devices, limits"""

_EPILOG = """\
Rank 0 writes to the terminal, the others to files. The first rank that fails is reported once,
and its exit code is that of xds (128 + signal when it was killed). Everything after the script
belongs to the script; a script that is named like a subcommand is started as ./check.

  xds examples/gpt/train.py --config examples/gpt/zero3.json
  xds --nproc-per-node 4 --module project.train --lr 1e-3"""


@final
class _Parser(argparse.ArgumentParser):
    """Complains by exception, like the rest of xds, and knows which options take a value."""

    def __init__(self) -> None:
        super().__init__(
            prog="xds",
            usage=_USAGE,
            description="Train PyTorch models on every device of this machine.",
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
        )
        self.takes_value: dict[str, bool] = {}

    def add(self, name: str, *aliases: str, **settings: Any) -> None:
        """Add an option; `aliases` are accepted, but not shown."""
        self.add_argument(name, **settings)
        if aliases:
            hidden = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
            self.add_argument(*aliases, **settings | hidden, dest=name.strip("-").replace("-", "_"))
        for word in (name, *aliases):
            self.takes_value[word] = settings.get("action") != "store_true"

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `xds --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own); the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except XdsError as error:
        print(f"xds: {error}", file=sys.stderr)
        return 2


def _dispatch(words: list[str]) -> int:
    # the subcommands import what they need themselves: `check` reads configs, `env` asks torch
    if words[:1] == ["check"]:
        from .check import main as check

        return check(words[1:])
    if words[:1] == ["checkpoint"]:
        from .checkpoint import main as checkpoint

        return checkpoint(words[1:])
    if words[:1] == ["ops"]:
        from .native_ops import main as native_ops

        return native_ops(words[1:])
    if words[:1] == ["env"]:
        from .environment import main as environment

        return environment(words[1:])
    parser = _parser()
    options, command = _split(words, parser)
    asked = parser.parse_args(options)
    if asked.help or not (command or asked.version):
        print(parser.format_help(), end="", file=sys.stdout if asked.help else sys.stderr)
        return 0 if asked.help else 2
    if asked.version:
        from .. import __version__

        print(f"xds {__version__}")
        return 0
    from .local import run

    return run(_job(asked, command))


def _parser() -> _Parser:
    parser = _Parser()
    add = parser.add  # the aliases are what torchrun and DeepSpeed call it
    add(
        "--nproc-per-node",
        *("--nproc_per_node", "--num-gpus", "--num_gpus"),
        metavar="N",
        default="auto",
        help="ranks: a number, gpu, cpu (cores), or auto: one for each GPU, without one 2",
    )
    add("--nnodes", metavar="1", default="1", help="machines; more than one is not there yet")
    add(
        "--module",
        "-m",
        action="store_true",
        help="the script is a module's name, as for python -m",
    )
    add(
        "--no-python",
        "--no_python",
        action="store_true",
        help="the script is a program of any kind",
    )
    add("--log-dir", "--log_dir", metavar="DIR", help="keep the output of ranks 1, 2, ... here")
    add("--backend", choices=("nccl", "gloo", "mpi"), help="default: nccl on GPUs, gloo on CPUs")
    add(
        "--threads-per-rank",
        "--threads_per_rank",
        metavar="N",
        help="OMP_NUM_THREADS (default: the variable, or cores divided by ranks)",
    )
    add("--version", action="store_true", help="print the version")
    add("--help", "-h", action="store_true", help="print this")
    return parser


def _split(words: list[str], parser: _Parser) -> tuple[list[str], list[str]]:
    """Cut the command line before the script: what follows is the script's, whatever it looks like.

    argparse cannot be asked to: it would take `--help` behind the script for its own.
    """
    position = 0
    while position < len(words) and words[position].startswith("-"):
        if words[position] == "--":
            return words[:position], words[position + 1 :]
        name, _, value = words[position].partition("=")
        if name not in parser.takes_value:
            raise UsageError(f"unknown option {name}{_nearest(name, list(parser.takes_value))}")
        position += 2 if parser.takes_value[name] and not value else 1
    return words[:position], words[position:]


def _nearest(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else "; see `xds --help`"


def _job(asked: argparse.Namespace, command: list[str]) -> LocalJob:
    if asked.nnodes != "1":
        raise UsageError(
            f"--nnodes = {asked.nnodes}: xds starts ranks on one machine so far;"
            " for several run torchrun with the same script on each"
        )
    if asked.module and asked.no_python:
        raise UsageError("--module and --no-python exclude one another; drop one of them")
    from .local import LocalJob

    num_ranks = asked.nproc_per_node
    if num_ranks not in ("auto", "gpu", "cpu"):
        num_ranks = _positive("--nproc-per-node", num_ranks, "a number from 1, auto, gpu or cpu")
    threads = asked.threads_per_rank
    return LocalJob(
        kind="module" if asked.module else "program" if asked.no_python else "script",
        target=command[0],
        args=tuple(command[1:]),
        num_ranks=num_ranks,
        backend=asked.backend,
        threads_per_rank=threads and _positive("--threads-per-rank", threads, "a number from 1"),
        log_dir=asked.log_dir and Path(asked.log_dir),
    )


def _positive(name: str, text: str, need: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise UsageError(f"{name} = {text}: must be {need}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
