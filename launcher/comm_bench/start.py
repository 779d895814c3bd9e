"""The command line of `xds bench comm`. Options it does not know are passed to the launcher."""

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
All other options are those of the launcher: --nproc-per-node, --hostfile, --include, ... (`xds --help`).
Results are checked before anything is timed. Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md):
algbw is size / time, busbw is the traffic of each rank's link in one direction. "of link" is the time that
the link alone needs for the same bytes, divided by the measured time. The link's speed is measured in the
same run: a TCP connection between two ranks with gloo, a copy or a message between GPUs with NCCL."""


@final
class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"xds bench comm: {message}; see `xds bench comm --help`")


def main(argv: Sequence[str]) -> int:
    """Start the ranks and return the launcher's exit code."""
    plan, launcher_args = read(argv)
    from ..cli import main as xds

    return xds([*launcher_args, "--module", MODULE, plan.as_text()])


def read(argv: Sequence[str]) -> tuple[Plan, list[str]]:
    """The plan, and the arguments for the launcher.

    Raises:
        UsageError: an op is unknown, or a value is out of range.
    """
    args, launcher_args = _parser().parse_known_args(list(argv))
    ops = tuple(op for part in args.op or [] for op in part.split(",") if op)
    for op in ops:
        if op not in OPS:
            raise UsageError(f"--op = {printable(op)}: must be one of {', '.join(OPS)}")
    if args.trials < 1:
        raise UsageError(f"--trials = {args.trials}: must be a number from 1")
    if not 0 < args.seconds < 3600:
        raise UsageError(f"--seconds = {args.seconds:g}: must be above 0 and below 3600")
    smallest = parse_bytes("--min-size", args.min_size)
    largest = parse_bytes("--max-size", args.max_size) if args.max_size else 0
    if largest and largest < smallest:
        raise UsageError(
            f"--max-size = {printable(args.max_size)}: is below --min-size = "
            f"{printable(args.min_size)}; raise it"
        )
    plan = Plan(ops or OPS, smallest, largest, args.dtype, args.trials, args.seconds, args.json)
    return plan, launcher_args


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="xds bench comm",
        description="Time every collective at several sizes, and compare it with the speed of the link.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--op",
        action="append",
        metavar="OP,OP",
        help=f"one or more of {', '.join(OPS)} (default: all)",
    )
    add(
        "--min-size", default=f"{FIRST_BYTES}", metavar="SIZE", help="smallest size (default: 1KiB)"
    )
    add(
        "--max-size",
        default="",
        metavar="SIZE",
        help="largest size (default: 1GiB on GPUs, 64MiB on CPUs, less if memory is short)",
    )
    add("--dtype", choices=DTYPES, default="float32")
    add(
        "--trials",
        type=int,
        default=20,
        metavar="N",
        help="consecutive calls that are timed together (default: 20)",
    )
    add(
        "--seconds",
        type=float,
        default=0.5,
        metavar="S",
        help="do fewer trials if they take longer than this (default: 0.5); a row takes at most 3 times it",
    )
    add("--json", action="store_true", help="print one line of JSON instead of the table")
    return parser
