"""Rules for single JSON values: each rule validates a value and describes in words what it must be.

A rule is used in three places: as the annotation of a typed field, in a table of keys, and in the
documentation. So the error message and the documentation contain the same sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

SHOWN_CHARS = 60  # how much of a value an error message shows
_ENCODER = json.JSONEncoder(default=repr)


@final
@dataclass(frozen=True)
class Rule:
    """`read(value)` returns the value to use, or raises ValueError with a sentence.

    `need` completes "must be ...". As an annotation of a pydantic field the rule replaces the field's own
    validation, so every error message has the same form.
    """

    need: str
    read: Callable[[object], Any]
    takes_auto: bool = False  # "auto" is a value of its own, and does not mean "not set"

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self.read)


def shown(value: object) -> str:
    """The value as written in the JSON, cut to one short line."""
    text = ""
    try:
        # encode no more than is shown: a value may be millions of characters long
        for part in _ENCODER.iterencode(value[:SHOWN_CHARS] if isinstance(value, str) else value):
            text += part[: SHOWN_CHARS + 1]
            if len(text) > SHOWN_CHARS:
                break
    except (TypeError, ValueError, RecursionError):
        text = f"a Python {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def _refuse(need: str, value: object) -> ValueError:
    hint = ""
    if isinstance(value, str) and len(value) > SHOWN_CHARS:
        pass  # too long to be a number or a flag in quotes
    elif isinstance(value, str) and "number" in need and _is_number(value):
        hint = f", not text: write {value.strip()} without quotes"
    elif isinstance(value, str) and value.lower() in ("true", "false") and "true or false" in need:
        hint = f", not text: write {value.lower()} without quotes"
    return ValueError(f"must be {need}{hint}")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _bounds(
    least: float | None, most: float | None, above: float | None, below: float | None = None
) -> str:
    parts = [
        *([f"at least {least:g}"] if least is not None else []),
        *([f"above {above:g}"] if above is not None else []),
        *([f"at most {most:g}"] if most is not None else []),
        *([f"below {below:g}"] if below is not None else []),
    ]
    return f", {' and '.join(parts)}" if parts else ""


def _within(found: float, least: float | None, most: float | None, above: float | None) -> bool:
    return (
        (least is None or found >= least)
        and (most is None or found <= most)
        and (above is None or found > above)
    )


def number(
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> Rule:
    """A finite number within the bounds, read as float."""
    need = "a number" + _bounds(least, most, above, below)

    def read(value: object) -> float:
        found = _finite(value)
        is_low = found is not None and (below is None or found < below)
        if found is None or not is_low or not _within(found, least, most, above):
            raise _refuse(need, value)
        return found

    return Rule(need, read)


def whole(least: int | None = None, most: int | None = None) -> Rule:
    """A whole number; 8.0 and 5e8 are whole, 2.5 is not."""
    need = "a whole number" + _bounds(least, most, None)

    def read(value: object) -> int:
        found = _finite(value)
        if found is None or found != math.floor(found) or not _within(found, least, most, None):
            raise _refuse(need, value)
        return int(value)  # type: ignore[call-overload, no-any-return]

    return Rule(need, read)


def or_auto(rule: Rule) -> Rule:
    """A value of `rule`, or "auto"."""

    def read(value: object) -> Any:
        is_auto = isinstance(value, str) and value.casefold() == "auto"
        return "auto" if is_auto else rule.read(value)

    return Rule(f'{rule.need}, or "auto"', read, takes_auto=True)


def size(least: int = 0) -> Rule:
    """A number of elements. Fractions are rounded: integrations such as transformers compute them."""
    need = f"a number of elements, at least {least}"

    def read(value: object) -> int:
        found = _finite(value)
        if found is None or found < least:
            raise _refuse(need, value)
        return value if isinstance(value, int) else round(found)

    return Rule(need, read)


def one_of(*choices: object) -> Rule:
    """One of the listed values; text is matched without regard to case."""
    listed = [shown(choice) for choice in choices]
    need = " or ".join([", ".join(listed[:-1]), listed[-1]]) if len(listed) > 1 else listed[0]

    def read(value: object) -> object:
        folded = value.casefold() if isinstance(value, str) else value
        for choice in choices:
            if folded == choice and isinstance(folded, bool) == isinstance(choice, bool):
                return choice
        raise _refuse(need, value)

    return Rule(need, read)


def list_of(item: Rule, least: int = 0, most: int | None = None) -> Rule:
    """A list whose items follow the rule `item`, read as tuple."""
    count = f" of {least}" if least == most else ""
    need = f"a list{count} ({item.need})"

    def read(value: object) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) < least:
            raise _refuse(need, value)
        if most is not None and len(value) > most:
            raise _refuse(need, value)
        try:
            return tuple(item.read(entry) for entry in value)
        except ValueError:
            raise _refuse(need, value) from None

    return Rule(need, read)


def either(*rules: Rule) -> Rule:
    """A value that at least one of the rules accepts; the first of them reads it."""
    need = " or ".join(rule.need for rule in rules)

    def read(value: object) -> object:
        for rule in rules:
            try:
                return rule.read(value)
            except ValueError:
                continue
        raise _refuse(need, value)

    return Rule(need, read)


def _read_flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise _refuse("true or false", value)


def _read_text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise _refuse("text in double quotes", value)


def _read_nothing(value: object) -> None:
    if value is not None:
        raise _refuse("null", value)


def _read_mapping(value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise _refuse("an object {...}", value)


def _read_list(value: object) -> Sequence[Any]:
    if isinstance(value, (list, tuple)):
        return value
    raise _refuse("a list [...]", value)


DTYPE_NAMES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "bfp16", "torch.bfloat16"), "bf16"),
}


def dtype_name(*allowed: str) -> Rule:
    """A dtype under any of its usual names, read as "fp32", "fp16" or "bf16"."""
    choices = one_of(*allowed)

    def read(value: object) -> object:
        known = DTYPE_NAMES.get(value.casefold(), value) if isinstance(value, str) else value
        return choices.read(known)

    return Rule(choices.need, read)


FLAG = Rule("true or false", _read_flag)
TEXT = Rule("text in double quotes", _read_text)
OBJECT = Rule("an object {...}", _read_mapping)
LIST = Rule("a list [...]", _read_list)
NULL = Rule("null", _read_nothing)
ANYTHING = Rule("any value", lambda value: value)
NUMBER = number()
WHOLE = whole()
