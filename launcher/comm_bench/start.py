"""The command line of `xds bench comm`. Options it does not know are passed to the launcher."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn, final

from ...utils.errors import UsageError
from ...utils.quoting import printable
from ...utils.sizes import parse_bytes
from .plan import (
    COMPRESSED_DTYPES,
    DTYPES,
    FIRST_BYTES,
    FIRST_COMPRESSED_BYTES,
    LAST_COMPRESSED_BYTES,
    OPS,
    Plan,
)

MODULE = "xds.launcher.comm_bench.ranks"

_EPILOG = """\
All other options are those of the launcher: --nproc-per-node, --hostfile, --include, ... (`xds --help`).
Results are checked before anything is timed. Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md):
algbw is size / time, busbw is the traffic of each rank's link in one direction. "of link" is the time that
the link alone needs for the same bytes, divided by the measured time. The link's speed is measured in the
same run: a TCP connection between two ranks with gloo, a copy or a message between GPUs with NCCL.

Where CPU ranks share memory, rows by "xds" read it, and rows by "xds-gloo" are the same collectives over
messages. "/ copy" is the time over that of a plain copy of as many bytes in each rank, all at once, in the same
run. The heading says why ranks do not share memory; `xds env` has the limits.

--compression times the two exchanges of a step, gradients to their owners and what comes back to all ranks:
exact, with one bit an element (OneBitAdam, OneBitLamb), and as ZeRO++ with 4 and 8 bits. "pack" is
the part of the time that computes the messages. A scheme pays if it is at least 1.1 times as fast as exact
messages. What a scheme does to the loss is not measured, nor what a step hides behind its computation."""


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
    if args.compression and ops:
        raise UsageError(
            f"--op = {printable(','.join(ops))} with --compression: it times schemes and no single "
            "collectives; leave out one of the two"
        )
    if args.compression and args.dtype not in COMPRESSED_DTYPES:
        raise UsageError(
            f"--dtype = {args.dtype} with --compression: gradients must be "
            f"{', '.join(COMPRESSED_DTYPES[:-1])} or {COMPRESSED_DTYPES[-1]}; choose one of them"
        )
    first, last = (FIRST_COMPRESSED_BYTES, LAST_COMPRESSED_BYTES) if args.compression else (0, 0)
    smallest = parse_bytes("--min-size", args.min_size) if args.min_size else first or FIRST_BYTES
    largest = (
        parse_bytes("--max-size", args.max_size)
        if args.max_size
        else max(last, smallest * bool(last))
    )
    if largest and largest < smallest:
        raise UsageError(
            f"--max-size = {printable(args.max_size)}: is below --min-size = "
            f"{printable(args.min_size)}; raise it"
        )
    timing = (args.dtype, args.trials, args.seconds)
    return Plan(ops or OPS, smallest, largest, *timing, args.json, args.compression), launcher_args


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
        "--min-size",
        default="",
        metavar="SIZE",
        help="smallest size (default: 1KiB; 64KiB with --compression)",
    )
    add(
        "--max-size",
        default="",
        metavar="SIZE",
        help="largest size (default: 1GiB on GPUs, 64MiB on CPUs, 16MiB with --compression;"
        " less if memory is short)",
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
        help="do fewer trials if they take longer than this (default: 0.5); a row takes at most 3 times it,"
        " and the copies beside it the same",
    )
    add(
        "--compression",
        action="store_true",
        help="time exact and compressed messages of gradients, and say for each size which pays",
    )
    add("--json", action="store_true", help="print one line of JSON instead of the table")
    return parser
