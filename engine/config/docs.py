"""Writes docs/config.md from the tables: `python -m xds.engine.config.docs > docs/config.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...utils.schema.keys import Detail, Entry, Group, NoEffect, Refused
from ...utils.schema.rules import shown
from ...utils.schema.section import Section, rule_of, subsection
from . import optimizer as config_optimizer
from . import scheduler as config_scheduler
from .auto import COMPUTED, MUST_BE_FILLED
from .config import Config
from .params import Param, describe

INTRO = """\
# The config

<!-- `python -m xds.engine.config.docs > docs/config.md` writes this page from the tables. -->

The JSON uses DeepSpeed's keys with DeepSpeed's meaning. `xds check FILE --world-size N` says what
a file means. `xds.Config.load` takes a path, JSON text, base64 of it, a dict (which is never
changed) or a `Config`.

## Rules

- **Every key has a status.** *Supported*; *no effect*: accepted, because xds does not need it, and
  named once in a warning with the reason (a value that already says what xds does is not named);
  *refused*: with reason and remedy, unless the value changes nothing (`false`, `"none"`, size 1).
- **Unknown keys are errors**, with the nearest name. So are keys that are there twice.
- **All complaints come at once**, each with its full key path; malformed JSON names line, column.
- **Files** may hold `//`, `#` and `/* */` comments and trailing commas.
- **Numbers.** `5e8` is a whole number. Sizes in elements are rounded (`0.9 * hidden * hidden`);
  counts such as batch sizes are not. `"1.0"` is text, and `true` is no number.
- **null** means "not set".
- **Batch sizes.** `train_batch_size` = `train_micro_batch_size_per_gpu` x
  `gradient_accumulation_steps` x data-parallel ranks. Any two give the third; `train_batch_size` or
  the micro-batch alone means no accumulation; at least one of these two must be there.
- **gradient_clipping** that is not there means no clipping (DeepSpeed: 1.0 since its 0.19).
- **Adam** decouples weight decay like AdamW unless `adam_w_mode` is false, as in DeepSpeed.
- **activation_checkpointing** works by being there; `"enabled": false` switches it off.
- **dtypes** have their usual names: `bf16`, `bfloat16`, `torch.bfloat16`, ...

## "auto"

1. An integration fills it: `Config.load(source, auto={"optimizer.params.lr": 1e-4})`, or
   `xds check FILE --auto optimizer.params.lr=1e-4`.
2. The batch sizes are computed from one another and the number of ranks.
3. `gradient_clipping` becomes 1.0, the value that Trainer and Accelerate fill in by default.
4. Refused by name where only the training script can know:
"""

AUTO_END = "5. Everywhere else the default is used, and the notes of the config say so.\n"


def main() -> None:
    """Print the page."""
    print(page(), end="")


def page() -> str:
    """The whole page as Markdown."""
    refused_auto = "".join(
        f"   - `{glob}`: write {wanted}\n" for glob, wanted in MUST_BE_FILLED.items()
    )
    parts = [INTRO + refused_auto + AUTO_END, *_sections(Config, ""), *_classes()]
    return "\n".join(parts)


def _sections(model: type[Section], path: str) -> Iterator[str]:
    title = f"`{path}`" if path else "Top level"
    doc = "" if not path else f"{_first_line(model)}\n\n"
    yield f"## {title}\n\n{doc}{_table(_rows(model))}"
    for name in model.model_fields:
        inner = subsection(model, name)
        if inner is not None:
            yield from _sections(inner, f"{path}.{name}" if path else name)
    for name, entry in model.others.items():
        if isinstance(entry, Group):
            yield from _group(entry, f"{path}.{name}" if path else name)


def _first_line(model: type[Section]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0]


def _rows(model: type[Section]) -> Iterator[tuple[str, str, str]]:
    spellings: dict[str, list[str]] = {}
    for other, name in model.aliases.items():
        spellings.setdefault(name, []).append(other)
    for name, field in model.model_fields.items():
        if name in model.results or subsection(model, name) is not None:
            continue
        need = rule_of(model, name).need
        default = shown(field.get_default(call_default_factory=True))
        ends = "computed when it is not there" if name in COMPUTED else f"default `{default}`"
        yield _named(name, spellings), "supported", f"{field.description}; {need}; {ends}"
    for name, entry in model.others.items():
        if not isinstance(entry, Group):
            yield _named(name, spellings), *_status(entry)


def _named(name: str, spellings: Mapping[str, list[str]]) -> str:
    return ", ".join(f"`{each}`" for each in (name, *spellings.get(name, ())))


def _group(group: Group, path: str) -> Iterator[str]:
    what = [f"{group.what[:1].upper()}{group.what[1:]}."]
    if group.present:
        what.append(f"Refused where it is there: {group.present}.")
    if group.open:
        what.append("Other keys may appear and are not checked.")
    spare = [f"`{name}`" for name, entry in group.keys.items() if isinstance(entry, Detail)]
    if spare:
        what.append(f"Details, checked for their type only: {', '.join(spare)}.")
    rows = [
        (f"`{name}`", *_status(entry))
        for name, entry in group.keys.items()
        if isinstance(entry, (NoEffect, Refused))
    ]
    yield f"## `{path}`\n\n{' '.join(what)}\n\n{_table(iter(rows))}".rstrip("\n") + "\n"
    for name, entry in group.keys.items():
        if isinstance(entry, Group):
            yield from _group(entry, f"{path}.{name}")


def _status(entry: Entry) -> tuple[str, str]:
    if isinstance(entry, NoEffect):
        quiet = f"; not named when {_listed(entry.same)}" if entry.same else ""
        return "no effect", f"{entry.why}{quiet}"
    if isinstance(entry, Refused):
        return "refused", f"{entry.why}; passes when {_listed((*entry.harmless, None))}"
    return "detail", "checked for its type only"


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(f"`{shown(value)}`" for value in values)


def _table(rows: Iterator[tuple[str, str, str]]) -> str:
    lines = [f"| {key} | {status} | {says} |" for key, status, says in rows]
    if not lines:
        return ""
    return "\n".join(["| key | status | meaning |", "|---|---|---|", *lines]) + "\n"


def _classes() -> Iterator[str]:
    yield from _types(
        "optimizer.params",
        config_optimizer.BUILT_IN,
        config_optimizer.TORCH_OPTIMIZERS,
        config_optimizer.REFUSED_TYPES,
    )
    yield from _types(
        "scheduler.params",
        config_scheduler.BUILT_IN,
        config_scheduler.TORCH_SCHEDULERS,
        config_scheduler.REFUSED_TYPES,
    )


def _types(
    path: str,
    built_in: Mapping[str, Mapping[str, Param]],
    from_torch: tuple[str, ...],
    refused: Mapping[str, str],
) -> Iterator[str]:
    arguments: dict[tuple[str, str], list[str]] = {}
    for name, table in built_in.items():
        for key, says in describe(table):
            arguments.setdefault((key, says), []).append(name)
    rows = [
        f"| `{key}` | {'all' if len(names) == len(built_in) else ', '.join(names)} | {says} |"
        for (key, says), names in arguments.items()
    ]
    reasons: dict[str, list[str]] = {}
    for name, why in refused.items():
        reasons.setdefault(why, []).append(name)
    lines = [f"- {', '.join(names)}: {why}" for why, names in reasons.items()]
    table_text = "\n".join(["| argument | of | value |", "|---|---|---|", *rows])
    yield (
        f"## `{path}`\n\nTypes: {', '.join(built_in)}.\n\n{table_text}\n\n"
        f"Classes of torch, with torch's own arguments: {', '.join(from_torch)}.\n\n"
        "Refused types:\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
