"""Generates docs/config.md from the config classes: `python -m xds.engine.config.docs > docs/config.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

from ...utils.schema.keys import Detail, Entry, Group, NoEffect, Refused
from ...utils.schema.rules import Rule, shown
from ...utils.schema.section import Section, rule_of, subsection
from .auto import COMPUTED, MUST_BE_FILLED
from .config import Config
from .optimizer import OPTIMIZERS
from .params import ClassTable, describe
from .scheduler import SCHEDULERS

INTRO = """\
# The config

<!-- `python -m xds.engine.config.docs > docs/config.md` generates this page from the config classes. -->

- The keys are DeepSpeed's, with DeepSpeed's meaning.
- `xds check FILE --world-size N` shows what a file means.
- `xds.Config.load` takes a path, JSON text, base64 of it, a dict (which is never changed) or a `Config`.

## Rules

- **Every key has a status.**
  - *Supported*: it does what its description says.
  - *No effect*: xds accepts the key but does not need it. One line of the log names all such keys of a
    file, once. `xds check` gives the reasons. A value that describes what xds does is not named.
  - *Refused*: an error with reason and remedy, unless the value changes nothing (`false`, `"none"`,
    size 1).
  - *Detail*: it belongs to a feature that another key enables. xds checks only its type.
- **Unknown keys are errors**; the message names the nearest key. Duplicate keys are errors too.
- **All wrong and unknown keys are reported at once**, each with its full key path; where there is none, all
  that do not go together. For malformed JSON the message names line and column.
- **Files** may contain `//` comments. With the package `hjson` they may also be
  [Hjson](https://hjson.github.io), as in DeepSpeed: other comments, trailing commas, keys and text
  without quotes.
- **Comment keys** begin with `_` (`"_comment": "..."`). They are ignored in every section.
- **Numbers.** `5e8` is a whole number. Sizes in elements are rounded (`0.9 * hidden * hidden`);
  counts such as batch sizes are not. `"1.0"` is text, and `true` is not a number.
- **null** means "not set": the default is used. For some keys null is a value of its own; their
  descriptions name it.
- **Batch sizes.** `train_batch_size` = `train_micro_batch_size_per_gpu` x
  `gradient_accumulation_steps` x data-parallel ranks. Any two give the third. `train_batch_size`
  alone, or the micro-batch alone, means no accumulation. At least one of these two must be given.
  Data-parallel ranks are all ranks divided by `pipeline.stages`.
  This is checked when the number of ranks is known: in `xds.initialize` and `xds check`.
- **gradient_clipping**: without this key gradients are not clipped (DeepSpeed: 1.0 since version 0.19).
- **Adam** decouples weight decay like AdamW unless `adam_w_mode` is false, as in DeepSpeed.
- **activation_checkpointing**: the section alone enables it. `"enabled": false` disables it, and so do flags
  that are all false.
- **dtypes** have their usual names: `bf16`, `bfloat16`, `torch.bfloat16`, ...

## "auto"

1. An integration fills it in: `Config.load(source, auto={"optimizer.params.lr": 1e-4})`, or
   `xds check FILE --auto optimizer.params.lr=1e-4`. `xds check` alone fills in what a Trainer knows, with the
   defaults of TrainingArguments.
2. The batch sizes are computed from one another and the number of ranks.
3. `gradient_clipping` becomes 1.0, the value that Trainer and Accelerate fill in by default.
4. It is an error for these keys, which only the training script can know:
"""

_OPTIMIZER_NOTES = (
    "No argument is required.",
    "Muon, for matrices: the first of `muon_lr`, `lr` and 0.02. For other parameters: the first of `adam_lr`, "
    "`lr` and 3e-4.",
    "`torch_adam`: the default of `weight_decay` is 0.01, unless `adam_w_mode` is false.",
)
_SCHEDULER_NOTES = (
    "`warmup_max_lr` = null: the learning rate of each parameter group.",
    "`warmup_num_steps` = 0 or 1: taken as 2, as in DeepSpeed before 0.19.6.",
    "`cycle_second_step_size`, `cycle_second_stair_count` = null: as in the first half.",
)

AUTO_END = """\
5. For `zero_optimization.offload_optimizer.ratio` it is a value of its own.
6. For all other keys it means the default; the config's notes list them.
"""


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
        ends = "computed if it is not given" if name in COMPUTED else f"default `{default}`"
        yield _named(name, spellings), "supported", f"{field.description}; {need}; {ends}"
    for name, entry in model.others.items():
        if not isinstance(entry, Group):
            yield _named(name, spellings), *_status(entry)


def _named(name: str, spellings: Mapping[str, list[str]]) -> str:
    return ", ".join(f"`{each}`" for each in (name, *spellings.get(name, ())))


def _group(group: Group, path: str) -> Iterator[str]:
    what = [f"{group.what[:1].upper()}{group.what[1:]}."]
    if group.present:
        what.append(f"Refused if it is given: {group.present}.")
    if group.open:
        what.append("Other keys may appear and are not checked.")
    only_typed = [f"`{name}`" for name, entry in group.keys.items() if isinstance(entry, Detail)]
    if only_typed:
        what.append(f"Details, checked for their type only: {', '.join(only_typed)}.")
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
        quiet = f"; no warning for {_listed(entry.same)}" if entry.same else ""
        return "no effect", f"{entry.why}{quiet}"
    if isinstance(entry, Refused):
        return "refused", f"{entry.why}; accepted values: {_listed((*entry.harmless, None))}"
    return "detail", "checked for its type only"


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(f"`{shown(value)}`" for value in values)


def _table(rows: Iterator[tuple[str, str, str]]) -> str:
    lines = [f"| {key} | {status} | {meaning} |" for key, status, meaning in rows]
    if not lines:
        return ""
    return "\n".join(["| key | status | meaning |", "|---|---|---|", *lines]) + "\n"


def _classes() -> Iterator[str]:
    from ...ops.optim.adam import Adam  # imported late: these import torch
    from ..optim import schedules
    from ..optim.optimizers import ONE_PASS, OWN

    yield _types(OPTIMIZERS, {**OWN, **ONE_PASS, "Adam": Adam, "AdamW": Adam}, _OPTIMIZER_NOTES)
    yield _types(
        SCHEDULERS,
        {name: getattr(schedules, name) for name in SCHEDULERS.built_in},
        _SCHEDULER_NOTES,
    )


def _default(parameter: Parameter | None) -> str:
    if parameter is None:
        return ""
    if parameter.default is Parameter.empty:
        return "required"
    return f"`{shown(parameter.default)}`"


def _types(classes: ClassTable, built: Mapping[str, type], notes: Sequence[str]) -> str:
    arguments: dict[tuple[str, str, str], list[str]] = {}
    for name, table in classes.built_in.items():
        parameters = signature(built[name]).parameters
        for key, value in describe(table):
            is_read = isinstance(table[key], Rule)
            default = _default(parameters.get(key)) if is_read else ""
            arguments.setdefault((key, value, default), []).append(name)
    num_all = len(classes.built_in)
    rows = [
        f"| `{key}` | {'all' if len(names) == num_all else ', '.join(names)} | {value} | {default} |"
        for (key, value, default), names in arguments.items()
    ]
    reasons: dict[str, list[str]] = {}
    for name, why in classes.refused.items():
        reasons.setdefault(why, []).append(name)
    lines = [f"- {', '.join(names)}: {why}" for why, names in reasons.items()]
    header = ["| argument | of | value | default |", "|---|---|---|---|"]
    table_text = "\n".join([*header, *rows])
    notes_text = "\n".join(f"- {note}" for note in notes)
    return (
        f"## `{classes.section}.params`\n\nTypes: {', '.join(classes.built_in)}.\n\n{table_text}\n\n"
        f"{notes_text}\n\n"
        f"Classes of torch, with torch's own arguments and defaults: {', '.join(classes.from_torch)}.\n\n"
        "Refused types:\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
