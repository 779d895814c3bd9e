"""`xds elastic`: the batch size of an elastic config, and the numbers of ranks that can train it."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from ..engine.config.elasticity import refusal
from ..engine.elastic.rules import Plan
from ..engine.elastic.world_sizes import elastic_plan
from ..utils.errors import ConfigError
from .command_line.parser import Parser

_WIDTH = 96


def main(argv: Sequence[str]) -> int:
    """Print the plan. Returns 0; 2 with the complaints on stderr, or where --world-size does not fit."""
    options = _parser().parse_args(list(argv))
    try:
        found = elastic_plan(options.config)
    except ConfigError as error:
        print(f"xds elastic: {error}", file=sys.stderr)
        return 2
    asked: int | None = options.world_size
    if options.json:
        print(json.dumps(_told(found, asked), indent=2))
    else:
        print(_text(found))
    if asked is None:
        return 0
    if not found.fits(asked):
        said = refusal(found, asked, found.world_sizes)
        print(f"xds elastic: --world-size = {asked}: {said}", file=sys.stderr)
        return 2
    if not options.json:
        print(_split(found, asked))
    return 0


def _told(found: Plan, asked: int | None) -> dict[str, Any]:
    told: dict[str, Any] = {
        "train_batch_size": found.batch_size,
        "valid_world_sizes": list(found.world_sizes),
    }
    if found.limits.ranks_per_node > 1:
        told["valid_nodes"] = list(found.nodes)
    if asked is not None and found.fits(asked):
        micro, steps = found.split(asked // found.limits.model_parallel_size)
        told["world_size"] = asked
        told["train_micro_batch_size_per_gpu"] = micro
        told["gradient_accumulation_steps"] = steps
    return told


def _text(found: Plan) -> str:
    limits = found.limits
    lines = [
        f"train_batch_size = {found.batch_size} samples, at every number of ranks "
        f"(at most {limits.max_batch_size}, micro-batches of {_listed(limits.micro_batch_sizes)})",
        _wrapped(f"{len(found.world_sizes)} valid numbers of ranks: {_listed(found.world_sizes)}"),
    ]
    if limits.ranks_per_node > 1:
        each = f"nodes of {limits.ranks_per_node} ranks"
        if limits.model_parallel_size > 1:
            each += f", {limits.model_parallel_size} of them for one model"
        lines.append(_wrapped(f"numbers of nodes ({each}): {_listed(found.nodes)}"))
    return "\n".join(lines)


def _split(found: Plan, asked: int) -> str:
    replicas = asked // found.limits.model_parallel_size
    micro, steps = found.split(replicas)
    return (
        f"{asked} ranks: train_micro_batch_size_per_gpu = {micro}, gradient_accumulation_steps = {steps} "
        f"({micro} x {steps} x {replicas} = {found.batch_size})"
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH, subsequent_indent="  "))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="xds elastic",
        description="The batch size of a config with an elasticity section, and the numbers of ranks that fit.",
    )
    parser.add_argument("config", help="a config file, or JSON text")
    parser.add_argument(
        "--world-size", type=_count, metavar="N", help="also how N ranks would share the batch"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number
