"""Config sections: frozen pydantic models, and tables of the keys that a section knows and does not read.

A file is read in two passes. `read_section` finds every wrong type and unknown key; rules that need several
keys are checked only where it found none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from operator import getitem
from typing import Annotated, Any, ClassVar, TypeVar, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from ..quoting import printable
from .values import Value, sentence, shown

# -- the name that somebody may have meant by a mistyped one ---------------------------------------------

LIKENESS = 0.75  # of difflib: "lmab" is that near to "lamb"


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The name that is nearest to `name`, without regard to case; none where no name is near.

    >>> nearest("stge", ["stage", "storage"]), nearest("lr", ["backend"])
    (['stage'], [])
    """
    folded = {each.casefold(): each for each in names}
    return [folded[one] for one in get_close_matches(name.casefold(), folded, 1, LIKENESS)]


AUTO = "auto"
HINTS = 20  # how many unknown keys get a hint: finding the nearest name takes milliseconds
HINT_CHARS = 64  # a longer key gets no hint
LISTED_KEYS = 8  # in a section of at most so many keys, an unknown key's message lists them all
COMMENT = "_"  # a key that begins with it is a comment: JSON has no other


def is_auto(value: object) -> bool:
    """The value is the text "auto", in any case."""
    return isinstance(value, str) and value.casefold() == AUTO


def is_comment(key: str) -> bool:
    """The key is a comment of the file's author: neither it nor its value is read."""
    return key.startswith(COMMENT)


def joined(path: str, key: str) -> str:
    """The path of a key for a message. A key of the file may contain any characters."""
    shown_key = printable(key)
    return f"{path}.{shown_key}" if path else shown_key


@final
class NoEffect(Value):
    """Accepted without effect, for the reason `why`. Values in `same` say what xds does anyway."""

    def __init__(self, kind: Any, why: str, same: tuple[object, ...] = ()) -> None:
        super().__init__(kind)
        self.why, self.same = why, same


@final
class Refused(Value):
    """Refused for the reason `why`, unless the value is in `harmless`: those change nothing.

    `missing` is the value to assume where the section is present without this key.
    """

    def __init__(
        self, kind: Any, why: str, harmless: tuple[object, ...] = (), missing: object = None
    ) -> None:
        super().__init__(kind)
        self.why, self.harmless, self.missing = why, harmless, missing


@final
class Group:
    """An object with keys of its own, in one or several tables. `open`: other keys may appear as well.

    Where `present` is set, a non-empty object is refused with that text.
    """

    def __init__(
        self, what: str, *tables: Mapping[str, Entry], open: bool = False, present: str = ""
    ) -> None:
        self.what, self.open, self.present = what, open, present
        self.keys = {key: entry for table in tables for key, entry in table.items()}


Entry = Value | Group  # a plain Value is a detail of a refused feature: only its type is checked


def details(kind: Any, names: str) -> dict[str, Entry]:
    """Several keys of one type that belong to a feature which another key switches on."""
    return dict.fromkeys(names.split(), Value(kind))


@dataclass
class Report:
    """The findings of reading one config."""

    complaints: list[str] = field(default_factory=list)
    without_effect: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    auto_keys: list[str] = field(default_factory=list)
    num_unknown: int = 0

    def complain(self, path: str, value: object, need: str) -> None:
        self.complaints.append(f"{path} = {shown(value)}: {need}")

    def complain_unknown(self, section: str, key: str, value: object, known: Iterable[str]) -> None:
        """An unknown key of `section` (a path), with a hint such as the nearest known name."""
        self.num_unknown += 1
        if self.num_unknown > HINTS or len(key) > HINT_CHARS:
            hint = "remove it, or see docs/config.md for the keys"
        else:
            hint = self.hint(section, key, sorted(known))
        self.complain(joined(section, key), value, f"unknown key; {hint}")

    def hint(self, section: str, key: str, names: list[str]) -> str:
        """What an unknown key of a section with the keys `names` may mean."""
        near = nearest(key, names)
        if near:
            return f'did you mean "{near[0]}"?'
        if not names:
            return "no key is known here"
        if len(names) <= LISTED_KEYS:
            return f"the keys here are {', '.join(names)}"
        return "remove it, or see docs/config.md for the keys"


class Section(BaseModel):
    """Base of every section. Its fields are the keys that xds reads; in a file null means unset.

    `others` are the other known keys, `aliases` maps other spellings to the name of a field or of these.
    `own_auto` are fields to which "auto" is a value of their own; to others it means unset.
    `results` are fields that are computed and are not keys. Fields with `repr=False` hold secrets.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    others: ClassVar[Mapping[str, Entry]] = {}
    aliases: ClassVar[Mapping[str, str]] = {}
    own_auto: ClassVar[frozenset[str]] = frozenset()
    results: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def read_own(cls, values: dict[str, Any], path: str, report: Report) -> None:
        """Change `values`, the section's known keys, where the type of one depends on another."""

    def check_with(self, config: Any, report: Report) -> None:
        """Complain about keys that contradict one another, or other sections of `config`.

        It runs where every type and key is right. A section that reads others declares what it reads, as a
        protocol in its own file.
        """

    def as_dict(self) -> dict[str, Any]:
        """The section as JSON values, with all defaults filled in and secrets masked."""
        names = [name for name in type(self).model_fields if name not in self.results]
        return {name: self.shown_value(name) for name in names}

    def shown_value(self, name: str) -> Any:
        """The value of a field as JSON value. A secret that is set is shown as "***"."""
        value = getattr(self, name)
        is_secret = not type(self).model_fields[name].repr
        return "***" if is_secret and value is not None else _as_json(value)


def nested(model: type[Section], description: str = "") -> Any:
    """A field that is a section, with its defaults where it is not given."""
    return Field(default_factory=model, description=description)


S = TypeVar("S", bound=Section)


@cache
def subsection(model: type[Section], name: str) -> type[Section] | None:
    """The section class of a field, or None where the field is not a section."""
    annotation = model.model_fields[name].annotation
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def known_names(model: type[Section]) -> set[str]:
    """All keys that a file may have in this section."""
    return {*model.model_fields, *model.others, *model.aliases} - model.results


def read_section(model: type[S], data: object, path: str, report: Report) -> S | None:
    """Read one object of the JSON. None, and complaints in `report`, where a key or a type is wrong."""
    before = len(report.complaints)
    written: dict[tuple[str, ...], str] = {}
    values = _known_keys(model, data, path, (), written, report)
    try:
        read = model.model_validate(values)
    except ValidationError as error:
        _complain_of(error, model, values, written, report)
        return None
    return read if len(report.complaints) == before else None


def _known_keys(
    model: type[Section],
    data: object,
    path: str,
    place: tuple[str, ...],
    written: dict[tuple[str, ...], str],
    report: Report,
) -> dict[str, Any]:
    """The fields that `data` sets, by name; other known keys are checked, and unknown ones reported.

    A section that is not given becomes {}: so it is built with the whole, and not alone by its factory.
    written: filled with the path of each field as the file spells it.
    """
    if not isinstance(data, dict):
        report.complain(path or "config", data, "must be an object {...}")
        return {}
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in data.items():
        name, here = model.aliases.get(key, key), joined(path, key)
        if is_comment(key):
            continue
        if name in spelled:
            text = f"sets the same option as {spelled[name]}; remove one of the two"
            report.complain(here, value, text)
            continue
        spelled[name] = here
        if _is_field(model, name, value, path, here, report):
            inner, there = subsection(model, name), (*place, name)
            written[there] = here
            if inner is not None:
                value = _known_keys(inner, value, here, there, written, report)
            values[name] = value
    for name, each in model.model_fields.items():
        if each.default_factory is not None and subsection(model, name):
            values.setdefault(name, {})
    model.read_own(values, path, report)
    return values


def _is_field(
    model: type[Section], name: str, value: object, path: str, here: str, report: Report
) -> bool:
    """Whether the key sets a field. If it does not, what is to be said of it is in `report`."""
    if name in model.others:
        check_entry(model.others[name], value, here, report)
        return False
    if name not in model.model_fields or name in model.results:
        report.complain_unknown(path, name, value, known_names(model))
        return False
    if is_auto(value) and name not in model.own_auto and not subsection(model, name):
        report.auto_keys.append(here)
        return False
    return value is not None


def _complain_of(
    error: ValidationError,
    model: type[Section],
    values: Mapping[str, Any],
    written: Mapping[tuple[str, ...], str],
    report: Report,
) -> None:
    """One complaint for each value that pydantic refuses."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for each in error.errors(include_url=False, include_input=False):
        section, length = model, 1
        while inner := subsection(section, each["loc"][length - 1]):
            section, length = inner, length + 1
        found.setdefault(each["loc"][:length], []).append((section, each))  # type: ignore[arg-type]
    for place, errors in found.items():
        value: Any = values
        for name in place:
            value = value[name]
        field_info = errors[0][0].model_fields[place[-1]]
        text = sentence([each for _, each in errors], _need_of(field_info), value)
        report.complain(written[place], value if field_info.repr else "***", text)


def _need_of(info: FieldInfo) -> str:
    """What the value of a field must be, in words."""
    if isinstance(info.json_schema_extra, dict):
        return str(info.json_schema_extra["need"])
    kind: Any = info.annotation
    for each in info.metadata:
        kind = getitem(Annotated, (kind, each))
    return Value(kind).need


def check_entry(entry: Entry, value: object, path: str, report: Report) -> None:
    """Check one key of a table and add its problems to `report`. null and "auto" mean unset."""
    if value is None or (is_auto(value) and not isinstance(entry, Group)):
        return
    if isinstance(entry, Group):
        _check_group(entry, value, path, report)
        return
    try:
        entry.read(value)
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
        return
    for key, inner in value.items():
        entry = group.keys.get(key)
        if entry is not None:
            check_entry(entry, inner, joined(path, key), report)
        elif not group.open and not is_comment(key):
            report.complain_unknown(path, key, inner, group.keys)
    for key, entry in group.keys.items():
        if value and key not in value and isinstance(entry, Refused):
            check_entry(entry, entry.missing, joined(path, key), report)


def _among(value: object, values: tuple[object, ...]) -> bool:
    folded = value.casefold() if isinstance(value, str) else value
    return any(folded == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def plain(value: Any) -> Any:
    """A deep copy made of dict, list and scalars only, so that reading never changes the caller's object."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def _as_json(value: Any) -> Any:
    if isinstance(value, Section):
        return value.as_dict()
    if isinstance(value, dict):
        return {key: _as_json(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_as_json(inner) for inner in value]
    return value
