"""Tables of config keys that xds does not read itself, and the complaints about a file.

Each folder lists the keys of its section as data: `NoEffect` (accepted, with the reason why it is
not needed), `Refused` (with reason and remedy, unless the value changes nothing), `Detail` (belongs
to a feature whose switch is another key) and `Group` (an object with keys of its own). The check
and the documentation are made from the same tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, final

from ..quoting import printable
from .rules import Rule, shown

AUTO = "auto"
HINTS = 20  # unknown keys that get one: to look for the nearest name takes milliseconds
HINT_CHARS = 64  # a longer key resembles none
LISTED_KEYS = 8  # an unknown key in a section of at most so many keys is answered with all of them


@final
@dataclass(frozen=True)
class NoEffect:
    """Accepted; nothing happens. Values in `same` say what xds does anyway and need no warning."""

    rule: Rule
    why: str
    same: tuple[object, ...] = ()


@final
@dataclass(frozen=True)
class Refused:
    """Refused with reason and remedy unless the value is `harmless`, that is, changes nothing.

    `missing` is the value to assume when the section is there without this key.
    """

    rule: Rule
    why: str
    harmless: tuple[object, ...] = ()
    missing: object = None


@final
@dataclass(frozen=True)
class Detail:
    """Belongs to a feature whose switch is another key: checked for its type only."""

    rule: Rule


@final
@dataclass(frozen=True)
class Group:
    """An object with keys of its own. `present` refuses it whenever it is there and not empty."""

    keys: Mapping[str, Entry]
    what: str
    open: bool = False
    present: str = ""


Entry = NoEffect | Refused | Detail | Group


@final
@dataclass
class Report:
    """What was found while reading one config; `elsewhere(key)` lists paths of that name."""

    complaints: list[str] = field(default_factory=list)
    without_effect: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    auto_keys: list[str] = field(default_factory=list)
    elsewhere: Callable[[str], list[str]] = field(default=lambda key: [])
    num_unknown: int = 0

    def complain(self, path: str, value: object, need: str) -> None:
        self.complaints.append(f"{path} = {shown(value)}: {need}")


def joined(path: str, key: str) -> str:
    """The path of a key, as it is written in a message: a key of the file may hold anything."""
    shown_key = printable(key)
    return f"{path}.{shown_key}" if path else shown_key


def unknown_key(path: str, value: object, known: Iterable[str], report: Report) -> None:
    """Complain about a key that nobody knows, with the nearest name."""
    report.num_unknown += 1
    key = path.rpartition(".")[2]
    if report.num_unknown > HINTS or len(key) > HINT_CHARS:
        report.complain(path, value, "unknown key; remove it, or see docs/config.md for the keys")
        return
    names = sorted(known)
    near = get_close_matches(key, names, n=1, cutoff=0.6)
    homes = report.elsewhere(key)
    if len(homes) == 1:
        hint = f'it belongs to "{homes[0]}"'
    elif near:
        hint = f'did you mean "{near[0]}"?'
    elif len(names) <= LISTED_KEYS:
        hint = f"the keys here are {', '.join(names)}" if names else "no key is known here"
    else:
        hint = "remove it, or see docs/config.md for the keys"
    report.complain(path, value, f"unknown key; {hint}")


def check_entry(entry: Entry, value: object, path: str, report: Report) -> None:
    """Check one key of a table and file what is to be said about it. null and "auto" mean unset."""
    if value is None or (value == AUTO and not isinstance(entry, Group)):
        return
    if isinstance(entry, Group):
        _check_group(entry, value, path, report)
        return
    try:
        entry.rule.read(value)
    except ValueError as error:
        report.complain(path, value, str(error))
        return
    if isinstance(entry, NoEffect) and not _among(value, entry.same):
        report.without_effect.append((path, entry.why))
    elif isinstance(entry, Refused) and not _among(value, entry.harmless):
        report.complain(path, value, entry.why)


def _check_group(group: Group, value: object, path: str, report: Report) -> None:
    if not isinstance(value, dict):
        report.complain(path, value, "must be an object {...}")
        return
    if group.present and value:
        report.complain(path, value, group.present)
    for key, inner in value.items():
        entry = group.keys.get(key)
        if entry is not None:
            check_entry(entry, inner, joined(path, key), report)
        elif not group.open:
            unknown_key(joined(path, key), inner, group.keys, report)
    for key, entry in group.keys.items():
        if value and key not in value and isinstance(entry, Refused):
            check_entry(entry, entry.missing, joined(path, key), report)


def _among(value: object, values: tuple[object, ...]) -> bool:
    folded = value.casefold() if isinstance(value, str) else value
    return any(folded == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def details(rule: Rule, *names: str) -> dict[str, Entry]:
    """Several `Detail` keys of one type."""
    return {name: Detail(rule) for name in names}


def refused_together(names: Iterable[str], entry: Refused) -> dict[str, Entry]:
    """Several keys refused for one reason."""
    return {name: entry for name in names}


def plain(value: Any) -> Any:
    """A deep copy made of dict, list and scalars only: what is read never touches the caller's."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value
