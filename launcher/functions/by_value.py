"""Pickles functions and classes that no other process can import: of `__main__`, of a function, lambdas.

    function   its code, the globals that the code names, the cells of its closure
    class      its name and bases first, then its attributes: its methods may refer to it
    module     its name

What another process can import is pickled by its name, as usual. All functions that are unpickled share the
globals of the reader's `__main__`. Both processes have the same version of Python.
"""

from __future__ import annotations

import dataclasses
import io
import linecache
import marshal
import pickle
import sys
import types
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from operator import attrgetter
from typing import Any, final

# attributes that a new class has, or that belong to the old one
_OF_THE_CLASS = {"__dict__", "__weakref__", "__slots__", "_abc_impl"}
_SENTINELS = ("MISSING", "KW_ONLY", "_FIELD", "_FIELD_CLASSVAR", "_FIELD_INITVAR")


def dumps(value: object) -> bytes:
    """`value` as bytes for `loads`.

    Raises:
        TypeError, pickle.PicklingError, ...: a part of it cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dump(value)
    return pickle.dumps((pickler.sources, buffer.getvalue()))


def loads(data: bytes) -> Any:
    """The value of `dumps`. Only for bytes of a process of this user: they can run any code."""
    sources, pickled = pickle.loads(data)
    for name, lines in sources.items():  # for tracebacks
        linecache.cache.setdefault(name, (sum(map(len, lines)), None, lines, name))
    return pickle.loads(pickled)


@final
class _Pickler(pickle.Pickler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sources: dict[str, list[str]] = {}  # lines of code, by the name of the file

    def reducer_override(self, value: Any) -> Any:
        """How `value` is made again; NotImplemented: as usual."""
        if isinstance(value, types.FunctionType):
            return NotImplemented if _is_importable(value) else self._function(value)
        if isinstance(value, type):
            return NotImplemented if _is_importable(value) else _class(value)
        if isinstance(value, types.ModuleType):
            return import_module, (value.__name__,)
        if isinstance(value, types.CellType):
            return _new_cell, (), list(_contents(value)), None, None, _fill
        if isinstance(value, property):
            return property, (value.fget, value.fset, value.fdel, value.__doc__)
        if isinstance(value, (staticmethod, classmethod)):
            return type(value), (value.__func__,)
        if isinstance(value, types.MappingProxyType):
            return _new_view, (dict(value),)
        for name in _SENTINELS:
            if value is getattr(dataclasses, name, self):
                return getattr, (dataclasses, name)
        return NotImplemented

    def _function(self, function: types.FunctionType) -> Any:
        code = function.__code__
        if code.co_filename not in self.sources:
            self.sources[code.co_filename] = linecache.getlines(code.co_filename)
        named = {
            name: function.__globals__[name]
            for name in dict.fromkeys(_global_names(code))
            if name in function.__globals__
        }
        own = {
            name: getattr(function, name)
            for name in ("__defaults__", "__kwdefaults__", "__qualname__", "__module__", "__doc__")
        }
        made = (marshal.dumps(code), function.__name__, function.__closure__)
        state = (named, {**own, **vars(function)})
        return _new_function, made, state, None, None, _complete_function


def _is_importable(value: Any) -> bool:
    module = sys.modules.get(value.__module__ or "")
    if module is None or module.__name__ == "__main__":
        return False
    try:
        return attrgetter(value.__qualname__)(module) is value
    except AttributeError:  # in a function: "outer.<locals>.inner"
        return isinstance(value, type) and value.__module__ == "builtins"


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Names that the code may read as globals, also those of attributes."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _global_names(each)


def _new_function(code: bytes, name: str, closure: Any) -> types.FunctionType:
    scope = sys.modules["__main__"].__dict__
    return types.FunctionType(marshal.loads(code), scope, name, None, closure)


def _complete_function(function: types.FunctionType, state: Any) -> None:
    named, own = state
    function.__globals__.update(named)
    for name, value in own.items():
        setattr(function, name, value)


def _class(kind: type) -> Any:
    if issubclass(kind, Enum):
        members = {member.name: member.value for member in kind}
        return _new_enum, (kind.__bases__[-1], kind.__name__, members)
    slots = kind.__dict__.get("__slots__")
    names = (slots,) if isinstance(slots, str) else tuple(slots or ())
    state = {
        name: value
        for name, value in vars(kind).items()
        if name not in _OF_THE_CLASS and name not in names
    }
    made = (type(kind), kind.__name__, kind.__bases__, None if slots is None else names)
    return _new_class, made, state, None, None, _complete_class


def _new_class(meta: Any, name: str, bases: tuple[type, ...], slots: Any) -> type:
    kind: type = meta(name, bases, {} if slots is None else {"__slots__": slots})
    return kind


def _complete_class(kind: type, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(kind, name, value)
    if kind.__module__ == "__main__":
        setattr(sys.modules["__main__"], kind.__name__, kind)  # results have it by its name


def _new_enum(base: Any, name: str, members: dict[str, Any]) -> Any:
    kind = base(name, members, module="__main__")
    setattr(sys.modules["__main__"], name, kind)
    return kind


def _new_cell() -> types.CellType:
    return types.CellType()


def _new_view(values: dict[Any, Any]) -> types.MappingProxyType[Any, Any]:
    return types.MappingProxyType(values)


def _contents(cell: types.CellType) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # it is empty
        return


def _fill(cell: types.CellType, contents: list[Any]) -> None:
    for value in contents:
        cell.cell_contents = value


__all__ = ["dumps", "loads"]
