"""Replaces the forward, or the whole call, of modules in place, and restores it.

An instance's `forward` runs inside of its hooks: what a unit's hooks do (gather, drop) stays outside of what
is recomputed or compiled. The whole call is outside of them: what it leaves out runs no hook, so nothing is
gathered. The new one is a bound method, so a deep copy of the module calls the copy.
Names, classes and the state_dict do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType, MethodType
from typing import Any, NamedTuple

from torch import nn

from ...ops.torch_internals import CALL

Forward = Callable[..., Any]  # (module, *args, **kwargs)


class Rerouted(NamedTuple):
    """Modules whose forward will be another one, by their names, for what looks at the model before.

    whole: modules that keep all their elements. stand_ins: forwards that compute without them.
    """

    whole: Collection[str] = ()
    stand_ins: Mapping[str, Forward] = MappingProxyType({})


def replace_forwards(
    modules: Iterable[nn.Module], change: Callable[[Forward], Forward]
) -> Callable[[], None]:
    """Replace the forward of each module by `change(forward)`; the returned function restores them.

    `change` is called once for all modules that share a forward.
    """
    return _replace(modules, "forward", change)


def replace_calls(
    modules: Iterable[nn.Module], change: Callable[[Forward], Forward]
) -> Callable[[], None]:
    """The same for what `module(...)` runs: the hooks of the module, and its forward."""
    return _replace(modules, CALL, change)


def _replace(
    modules: Iterable[nn.Module], name: str, change: Callable[[Forward], Forward]
) -> Callable[[], None]:
    changed: dict[Forward, Forward] = {}
    before: list[tuple[nn.Module, Any]] = []
    for module in modules:
        own = module.__dict__.get(name)
        forward = _unbound(module, name, own)
        if forward not in changed:
            changed[forward] = change(forward)
        before.append((module, own))
        setattr(module, name, MethodType(changed[forward], module))

    def undo() -> None:
        for module, own in before:
            if own is None:
                module.__dict__.pop(name, None)
            else:
                setattr(module, name, own)

    return undo


def _unbound(module: nn.Module, name: str, own: Any) -> Forward:
    """What `name` calls as a function of the module: the instance's own if it has one, else the class's."""
    if own is None:
        of_class: Forward = getattr(type(module), name)
        return of_class
    if isinstance(own, MethodType) and own.__self__ is module:
        return own.__func__

    def call(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return call
