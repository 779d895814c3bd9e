"""The command line of `xds bench comm`: what is not its own is the launcher's, which starts the ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn, final

from ...utils.errors import UsageError
from ...utils.quoting import printable
from ...utils.sizes import parse_bytes
from .plan import DTYPES, FIRST_BYTES, OPS, Plan

MODULE = "xds.launcher.comm_bench.ranks"

_EPILOG = """\
Every other option is the launcher's: --nproc-per-node, --hostfile, --include, --backend, ... (`xds --help`).
Results are checked before anything is timed. Bandwidths are nccl-tests' (doc/PERFORMANCE.md): algbw is
size / time, busbw what each rank's link carries in one direction. "of link" is the time that the link alone
would take for the same bytes over the time that was taken; its speed is measured in the same run: a TCP
connection between two ranks with gloo, a copy or a message between GPUs with NCCL."""


@final
class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"xds bench comm: {message}; see `xds bench comm --help`")


def main(argv: Sequence[str]) -> int:
    """Start the ranks; the launcher's exit code."""
    plan, launcher_args = read(argv)
    from ..cli import main as xds

    return xds([*launcher_args, "--module", MODULE, plan.as_text()])


def read(argv: Sequence[str]) -> tuple[Plan, list[str]]:
    """The plan, and the words for the launcher.

    Raises:
        UsageError: an op or a size that there is not.
    """
    asked, launcher_args = _parser().parse_known_args(list(argv))
    ops = tuple(op for part in asked.op or [] for op in part.split(",") if op)
    for op in ops:
        if op not in OPS:
            raise UsageError(f"--op = {printable(op)}: must be one of {', '.join(OPS)}")
    if asked.trials < 1:
        raise UsageError(f"--trials = {asked.trials}: must be a number from 1")
    if not 0 < asked.seconds < 3600:
        raise UsageError(f"--seconds = {asked.seconds:g}: must be above 0 and below 3600")
    smallest = parse_bytes("--min-size", asked.min_size)
    largest = parse_bytes("--max-size", asked.max_size) if asked.max_size else 0
    if largest and largest < smallest:
        raise UsageError(
            f"--max-size = {printable(asked.max_size)}: is below --min-size = "
            f"{printable(asked.min_size)}; raise it"
        )
    plan = Plan(ops or OPS, smallest, largest, asked.dtype, asked.trials, asked.seconds, asked.json)
    return plan, launcher_args


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="xds bench comm",
        description="Time every collective over sizes, against the speed of the link itself.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--op", action="append", metavar="OP,OP", help=f"of {', '.join(OPS)} (default: all)")
    add("--min-size", default=f"{FIRST_BYTES}", metavar="SIZE", help="1KiB, the default")
    add(
        "--max-size",
        default="",
        metavar="SIZE",
        help="default 1GiB on GPUs, 64MiB on CPUs; less where memory is short",
    )
    add("--dtype", choices=DTYPES, default="float32")
    add("--trials", type=int, default=20, metavar="N", help="calls in a row, timed as one")
    add(
        "--seconds",
        type=float,
        default=0.5,
        metavar="S",
        help="fewer trials where they take longer than this; each row takes three times it at most",
    )
    add("--json", action="store_true", help="one line of JSON instead of the table")
    return parser
