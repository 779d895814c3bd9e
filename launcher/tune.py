"""`xds tune`: finds the layout that fits and is fast, by plans; then runs the best ones for some steps."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..utils.errors import ConfigError, UsageError
from ..utils.quoting import printable
from ..utils.small_files import replace_small_file
from .command_line.options import Parser, whole_number

OUTPUT, RESULTS = "tuned.json", "tuning_results"
TOP, SECONDS, TRIALS = 10, 25, 5


def main(argv: Sequence[str]) -> int:
    """Print the best layouts. Returns 0, or 2 after printing what is wrong to stderr."""
    options = parser().parse_args(list(argv))
    try:
        return _tune(options)
    except (ConfigError, UsageError) as error:
        print(f"xds tune: {error}", file=sys.stderr)
        return 2


def _tune(options: argparse.Namespace) -> int:
    from ..engine.config.config import parse_config
    from ..engine.config.text import read_source
    from ..engine.planning.machine import load_machine
    from ..engine.planning.models import ResizedBatches, model_source
    from ..engine.planning.search import Goal, parsed, search
    from .tuning.confirm import confirm, has_ranks
    from .tuning.text import goodput_text, rows_text

    data, name, complaints = read_source(options.config)
    if complaints or not isinstance(data, dict):
        raise ConfigError(complaints or ["must be an object {...}"], name)
    data.pop("autotuning", None)
    goodput = goodput_text(options) if options.gpu_hours_between_failures else ""
    for path, option in ((options.output, "--output"), (options.html, "--html")):
        _check_place(path, option)
    machine = load_machine(options.machine)
    trusts = options.trust_remote_code
    source = ResizedBatches(
        model_source(options.model, options.sequence_length, trusts_code=trusts)
    )
    host = options.ranks_per_host or machine.devices_per_host
    goal = Goal(
        options.world_size, host, options.tokens_per_step or 0, options.top, options.seconds
    )
    found = search(source, data, machine, goal)
    print(rows_text(found, machine, options.world_size), end="")
    best = found.rows[0]
    if not options.no_run:
        if has_ranks(machine, options.world_size):
            confirmed = confirm(options, found.fastest[:TRIALS], machine)
            best = confirmed or best
        else:
            print(f"\nNot run: {options.world_size:,} ranks are not on this machine.")
    if goodput:
        print(f"\n{goodput}")
    parsed(best.source).resolve(options.world_size)  # it loads as it is
    _write(options.output, json.dumps(best.source, indent=2) + "\n", "--output")
    parse_config(options.output, auto=_auto(best.source), world_size=options.world_size)
    print(f"\n{printable(options.output)}: the config of {best.name}")
    if options.html:
        from .tuning.page import page_of

        _write(options.html, page_of(found, best, machine), "--html")
        print(f"{printable(options.html)}: bytes against tokens/s of all layouts")
    return 0


def _auto(data: dict[str, Any]) -> dict[str, Any]:
    from ..engine.config.auto import trainer_values
    from ..engine.config.config import canonical_path

    return trainer_values(data, canonical_path)


def _check_place(path: str | None, option: str) -> None:
    """
    Raises:
        UsageError: no file can be written there; it is found before the search.
    """
    if path is None:
        return
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            f"{option} {printable(path)}: no file can be written there; name a file in a folder that exists"
        )


def _write(path: str, text: str, option: str) -> None:
    try:
        replace_small_file(Path(path), text)
    except OSError as error:
        raise UsageError(
            f"{option} {printable(path)}: {error.strerror}; name another file"
        ) from None


def parser() -> argparse.ArgumentParser:
    """Of the command line; docs/options.md has its options."""
    made = Parser(
        prog="xds tune",
        description="Find the layout of ranks that fits and is fast. Keys that the config gives stay; keys "
        'that are absent or "auto" are free.',
    )
    add = made.add_argument
    add("config", help="path of the config, JSON text, or base64 of it")
    add(
        "--model",
        required=True,
        metavar="DIR|MODULE:FUNCTION",
        help="as for `xds plan`; a function returns a model and one micro-batch",
    )
    add("--world-size", required=True, type=whole_number(1), metavar="N", help="all ranks")
    add(
        "--machine",
        required=True,
        metavar="FILE|NAME",
        help="what `xds bench machine` wrote, or the name of a ready file",
    )
    add(
        "--tokens-per-step",
        type=whole_number(1),
        metavar="N",
        help="of all ranks (default: train_batch_size of the config, or any)",
    )
    add(
        "--ranks-per-host",
        type=whole_number(1),
        metavar="N",
        help="ranks on one host (default: the devices of a host of the machine)",
    )
    add(
        "--sequence-length",
        type=whole_number(1),
        metavar="N",
        help="tokens of a sample, for a model of transformers (default: its longest)",
    )
    add("--trust-remote-code", action="store_true", help="run code of the model's folder")
    add(
        "--no-run",
        action="store_true",
        help=f"do not run the best {TRIALS}, also where their ranks are on this machine",
    )
    add(
        "--top",
        type=whole_number(1),
        default=TOP,
        metavar="N",
        help=f"layouts that are shown (default: {TOP})",
    )
    add(
        "--seconds",
        type=whole_number(1),
        default=SECONDS,
        metavar="N",
        help=f"of a processor for the search (default: {SECONDS})",
    )
    add("--html", metavar="FILE", help="also write a page: bytes against tokens/s of all layouts")
    add(
        "--output",
        default=OUTPUT,
        metavar="FILE",
        help=f"the config of the best layout (default: {OUTPUT})",
    )
    add(
        "--results",
        default=RESULTS,
        metavar="DIR",
        help=f"output of the runs; what is there is not run again (default: {RESULTS})",
    )
    add(
        "--steps",
        type=whole_number(1),
        default=5,
        metavar="N",
        help="timed steps of a run (default: 5)",
    )
    add(
        "--gpu-hours-between-failures",
        type=whole_number(1),
        metavar="N",
        help="also print how often to save, and the share of useful time",
    )
    add(
        "--save-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="that a save stops training (default: 30)",
    )
    add(
        "--restart-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="from a failure to the next step (default: 600)",
    )
    return made
