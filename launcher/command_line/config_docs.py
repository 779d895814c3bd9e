"""Writes the reference in docs/config.md: `python -m xds.launcher.command_line.config_docs docs/config.md`.

What stands before the mark in that file is written by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path

from ...engine.config.auto import MUST_BE_FILLED
from ...engine.config.batch import COMPUTED
from ...engine.config.classes import ClassTable
from ...engine.config.config import Config
from ...engine.config.optimizer import OPTIMIZERS
from ...engine.config.scheduler import SCHEDULERS
from ...ops.optim.config import REGISTERED
from ...utils.schema.section import Entry, Group, NoEffect, Refused, Section, subsection
from ...utils.schema.values import Value, need_of, shown

MARK = "<!-- `python -m xds.launcher.command_line.config_docs docs/config.md` writes what follows. -->\n"
_NOTES = {
    "optimizer": "No argument is required. Muon, for matrices: the first of `muon_lr`, `lr` and 0.02; for "
    "other parameters: the first of `adam_lr`, `lr` and 3e-4. `torch_adam`: the default of `weight_decay` "
    "is 0.01, unless `adam_w_mode` is false.",
    "scheduler": "`warmup_max_lr` = null: the learning rate of each parameter group. `warmup_num_steps` = 0 "
    "or 1: taken as 2, as in DeepSpeed before 0.19.6. `cycle_second_step_size`, `cycle_second_stair_count` "
    "= null: as in the first half.",
}


def reference() -> str:
    """The part of the page after the mark, as Markdown."""
    filled = [(f"`{glob}`", wanted) for glob, wanted in MUST_BE_FILLED.items()]
    auto = '## Keys whose "auto" only an integration fills\n\n' + _table("key | write", filled)
    return "\n".join([auto, *_sections(Config, ""), *_classes()])


def _table(head: str, rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    line = "|---" * len(rows[0]) + "|"
    return "\n".join([f"| {head} |", line, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _sections(model: type[Section], path: str) -> Iterator[str]:
    """The table of a section, and those of the sections in it."""
    spelled: dict[str, str] = {}
    for other, name in model.aliases.items():
        spelled[name] = f"{spelled.get(name, f'`{name}`')}, `{other}`"
    rows = []
    for name, schema in model.model_json_schema()["properties"].items():
        if name in model.results or subsection(model, name):
            continue
        default = shown(schema.get("default", {}))  # a schema does not have what a factory makes
        ends = "computed if it is not given" if name in COMPUTED else f"default `{default}`"
        text = f"{schema['description']}; {need_of(schema)}; {ends}"
        rows.append((spelled.get(name, f"`{name}`"), "supported", text))
    values = {name: each for name, each in model.others.items() if isinstance(each, Value)}
    rows += [(spelled.get(name, f"`{name}`"), *_status(each)) for name, each in values.items()]
    doc = f"{(model.__doc__ or '').splitlines()[0]}\n\n" if path else ""
    yield f"## {f'`{path}`' if path else 'Top level'}\n\n{doc}" + _table(
        "key | status | meaning", rows
    )
    for name in model.model_fields:
        inner = subsection(model, name)
        if inner is not None:
            yield from _sections(inner, f"{path}.{name}" if path else name)
    yield from _groups(model.others, path)


def _groups(entries: Mapping[str, Entry], path: str) -> Iterator[str]:
    for name, group in entries.items():
        if not isinstance(group, Group):
            continue
        here = f"{path}.{name}" if path else name
        values = {key: each for key, each in group.keys.items() if isinstance(each, Value)}
        details = [f"`{key}`" for key, each in values.items() if type(each) is Value]
        rows = [
            (f"`{key}`", *_status(each)) for key, each in values.items() if type(each) is not Value
        ]
        text = " ".join(
            [
                f"{group.what[:1].upper()}{group.what[1:]}.",
                *([f"Refused if it is given: {group.present}."] if group.present else []),
                *(["Other keys may appear and are not checked."] if group.open else []),
                *(
                    [f"Details, checked for their type only: {', '.join(details)}."]
                    if details
                    else []
                ),
            ]
        )
        table = _table("key | status | meaning", rows)
        yield f"## `{here}`\n\n{text}\n" + (f"\n{table}" if table else "")
        yield from _groups(group.keys, here)


def _status(entry: Value) -> tuple[str, str]:
    if isinstance(entry, NoEffect):
        quiet = f"; no warning for {_listed(*entry.same)}" if entry.same else ""
        return "no effect", f"{entry.why}{quiet}"
    if isinstance(entry, Refused):
        return "refused", f"{entry.why}; accepted values: {_listed(*entry.harmless, None)}"
    return "detail", "checked for its type only"


def _listed(*values: object) -> str:
    return " or ".join(f"`{shown(value)}`" for value in values)


def _classes() -> Iterator[str]:
    from ...engine.optim import schedules  # imported late: these import torch

    yield _arguments(OPTIMIZERS, {name: each.load() for name, each in REGISTERED.items()})
    yield _arguments(SCHEDULERS, {name: getattr(schedules, name) for name in SCHEDULERS.built_in})


def _arguments(classes: ClassTable, built: Mapping[str, type]) -> str:
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, table in classes.built_in.items():
        parameters = signature(built[name]).parameters
        for key, entry in table.items():
            status, text = _status(entry)
            if type(entry) is Value:
                row = key, entry.need, _default(parameters.get(key))
            else:
                row = key, f"{status}: {text}", ""
            found.setdefault(row, []).append(name)
    rows = [
        (f"`{key}`", "all" if len(names) == len(classes.built_in) else ", ".join(names), *more)
        for (key, *more), names in found.items()
    ]
    reasons: dict[str, list[str]] = {}
    for name, why in classes.refused.items():
        reasons.setdefault(why, []).append(name)
    return "\n\n".join(
        [
            f"## `{classes.section}.params`",
            f"Types: {', '.join(classes.built_in)}.",
            _table("argument | of | value | default", rows).rstrip(),
            _NOTES[classes.section],
            f"Classes of torch, with torch's own arguments and defaults: {', '.join(classes.from_torch)}.",
            "Refused types:",
            "\n".join(f"- {', '.join(names)}: {why}" for why, names in reasons.items()) + "\n",
        ]
    )


def _default(parameter: Parameter | None) -> str:
    if parameter is None:
        return ""
    return "required" if parameter.default is Parameter.empty else f"`{shown(parameter.default)}`"


def main(path: str) -> None:
    """Rewrite the reference in the page at `path`."""
    page = Path(path)
    page.write_text(page.read_text().partition(MARK)[0] + MARK + "\n" + reference())


if __name__ == "__main__":
    main(sys.argv[1])
