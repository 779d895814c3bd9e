"""Refuses arguments of a wrong type in one sentence: the call, the value, what is needed."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

from .errors import UsageError
from .quoting import printable, quoted

_SHOWN_CHARS = 60


def shown(value: object) -> str:
    """Short values as they are written in Python, others by their type."""
    if isinstance(value, str):
        return quoted(value, _SHOWN_CHARS)
    if value is None or isinstance(value, bool | int | float):
        return printable(value, _SHOWN_CHARS)
    kind = value if isinstance(value, type) else type(value)
    return f"the class {kind.__name__}" if kind is value else f"a {kind.__name__}"


def wrong(setting: str, value: object, need: str) -> UsageError:
    """The error for the value of `setting`, an argument or a call. `need` completes "must be"."""
    return UsageError(f"{setting} = {shown(value)}: must be {need}")


def items(setting: str, value: object, need: str) -> list[Any]:
    """What `value` holds. Raises UsageError: it is text, or not iterable. `need` completes "must be"."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise wrong(setting, value, need)
    return list(value)


def truth(setting: str, value: object) -> bool:
    """`value`. Raises UsageError: it is no bool."""
    if not isinstance(value, bool):
        raise wrong(setting, value, "True or False")
    return value


def whole(setting: str, value: object, least: int) -> int:
    """`value` as a whole number. Raises UsageError: it is none, or less than `least`."""
    is_number = hasattr(value, "__index__") and not isinstance(value, bool)
    try:
        number = operator.index(value) if is_number else least - 1  # type: ignore[arg-type]
    except TypeError:  # a tensor of floats has the method, and refuses
        number = least - 1
    if number < least:
        raise wrong(setting, value, f"a whole number, at least {least}")
    return number


def needed_arguments(method: Callable[..., object]) -> list[str]:
    """The arguments of a method of a class that have no default."""
    return [
        name
        for name, argument in list(inspect.signature(method).parameters.items())[1:]
        if argument.default is argument.empty
        and argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
    ]


__all__ = ["items", "needed_arguments", "shown", "truth", "whole", "wrong"]
