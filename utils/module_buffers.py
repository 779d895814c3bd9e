"""Runs modules a second time without a second effect on their buffers, such as running statistics.

    forward     block(x)     writes its buffers, which counts; copies of what they were before are kept
    backward    block(x)     runs again, on these copies

Copies cost memory, so only buffers that forwards write are copied. Which ones these are is seen in each
forward: from torch's version counters, and in the first one from the values as well, because kernels such as
that of `batch_norm` move no counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple, final

from torch import Tensor, nn

Key = tuple[nn.Module, str]  # a module, and the name of a buffer of it
Copies = Mapping[Key, Tensor]


class Before(NamedTuple):
    """A buffer before a forward. copy: None where forwards do not write it."""

    buffer: Tensor
    version: int
    copy: Tensor | None


@final
class Buffers:
    """The buffers of some modules, and which of them forwards write."""

    def __init__(self, modules: Iterable[nn.Module], *, copies: bool = True) -> None:
        """
        Args:
            modules: each alone, without the modules in it: `block.modules()`.
            copies: False keeps none. A second run then finds what the first one left, which counts where a
                result depends on a buffer that the forward writes. For functions that are seen once.
        """
        self._modules = list(dict.fromkeys(modules))
        self._copies = copies
        self._written: set[Key] = set()
        self._is_first = copies

    def once(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, of which only the first call has an effect on the buffers.

        Later calls find the values that the first one found. At least one call must have ended before the next
        one begins.
        """
        return _Once(self, function)

    def before(self) -> dict[Key, Before]:
        """What `after` compares with: call it before a forward that counts."""
        copies: dict[int, Tensor] = {}  # by id of a buffer, which several modules may have
        found = {}
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                is_copied = self._copies and (self._is_first or (module, name) in self._written)
                copy = _copy(buffer, copies) if is_copied and not buffer.is_meta else None
                found[module, name] = Before(buffer, _version(buffer), copy)
        return found

    def after(self, before: Mapping[Key, Before]) -> Copies:
        """Copies of the buffers that forwards write, as they were before this one."""
        for (module, name), (buffer, version, copy) in before.items():
            now = module._buffers.get(name)
            if now is not buffer or _version(buffer) != version:
                # later than in the first forward: others of the module may have been written without a trace
                names = [name] if self._is_first else module._buffers
                self._written.update((module, other) for other in names)
            elif self._is_first and copy is not None and not buffer.equal(copy):
                self._written.add((module, name))
        self._is_first = False
        return {
            key: copy
            for key, (_, _, copy) in before.items()
            if copy is not None and key in self._written
        }

    @contextmanager
    def again(self, copies: Copies) -> Iterator[None]:
        """Inside, forwards find `copies` of the buffers that they write, and have no effect on the buffers."""
        with _replaced(self._written, copies):
            yield


@final
class _Once:
    """A function whose repetitions have no effect on buffers."""

    def __init__(self, buffers: Buffers, function: Callable[..., Any]) -> None:
        self._buffers, self._function = buffers, function
        self._copies: Copies | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._copies is not None:
            with self._buffers.again(self._copies):
                return self._function(*args, **kwargs)
        before = self._buffers.before()
        try:
            return self._function(*args, **kwargs)
        finally:
            self._copies = self._buffers.after(before)


def modules_of(function: Any) -> list[nn.Module]:
    """The modules that `function` is, is a method of, or refers to, and those in them."""
    found: dict[nn.Module, None] = {}
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found.update(dict.fromkeys(value.modules()))
        elif isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            waiting += [value.__self__, value.__func__]
        elif isinstance(value, FunctionType):
            waiting += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
    return list(found)


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@contextmanager
def untouched_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, forwards of `modules` have no effect on their buffers."""
    with _replaced([(module, name) for module in modules for name in module._buffers], {}):
        yield


@contextmanager
def _replaced(keys: Iterable[Key], values: Copies) -> Iterator[None]:
    """Inside, modules have copies of these buffers: of `values`, or of the present ones."""
    kept = [(*key, key[0]._buffers.get(key[1])) for key in keys]
    copies: dict[int, Tensor] = {}
    for module, name, buffer in kept:
        if buffer is not None:
            module._buffers[name] = _copy(values.get((module, name), buffer), copies)
    try:
        yield
    finally:
        for module, name, buffer in kept:
            if name in module._buffers:
                module._buffers[name] = buffer


def _copy(buffer: Tensor, copies: dict[int, Tensor]) -> Tensor:
    if id(buffer) not in copies:
        copies[id(buffer)] = buffer.detach().clone()
    return copies[id(buffer)]


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


__all__ = ["Before", "Buffers", "Copies", "modules_of", "untouched_buffers"]
