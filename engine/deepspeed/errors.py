"""Errors of xds in the form in which DeepSpeed's scripts catch them: as ValueError and AssertionError too.

DeepSpeed checks its arguments with `assert` in some places and with ValueError in others. In this layer alone
an error of xds is both, and still a `UsageError` or `ConfigError`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, TypeVar

from ...utils.errors import ConfigError, UsageError

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)


@cache
def _in_their_form(kind: Any) -> type[Exception]:
    """The class derived from a class of xds."""
    bases = [kind, *(base for base in (ValueError, AssertionError) if not issubclass(kind, base))]

    def reduce(self: BaseException) -> tuple[Any, ...]:
        return _again, (kind, kind.__reduce__(self)[1])

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": reduce}
    return type(kind.__name__, tuple(bases), names)


def _again(kind: Any, arguments: tuple[Any, ...]) -> Exception:
    """The error, when it is unpickled: pools of processes send errors."""
    error: Exception = kind(*arguments)
    error.__class__ = _in_their_form(kind)
    return error


@contextmanager
def in_their_form() -> Iterator[None]:
    """Errors that leave the block can be caught as ValueError and as AssertionError."""
    try:
        yield
    except (UsageError, ConfigError) as error:
        if not isinstance(error, AssertionError):
            kind: Any = type(error)
            error.__class__ = _in_their_form(kind)  # type: ignore[assignment]
        raise


def raises_theirs(function: Function) -> Function:
    """A decorator: errors that leave `function` are in DeepSpeed's form."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with in_their_form():
            return function(*args, **options)

    return call  # type: ignore[return-value]


def methods_raise_theirs(cls: Class) -> Class:
    """A decorator of a class: the same for each method and property that the class itself defines."""
    for name, value in list(vars(cls).items()):
        if inspect.isfunction(value) and not name.startswith("__getattr"):
            setattr(cls, name, raises_theirs(value))
        elif isinstance(value, property):
            parts: list[Any] = [value.fget, value.fset, value.fdel]
            read, write, delete = (one and raises_theirs(one) for one in parts)
            setattr(cls, name, property(read, write, delete, value.__doc__))
    return cls
