"""Config sections that xds reads: a frozen typed model, plus tables for the other known keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic_core import CoreSchema, core_schema

from .keys import Entry, Report, check_entry, is_auto, is_comment, joined, unknown_key
from .rules import Rule


class Section(BaseModel):
    """Base of every typed section. Fields are the keys that xds reads; `others` are the other known keys.

    The rule in a field's annotation reads its value, both here and when the class is called. In a file null
    means unset, unless the rule accepts it.
    `aliases` maps other spellings to the field or table name. `results` are fields that are
    computed while reading and are not keys of the JSON. The values of `secrets` are never shown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    others: ClassVar[Mapping[str, Entry]] = {}
    aliases: ClassVar[Mapping[str, str]] = {}
    results: ClassVar[frozenset[str]] = frozenset()
    secrets: ClassVar[frozenset[str]] = frozenset()

    def as_dict(self) -> dict[str, Any]:
        """The section as JSON values, with all defaults filled in and secrets masked."""
        return {
            name: self.shown_value(name)
            for name in type(self).model_fields
            if name not in self.results
        }

    def shown_value(self, name: str) -> Any:
        """The value of a field as JSON value. A secret that is set is shown as "***"."""
        value = getattr(self, name)
        return "***" if name in self.secrets and value is not None else _as_json(value)


class AsRead:
    """Annotation of a nested section: it was read separately and is used unchanged."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: Callable[[object], CoreSchema]
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(_already_read)


def _already_read(value: object) -> object:
    if value is None or isinstance(value, Section):
        return value
    raise ValueError("must be a section object; Config.load reads JSON and dicts")


S = TypeVar("S", bound=Section)


def subsection(model: type[Section], name: str) -> type[Section] | None:
    """The section class of a field, or None where the field is not a section."""
    annotation = model.model_fields[name].annotation
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def read_section(model: type[S], data: object, path: str, report: Report) -> S:
    """Read one object of the JSON. Problems are added to `report`, and the default replaces a wrong value."""
    if not isinstance(data, dict):
        report.complain(path or "config", data, "must be an object {...}")
        return model.model_construct()
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in data.items():
        if is_comment(key):
            continue
        name = model.aliases.get(key, key)
        here = joined(path, key)
        if name in spelled:
            report.complain(
                here, value, f"sets the same option as {spelled[name]}; remove one of the two"
            )
            continue
        spelled[name] = here
        if name in model.model_fields and name not in model.results:
            _read_field(model, name, value, here, report, values)
        elif name in model.others:
            check_entry(model.others[name], value, here, report)
        else:
            unknown_key(path, key, value, known_names(model), report)
    return model.model_construct(**values)


def _read_field(
    model: type[Section],
    name: str,
    value: object,
    here: str,
    report: Report,
    values: dict[str, Any],
) -> None:
    inner = subsection(model, name)
    if inner is not None:
        if value is not None:
            values[name] = read_section(inner, value, here, report)
        return
    rule = rule_of(model, name)
    if is_auto(value) and not rule.takes_auto:
        report.auto_keys.append(here)
    else:
        try:
            values[name] = rule.read(value)
        except ValueError as error:
            if value is not None:
                report.complain(here, value, str(error))


def rule_of(model: type[Section], name: str) -> Rule:
    """The rule in a field's annotation."""
    return next(item for item in model.model_fields[name].metadata if isinstance(item, Rule))


def known_names(model: type[Section]) -> set[str]:
    """All keys that a file may have in this section."""
    return {*model.model_fields, *model.others, *model.aliases} - model.results


def _as_json(value: Any) -> Any:
    if isinstance(value, Section):
        return value.as_dict()
    if isinstance(value, dict):
        return {key: _as_json(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_as_json(inner) for inner in value]
    return value
