"""The command line of `xds bench comm`. Options that it does not know are passed to the launcher."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import final

from ..utils.errors import UsageError
from ..utils.quoting import printable
from ..utils.sizes import parse_bytes
from .command_line.options import Parser

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_recv")
_DTYPES = ("float32", "float16", "bfloat16")
_USAGE = """\
usage: xds bench comm [options]   time the collectives, and compare with the link's speed
"""


@final
@dataclass(frozen=True)
class BenchPlan:
    """What is measured. max_bytes: the largest size; 0 means 1 GiB on GPUs and 64 MiB on CPUs."""

    ops: Sequence[str]
    min_bytes: int
    max_bytes: int
    dtype: str
    trials: int
    is_json: bool


def main(argv: Sequence[str]) -> int:
    """Start the ranks, and return the launcher's exit code."""
    name = argv[0] if argv else ""
    if name != "comm":
        is_help = name in ("-h", "--help")
        if name and not is_help:
            raise UsageError(f"xds bench {name}: no such benchmark; the only one is comm")
        print(_USAGE, end="", file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else 2
    plan, launcher_args = read(argv[1:])
    from .cli import main as xds

    return xds([*launcher_args, "--module", "xds.launcher.bench_ranks", json.dumps(asdict(plan))])


def read(argv: Sequence[str]) -> tuple[BenchPlan, list[str]]:
    """The plan, and the arguments for the launcher.

    Raises:
        UsageError: an op is unknown, or a value is out of range.
    """
    parser = Parser(
        prog="xds bench comm",
        description="Time the collectives at several sizes, and compare with the speed of the link.",
        epilog="All other options are those of the launcher: --nproc-per-node, --hostfile, ... (`xds --help`).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    names = ", ".join(OPS)
    add("--op", action="append", metavar="OP,OP", help=f"one or more of {names} (default: all)")
    add("--min-size", metavar="SIZE", default="1KiB", help="smallest size (default: 1KiB)")
    add("--max-size", metavar="SIZE", help="largest size (default: 1GiB on GPUs, 64MiB on CPUs)")
    add("--dtype", choices=_DTYPES, default="float32")
    add("--trials", type=int, default=20, metavar="N", help="calls timed together (default: 20)")
    add("--json", action="store_true", help="print one line of JSON instead of the table")
    add("--compression", action="store_true", help=argparse.SUPPRESS)
    add("--seconds", help=argparse.SUPPRESS)
    args, launcher_args = parser.parse_known_args(list(argv))
    if args.compression:
        raise UsageError(
            "--compression: was removed; to see whether compressed messages pay, compare the step times of two"
            " runs, with and without the section of the config (docs/compression.md)"
        )
    if args.seconds:
        raise UsageError(
            "--seconds: was removed; a row takes about 2 s at most, --trials lowers it"
        )
    ops = tuple(op for part in args.op or [] for op in part.split(",") if op) or OPS
    for op in set(ops) - set(OPS):
        raise UsageError(f"--op = {printable(op)}: must be one of {names}")
    if args.trials < 1:
        raise UsageError(f"--trials = {args.trials}: must be a number from 1")
    least = parse_bytes("--min-size", args.min_size)
    most = parse_bytes("--max-size", args.max_size) if args.max_size else 0
    if most and most < least:
        raise UsageError(
            f"--max-size = {most}: is below --min-size = {least}; raise it, or lower the other"
        )
    return BenchPlan(ops, least, most, args.dtype, args.trials, args.json), launcher_args
