"""`xds elastic`: prints the batch size of an elastic config and its valid numbers of ranks."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from ..engine.elastic.config import refusal
from ..engine.elastic.rules import ElasticPlan
from ..engine.elastic.world_sizes import elastic_plan
from ..utils.errors import ConfigError
from .command_line.options import Parser, whole_number

_WIDTH = 96


def main(argv: Sequence[str]) -> int:
    """Print the plan. Returns 0, or 2 if the config is wrong or --world-size is not valid (see stderr)."""
    options = _parser().parse_args(list(argv))
    try:
        plan = elastic_plan(options.config)
    except ConfigError as error:
        print(f"xds elastic: {error}", file=sys.stderr)
        return 2
    world_size: int | None = options.world_size
    if options.json:
        print(json.dumps(_as_json(plan, world_size), indent=2))
    else:
        print(_text(plan))
    if world_size is None:
        return 0
    if not plan.fits(world_size):
        reason = refusal(plan, world_size, plan.world_sizes)
        print(f"xds elastic: --world-size = {world_size}: {reason}", file=sys.stderr)
        return 2
    if not options.json:
        print(_split(plan, world_size))
    return 0


def _as_json(plan: ElasticPlan, world_size: int | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "train_batch_size": plan.batch_size,
        "valid_world_sizes": list(plan.world_sizes),
    }
    if plan.limits.ranks_per_node > 1:
        fields["valid_nodes"] = list(plan.nodes)
    if world_size is not None and plan.fits(world_size):
        micro, steps = plan.split(world_size // plan.limits.model_parallel_size)
        fields["world_size"] = world_size
        fields["train_micro_batch_size_per_gpu"] = micro
        fields["gradient_accumulation_steps"] = steps
    return fields


def _text(plan: ElasticPlan) -> str:
    limits = plan.limits
    lines = [
        f"train_batch_size = {plan.batch_size} samples, at every number of ranks "
        f"(at most {limits.max_batch_size}, micro-batches of {_listed(limits.micro_batch_sizes)})",
        _wrapped(f"{len(plan.world_sizes)} valid numbers of ranks: {_listed(plan.world_sizes)}"),
    ]
    if limits.ranks_per_node > 1:
        each = f"nodes of {limits.ranks_per_node} ranks"
        if limits.model_parallel_size > 1:
            each += f", {limits.model_parallel_size} of them for one model"
        lines.append(_wrapped(f"numbers of nodes ({each}): {_listed(plan.nodes)}"))
    return "\n".join(lines)


def _split(plan: ElasticPlan, world_size: int) -> str:
    replicas = world_size // plan.limits.model_parallel_size
    micro, steps = plan.split(replicas)
    return (
        f"{world_size} ranks: train_micro_batch_size_per_gpu = {micro}, gradient_accumulation_steps = {steps} "
        f"({micro} x {steps} x {replicas} = {plan.batch_size})"
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH, subsequent_indent="  "))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="xds elastic",
        description="Print the batch size of an elasticity section, and its valid numbers of ranks.",
    )
    parser.add_argument("config", help="a config file, or JSON text")
    parser.add_argument(
        "--world-size",
        type=whole_number(1),
        metavar="N",
        help="also print how N ranks share the batch",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
