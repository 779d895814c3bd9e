"""`xds check`: validates a config and says what it means, without torch and without a device."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from ..engine.config.auto import trainer_values
from ..engine.config.batch import COMPUTED, MICRO, TRAIN, mesh_of
from ..engine.config.config import Config, canonical_path, parse_config
from ..engine.config.optimizer import OptimizerConfig
from ..engine.config.scheduler import SchedulerConfig
from ..engine.config.text import open_source, read_source
from ..utils.errors import ConfigError
from ..utils.quoting import escaped, printable
from ..utils.schema.section import AUTO, Section
from ..utils.schema.values import shown
from ..zero.config import STAGES
from .command_line.options import Parser, whole_number

FILLED = (
    'A Trainer or an Accelerator fills in "auto", other scripts need values. Checked with the defaults of '
    "TrainingArguments, --auto KEY=VALUE tries others"
)

IDLE = "Accepted without effect"


def main(argv: Sequence[str]) -> int:
    """Check one config. Returns 0, or 2 after printing every error to stderr."""
    options = _parser().parse_args(list(argv))
    try:
        auto = _auto_values(options.auto)
        source = open_source(options.config)
    except ConfigError as error:
        print(f"xds check: {error}", file=sys.stderr)
        return 2
    world_size = options.world_size
    try:
        data = read_source(source)[0]
        filled = _filled(data, auto)
        config = parse_config(
            source, auto={**filled, **auto}, world_size=world_size, one_replica=world_size is None
        )
    except ConfigError as error:
        print(f"xds check: {error}", file=sys.stderr)
        _print(IDLE, (f"{path}: {why}" for path, why in error.without_effect), sys.stderr)
        return 2
    if options.json:
        print(json.dumps(_as_json(config, filled), indent=2))
        return 0
    print(f"{printable(config.source)} resolved for {_ranks(config)}:")
    for line in choices(config):
        print(f"  {escaped(line)}")
    print("  all other keys have their defaults; --json prints every value")
    _print(FILLED, (f"{path} = {shown(value)}" for path, value in filled.items()))
    _print("Notes", config.notes)
    _print(IDLE, (f"{path}: {why}" for path, why in config.without_effect))
    print("\ndocs/differences.md lists what DeepSpeed 0.19 does otherwise")
    return 0


def _filled(data: object, auto: Iterable[str]) -> dict[str, Any]:
    """The values by path that a Trainer fills in, without those that the command line gives."""
    if not isinstance(data, dict):
        return {}  # `parse_config` refuses it
    given = {canonical_path(path) for path in auto}
    values = trainer_values(data, canonical_path)
    return {path: value for path, value in values.items() if path not in given}


def _as_json(config: Config, filled: Iterable[str]) -> dict[str, Any]:
    """The resolved config, in which "auto" stays "auto" where the Trainer fills it in."""
    result = config.as_dict()
    for path in filled:
        *sections, key = path.split(".")
        section = result
        for name in sections:
            section = section[name]
        section[key] = AUTO
    if MICRO in filled:
        result[TRAIN] = AUTO  # computed from what is filled in
    return result


def _print(title: str, lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print a section, if it has lines; None is standard output."""
    text = "\n".join(f"  {escaped(line)}" for line in lines)
    if text:
        print(f"\n{title}:\n{text}", file=file)


def choices(config: Config) -> Iterator[str]:
    """Yield one sentence for each value that is not the default, in the order of the documentation."""
    ranks = "rank" if config.model_ranks == 1 else "data-parallel rank"
    yield (
        f"train_batch_size = {config.train_batch_size}: "
        f"{_counted(config.train_micro_batch_size_per_gpu, 'sample')} per forward x "
        f"{_counted(config.gradient_accumulation_steps, 'accumulation step')} x "
        f"{_counted(config.data_parallel_ranks, ranks)} "
        f"= {_counted(config.train_batch_size, 'sample')} per update"
    )
    if config.pipeline.stages > 1:
        yield _cut(config)
    if config.expert_parallel.enabled:
        yield _experts(config)
    if " x " in _product(config):
        yield f"ranks: {_product(config)} = {_counted(config.world_size, 'rank')}"
    yield from _differences(config, "")


def _ranks(config: Config) -> str:
    if config.model_ranks == 1:
        return _counted(config.data_parallel_ranks, "data-parallel rank")
    return f"{config.world_size} ranks: {_product(config)}"


def _product(config: Config) -> str:
    """The ranks along each axis that has several, and along the data axis."""
    size, sequence = config.world_size, config.sequence_parallel_size
    mesh = mesh_of(config.pipeline, config.tensor_parallel, size, sequence)
    axes = [
        (mesh.pipe, "pipeline stage"),
        (mesh.data, "data-parallel rank"),
        (mesh.sequence, "sequence rank"),
        (mesh.tensor, "tensor rank"),
    ]
    is_shown = [number > 1 or "data" in what for number, what in axes]
    return " x ".join(
        _counted(*axis) for axis, shown_here in zip(axes, is_shown, strict=True) if shown_here
    )


def _cut(config: Config) -> str:
    section, steps = config.pipeline, config.gradient_accumulation_steps
    chunks = ""
    if section.num_chunks > 1:
        parts = section.stages * section.num_chunks
        chunks = f", each of {section.num_chunks} chunks: the model is cut into {parts} parts"
    bubble = section.bubble(steps)
    waits = ""
    if bubble is not None:
        waits = (
            f"; with {_counted(steps, 'micro-batch')} in a step, a rank waits {bubble:.1%} of the time if all "
            "stages are equally fast"
        )
    return (
        f"pipeline: {section.stages} stages{chunks}, in the order of {shown(section.schedule)}; "
        f"{config.model_ranks} ranks hold one model{waits}"
    )


def _experts(config: Config) -> str:
    section = config.expert_parallel
    if section.autoep_size in (0, "auto"):
        return "experts: as many neighbouring ranks as fit share the experts of a layer"
    if section.num_ranks == 1:
        return (
            "experts: every rank has all experts; autoep_size = 0 puts them on as many ranks as fit"
        )
    size, ranks = section.num_ranks, config.world_size // config.pipeline.stages
    return (
        f"experts: {size} neighbouring ranks share the experts of a layer, so each expert is on "
        f"{ranks // size} of the {ranks} ranks of a stage"
    )


def _counted(number: int, what: str) -> str:
    ending = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{ending * (number != 1)}"


def _differences(section: Section, path: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        here = f"{path}{name}"
        if name in section.results or here in COMPUTED:
            continue
        if isinstance(value, (OptimizerConfig, SchedulerConfig)):
            arguments = ", ".join(f"{key}={shown(each)}" for key, each in value.params.items())
            yield f"{here} = {value.type}({arguments}): {field.description}"
        elif isinstance(value, Section):
            yield from _differences(value, f"{here}.")
        elif value != field.get_default(call_default_factory=True):
            text = STAGES[value] if here == "zero_optimization.stage" else field.description
            yield f"{here} = {shown(section.shown_value(name))}: {text}"


def _auto_values(pairs: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in pairs:
        path, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(
                [f"--auto {printable(pair)}: must be KEY=VALUE, as in optimizer.params.lr=1e-4"]
            )
        try:
            values[path.strip()] = json.loads(text)
        except ValueError:
            values[path.strip()] = text
    return values


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="xds check",
        description="Check a JSON config, and say what it does and which of its keys have no effect.",
    )
    parser.add_argument("config", help="path, JSON text, or base64 of it")
    parser.add_argument(
        "--world-size",
        type=whole_number(1),
        metavar="N",
        help="all ranks (default: one data-parallel rank)",
    )
    parser.add_argument(
        "--auto",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help='fill a key whose value is "auto" (default: as TrainingArguments do); may be repeated',
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON instead: every value of the resolved config",
    )
    return parser
