"""Checks a `{"type": ..., "params": {...}}` section: the name of a class and its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from ...utils.schema.keys import (
    HINT_CHARS,
    NoEffect,
    Refused,
    Report,
    check_entry,
    is_auto,
    is_comment,
    joined,
    unknown_key,
)
from ...utils.schema.nearest import nearest
from ...utils.schema.rules import Rule, number, shown

Param = Rule | NoEffect | Refused
RATE = number(0, 1e10)  # of learning; in a checkpoint as well


@final
@dataclass(frozen=True)
class ClassTable:
    """The classes that the key `type` of a section can name.

    what: the kind of class, for messages; example: one of them.
    built_in, from_torch: classes of xds and of torch, each with its arguments.
    refused: other known names, each with the reason.
    other_names: names of other libraries, in lower case -> the class that does the same.
    """

    section: str
    what: str
    example: str
    built_in: Mapping[str, Mapping[str, Param]]
    from_torch: Mapping[str, Mapping[str, Param]]
    refused: Mapping[str, str]
    other_names: Mapping[str, str] = field(default_factory=dict)

    def table(self, name: str) -> Mapping[str, Param]:
        """The arguments of the class that `find` returned."""
        return self.built_in[name] if name in self.built_in else self.from_torch[name]

    def find(self, given: str, report: Report) -> str | None:
        """The canonical spelling of the name `given`, in any case; None, with a complaint, if not usable."""
        path = f"{self.section}.type"
        if not given:
            if path in report.auto_keys or report.complaints:
                return None  # another complaint may say so
            report.complaints.append(f"{path}: is missing; write for example {self.example}")
            return None
        refused = {name.casefold(): why for name, why in self.refused.items()}
        if given.casefold() in refused:
            report.complain(path, given, refused[given.casefold()])
            return None
        names = {name.casefold(): name for name in (*self.built_in, *self.from_torch)}
        if given.casefold() in names:
            return names[given.casefold()]
        hits = [self.other_names[given.casefold()]] if given.casefold() in self.other_names else []
        hits = hits or nearest(given[:HINT_CHARS], names.values())
        hint = f"did you mean {hits[0]}?" if hits else f"use {', '.join(names.values())}"
        report.complain(path, given, f"no {self.what} has this name; {hint}")
        return None


def read_params(
    table: Mapping[str, Param], params: Mapping[str, Any], path: str, report: Report
) -> dict[str, Any]:
    """The arguments that take effect, read by their rules; all others are added to the report.

    null means that an argument is not given, unless its rule accepts null.
    """
    result: dict[str, Any] = {}
    for key, value in params.items():
        if is_comment(key):
            continue
        here = joined(path, key)
        entry = table.get(key)
        if is_auto(value) and not (isinstance(entry, Rule) and entry.takes_auto):
            continue  # `fill_auto` has reported it
        if entry is None:
            unknown_key(path, key, value, table, report)
        elif isinstance(entry, Rule):
            try:
                result[key] = entry.read(value)
            except ValueError as error:
                if value is not None:
                    report.complain(here, value, str(error))
        else:
            check_entry(entry, value, here, report)
    return result


def require(params: Mapping[str, Any], names: Iterable[str], path: str, report: Report) -> None:
    """Report arguments that have no default and are not given."""
    if report.complaints:  # one of them may be misspelled
        return
    for name in names:
        if params.get(name) is None:
            report.complaints.append(f"{joined(path, name)}: is missing; it has no default")


def describe(table: Mapping[str, Param]) -> list[tuple[str, str]]:
    """(name, valid values or status) of each argument, for the documentation."""
    return [
        (name, entry.need if isinstance(entry, Rule) else shown_status(entry))
        for name, entry in table.items()
    ]


def shown_status(entry: NoEffect | Refused) -> str:
    if isinstance(entry, NoEffect):
        return f"no effect: {entry.why}"
    allowed = " or ".join(shown(value) for value in entry.harmless)
    return f"refused{f' unless {allowed}' if allowed else ''}: {entry.why}"
