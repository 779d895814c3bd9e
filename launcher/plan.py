"""`xds plan`: who has which layers, the bytes that ranks hold and send, the schedule, and its seconds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from ..utils.errors import ConfigError, UsageError
from .command_line.options import Parser, whole_number

RANKS_PER_HOST = 8


def main(argv: Sequence[str]) -> int:
    """Print the plan. Returns 0, or 2 after printing what is wrong to stderr."""
    options = _parser().parse_args(list(argv))
    try:
        return _show(options)
    except (ConfigError, UsageError) as error:
        print(f"xds plan: {error}", file=sys.stderr)
        return 2


def _show(options: argparse.Namespace) -> int:
    if options.measured:
        raise UsageError(
            "--measured was removed: train two steps, and compare engine.memory_plan() and "
            "engine.bytes_sent() with the plan"
        )
    from ..engine.config.config import parse_config
    from ..engine.planning.models import model_source
    from ..engine.planning.plan import make_plan
    from .planning.text import plan_text, seconds_text

    config = parse_config(options.config)
    trusts_code = options.trust_remote_code
    source = model_source(options.model, options.sequence_length, trusts_code=trusts_code)
    machine = None
    if options.machine:
        from ..engine.planning.machine import load_machine

        machine = load_machine(options.machine)
    ranks_per_host = options.ranks_per_host
    if ranks_per_host is None:
        ranks_per_host = RANKS_PER_HOST if machine is None else machine.devices_per_host
    is_timed = machine is not None
    plan = make_plan(source, config, options.world_size, ranks_per_host, traces=is_timed)
    text = plan_text(plan)
    if machine is not None:
        from ..engine.planning.seconds import step_seconds

        text += "\n" + seconds_text(step_seconds(plan, machine), machine, plan)
    print(text, end="")
    if options.png:
        import_module(".planning.picture", __package__).write(plan, options.png)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="xds plan",
        description="Draw a run before it starts: layers, slices, bytes, messages and the schedule.",
    )
    parser.add_argument("config", help="path, JSON text, or base64 of it")
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR|MODULE:FUNCTION",
        help="a folder with config.json of transformers, or a function that returns a model, or a model and "
        "one micro-batch",
    )
    parser.add_argument(
        "--world-size", required=True, type=whole_number(1), metavar="N", help="all ranks"
    )
    parser.add_argument(
        "--ranks-per-host",
        type=whole_number(1),
        metavar="N",
        help=f"ranks on one host (default: {RANKS_PER_HOST}, or the devices of a host of the machine)",
    )
    parser.add_argument(
        "--machine",
        metavar="FILE|NAME",
        help="also print the seconds of a step on this machine: a file of `xds bench machine`, or the name of "
        "a ready one",
    )
    parser.add_argument(
        "--sequence-length",
        type=whole_number(1),
        metavar="N",
        help="tokens of a sample, for a model of transformers (default: its longest)",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code of the model's folder (auto_map in config.json), which never runs otherwise",
    )
    parser.add_argument(
        "--png", metavar="FILE", help="also draw it as a picture (needs matplotlib)"
    )
    parser.add_argument("--measured", action="store_true", help=argparse.SUPPRESS)
    return parser
