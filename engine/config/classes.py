"""Checks a `{"type": ..., "params": {...}}` section: the name of a class and its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from ...ops.optim.config import FREEZE_STEP
from ...utils.schema.section import (
    HINT_CHARS,
    NoEffect,
    Refused,
    Report,
    check_entry,
    is_auto,
    is_comment,
    joined,
    nearest,
)
from ...utils.schema.values import Count, Flag, Value

FLAG_OR_NULL = Value(Flag | None)
COUNT_OR_NULL = Value(Count | None)


@final
@dataclass(frozen=True)
class ClassTable:
    """The classes that the key `type` of a section can name.

    what: the kind of class, for messages; example: one of them.
    built_in, from_torch: classes of xds and of torch, each with its arguments.
    required: the arguments without a default.
    refused: other known names, each with the reason.
    other_names: names of other libraries, in lower case -> the class that does the same.
    """

    section: str
    what: str
    example: str
    built_in: Mapping[str, Mapping[str, Value]]
    from_torch: Mapping[str, Mapping[str, Value]]
    required: Mapping[str, tuple[str, ...]]
    refused: Mapping[str, str]
    other_names: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, name: str) -> dict[str, Value]:
        """The arguments of a class that take effect."""
        table = self.built_in.get(name) or self.from_torch.get(name) or {}
        return {key: each for key, each in table.items() if type(each) is Value}

    def argument(self, kind: object, key: str) -> Value | None:
        """The argument `key` of the class `kind`; of any class where `kind` is none. None: it has no effect."""
        tables = {**self.built_in, **self.from_torch}
        own = [each for name, each in tables.items() if _is_same(name, kind)]
        found = next((each[key] for each in own or tables.values() if key in each), None)
        return found if type(found) is Value else None

    def read(self, values: dict[str, Any], report: Report) -> str:
        """Replace `type` by its canonical spelling, and `params` by the arguments that take effect.

        Returns the type, or "" where it is none.
        """
        given, params = values.get("type"), values.get("params", {})
        if not isinstance(given, str) or not given:
            return ""  # pydantic says so, or `complain_missing`
        name = self._find(given, report)
        if not isinstance(params, dict):
            return ""
        if name:
            table = {**self.built_in, **self.from_torch}[name]
            read = _read_params(table, params, f"{self.section}.params", report)
            values.update(type=name, params=read)
        return name

    def _find(self, given: str, report: Report) -> str:
        """The spelling of the name `given`, in any case; "", with a complaint, if it is not usable."""
        path, folded = f"{self.section}.type", given.casefold()
        refused = {name.casefold(): why for name, why in self.refused.items()}
        names = {name.casefold(): name for name in (*self.built_in, *self.from_torch)}
        if folded in names:
            return names[folded]
        if folded in refused:
            report.complain(path, given, refused[folded])
            return ""
        hits = [self.other_names[folded]] if folded in self.other_names else []
        hits = hits or nearest(given[:HINT_CHARS], names.values())
        hint = f"did you mean {hits[0]}?" if hits else f"use {', '.join(names.values())}"
        report.complain(path, given, f"no {self.what} has this name; {hint}")
        return ""

    def complain_missing(self, section: Any, report: Report) -> None:
        """Report that the type is not given, or arguments without a default. section: as read."""
        if not section.type:
            text = f"{self.section}.type: is missing; write for example {self.example}"
            report.complaints.append(text)
        for name in self.required.get(section.type, ()):
            if section.params.get(name) is None:
                path = f"{self.section}.params.{name}"
                report.complaints.append(f"{path}: is missing; it has no default")

    def complain_order(self, params: Mapping[str, Any], report: Report, *pairs: str) -> None:
        """Report where the first of a pair of arguments, such as "min_coeff <= max_coeff", is larger."""
        for pair in pairs:
            lowest, _, highest = pair.partition(" <= ")
            low, high = params.get(lowest), params.get(highest)
            if low is not None and high is not None and low > high:
                text = f"must not exceed {highest} ({high:g}); swap the two"
                report.complain(f"{self.section}.params.{lowest}", low, text)


def _is_same(name: str, kind: object) -> bool:
    return isinstance(kind, str) and name.casefold() == kind.casefold()


def _read_params(
    table: Mapping[str, Value], params: Mapping[str, Any], path: str, report: Report
) -> dict[str, Any]:
    """The arguments that take effect; all others are added to the report.

    null means that an argument is not given, unless its type has null.
    """
    result: dict[str, Any] = {}
    for key, value in params.items():
        entry, here = table.get(key), joined(path, key)
        if is_comment(key):
            continue
        if entry is None:
            report.complain_unknown(path, key, value, table)
        elif is_auto(value) and entry is not FREEZE_STEP:
            continue  # `fill_auto` has reported it
        elif isinstance(entry, (NoEffect, Refused)):
            check_entry(entry, value, here, report)
        else:
            try:
                result[key] = entry.read(value)
            except ValueError as error:
                if value is not None:
                    report.complain(here, value, str(error))
    return result
