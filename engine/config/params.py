"""Checking a `{"type": ..., "params": {...}}` section: the name of a class and its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from ...utils.schema.keys import (
    AUTO,
    HINT_CHARS,
    NoEffect,
    Refused,
    Report,
    check_entry,
    joined,
    unknown_key,
)
from ...utils.schema.rules import Rule, shown

Param = Rule | NoEffect | Refused


def canonical_name(given: str, known: Iterable[str]) -> str | None:
    """The name as it is spelled in `known`, found without regard to case."""
    folded = given.casefold()
    return next((name for name in known if name.casefold() == folded), None)


def unknown_type(path: str, given: str, known: Iterable[str], what: str, report: Report) -> None:
    """Complain about a class name that nobody knows, with the nearest names."""
    names = {name.casefold(): name for name in known}
    near = [
        names[hit]
        for hit in get_close_matches(given[:HINT_CHARS].casefold(), names, n=3, cutoff=0.5)
    ]
    hint = f"did you mean {' or '.join(near)}?" if near else f"use {', '.join(names.values())}"
    report.complain(path, given, f"no {what} has this name; {hint}")


def read_params(
    table: Mapping[str, Param], params: Mapping[str, Any], path: str, report: Report
) -> dict[str, Any]:
    """The arguments that take effect, read by their rules; everything else goes to the report."""
    result: dict[str, Any] = {}
    for key, value in params.items():
        here = joined(path, key)
        entry = table.get(key)
        if value == AUTO:
            continue  # complained about where "auto" is settled
        if entry is None:
            unknown_key(here, value, table, report)
        elif isinstance(entry, Rule):
            try:
                result[key] = entry.read(value)
            except ValueError as error:
                report.complain(here, value, str(error))
        else:
            check_entry(entry, value, here, report)
    return result


def require(params: Mapping[str, Any], names: Iterable[str], path: str, report: Report) -> None:
    """Complain about arguments that have no default and are not given."""
    for name in names:
        if name not in params:
            report.complaints.append(f"{joined(path, name)}: is missing; it has no default")


def describe(table: Mapping[str, Param]) -> list[tuple[str, str]]:
    """(name, what it must be or why it has no effect) for the documentation."""
    return [
        (name, entry.need if isinstance(entry, Rule) else shown_status(entry))
        for name, entry in table.items()
    ]


def shown_status(entry: NoEffect | Refused) -> str:
    if isinstance(entry, NoEffect):
        return f"no effect: {entry.why}"
    allowed = " or ".join(shown(value) for value in entry.harmless)
    return f"refused{f' unless {allowed}' if allowed else ''}: {entry.why}"
