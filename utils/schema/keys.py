"""Tables of config keys that xds does not read itself, and the report of the problems in a file.

Each folder lists the keys of its section as data: `NoEffect` (accepted, with the reason why it is
not needed), `Refused` (with reason and remedy, unless the value changes nothing), `Detail` (belongs
to a feature that another key switches on) and `Group` (an object with keys of its own). The check
and the documentation are generated from the same tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from ..quoting import printable
from .nearest import nearest
from .rules import Rule, shown

AUTO = "auto"
HINTS = 20  # how many unknown keys get a hint: finding the nearest name takes milliseconds
HINT_CHARS = 64  # a longer key gets no hint
LISTED_KEYS = (
    8  # in a section of at most so many keys, the message about an unknown key lists them all
)
COMMENT = "_"  # a key that begins with it is a comment: JSON has no other


def is_auto(value: object) -> bool:
    """The value is the text "auto", in any case."""
    return isinstance(value, str) and value.casefold() == AUTO


def is_comment(key: str) -> bool:
    """The key is a comment of the file's author: neither it nor its value is read."""
    return key.startswith(COMMENT)


@final
@dataclass(frozen=True)
class NoEffect:
    """Accepted without effect. Values in `same` describe what xds does anyway and need no warning."""

    rule: Rule
    why: str
    same: tuple[object, ...] = ()


@final
@dataclass(frozen=True)
class Refused:
    """Refused with reason and remedy, unless the value is in `harmless`: those change nothing.

    `missing` is the value to assume where the section is present without this key.
    """

    rule: Rule
    why: str
    harmless: tuple[object, ...] = ()
    missing: object = None


@final
@dataclass(frozen=True)
class Detail:
    """Belongs to a feature that another key switches on; only its type is checked."""

    rule: Rule


@final
@dataclass(frozen=True)
class Group:
    """An object with keys of its own. Where `present` is set, a non-empty object is refused with that text."""

    keys: Mapping[str, Entry]
    what: str
    open: bool = False
    present: str = ""


Entry = NoEffect | Refused | Detail | Group


@final
@final
@dataclass
class Report:
    """The findings of reading one config.

    `meant(section, key, names)` is a sentence about what an unknown key of a section may mean, where that is
    known; `names` are those of the section.
    """

    complaints: list[str] = field(default_factory=list)
    without_effect: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    auto_keys: list[str] = field(default_factory=list)
    meant: Callable[[str, str, list[str]], str | None] = field(
        default=lambda section, key, names: None
    )
    num_unknown: int = 0

    def complain(self, path: str, value: object, need: str) -> None:
        self.complaints.append(f"{path} = {shown(value)}: {need}")


def joined(path: str, key: str) -> str:
    """The path of a key for a message. A key of the file may contain any characters."""
    shown_key = printable(key)
    return f"{path}.{shown_key}" if path else shown_key


def unknown_key(
    section: str, key: str, value: object, known: Iterable[str], report: Report
) -> None:
    """Report an unknown key of `section` (a path), with a hint such as the nearest known name."""
    path = joined(section, key)
    report.num_unknown += 1
    if report.num_unknown > HINTS or len(key) > HINT_CHARS:
        report.complain(path, value, "unknown key; remove it, or see docs/config.md for the keys")
        return
    names = sorted(known)
    meant = report.meant(section, key, names)
    near = [] if meant is not None else nearest(key, names)
    if near:
        meant = f'did you mean "{near[0]}"?'
    elif meant is None and not names:
        meant = "no key is known here"
    elif meant is None and len(names) <= LISTED_KEYS:
        meant = f"the keys here are {', '.join(names)}"
    elif meant is None:
        meant = "remove it, or see docs/config.md for the keys"
    report.complain(path, value, f"unknown key; {meant}")


def check_entry(entry: Entry, value: object, path: str, report: Report) -> None:
    """Check one key of a table and add its problems to `report`. null and "auto" mean unset."""
    if value is None or (is_auto(value) and not isinstance(entry, Group)):
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
        elif not group.open and not is_comment(key):
            unknown_key(path, key, inner, group.keys, report)
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
    """A deep copy made of dict, list and scalars only, so that reading never changes the caller's object."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value
