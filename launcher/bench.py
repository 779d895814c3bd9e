"""The command lines of `xds bench comm` and `xds bench machine`. Other options go to the launcher."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from ..utils.errors import UsageError
from ..utils.quoting import printable
from ..utils.sizes import parse_bytes
from .command_line.options import Parser, whole_number

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_recv")
_DTYPES = ("float32", "float16", "bfloat16")
_USAGE = """\
usage: xds bench comm [options]      time the collectives, and compare with the link's speed
       xds bench machine [options]   measure this machine for the seconds of `xds plan` and `xds tune`
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


@final
@dataclass(frozen=True)
class MachinePlan:
    """What is measured, and where it goes. disk: a folder on the disk to measure; "": none."""

    output: str
    name: str
    models: Sequence[str]
    sequence_length: int | None
    micro_batches: Sequence[int]
    dtypes: Sequence[str]
    disk: str


def main(argv: Sequence[str]) -> int:
    """Start the ranks, and return the launcher's exit code."""
    name = argv[0] if argv else ""
    if name == "machine":
        machine, launcher_args = read_machine(argv[1:])
        from .cli import main as xds

        module = "xds.launcher.bench_machine"
        return xds([*launcher_args, "--module", module, json.dumps(asdict(machine))])
    if name != "comm":
        is_help = name in ("-h", "--help")
        if name and not is_help:
            raise UsageError(f"xds bench {name}: no such benchmark; there are comm and machine")
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


def read_machine(argv: Sequence[str]) -> tuple[MachinePlan, list[str]]:
    """The plan of `xds bench machine`, and the arguments for the launcher.

    Raises:
        UsageError: a value is out of range.
    """
    parser = Parser(
        prog="xds bench machine",
        description="Measure products, memory, attention, launches, links, updates and copies, in about two "
        "minutes, and write a machine file.",
        epilog="All other options are those of the launcher: --nproc-per-node, --hostfile, ... (`xds --help`).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--output", metavar="FILE", default="machine.json", help="default: machine.json")
    add("--name", metavar="TEXT", default="", help="of the machine (default: its processor)")
    add(
        "--model",
        action="append",
        default=[],
        metavar="DIR|MODULE:FUNCTION",
        help="measure the kernels of this model, as `xds plan` names it; may be repeated (default: samples)",
    )
    add("--sequence-length", type=whole_number(1), metavar="N", help="as of `xds plan`")
    add(
        "--micro-batch",
        metavar="N,N",
        default="1,4",
        help="samples of a micro-batch (default: 1,4)",
    )
    add("--dtype", metavar="DTYPE,DTYPE", default="fp32,bf16", help="of fp32, bf16 and fp16")
    add("--disk", metavar="DIR", default="", help="measure the disk of this folder as well")
    args, launcher_args = parser.parse_known_args(list(argv))
    dtypes = args.dtype.split(",")
    for dtype in set(dtypes) - {"fp32", "bf16", "fp16"}:
        raise UsageError(f"--dtype = {printable(dtype)}: must be one of fp32, bf16, fp16")
    if not all(size.isdecimal() and int(size) for size in args.micro_batch.split(",")):
        raise UsageError(
            f"--micro-batch = {printable(args.micro_batch)}: must be numbers from 1, such as 1,4"
        )
    sizes = [int(size) for size in args.micro_batch.split(",")]
    plan = MachinePlan(
        str(Path(args.output).absolute()),
        args.name,
        args.model,
        args.sequence_length,
        sizes,
        dtypes,
        args.disk,
    )
    return plan, launcher_args
