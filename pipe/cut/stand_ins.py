"""Modules that stand for modules of other stages, and own modules that ask the conductor when called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn

from .conductor import Conductor, OwnModule, Role
from .zeros import ZeroOutputs


@final
class StandIn(nn.Module):
    """Has no parameters. Its attributes are those of a copy on the meta device."""

    def __init__(self, conductor: Conductor, role: Role, zeros: ZeroOutputs) -> None:
        super().__init__()
        self._conductor = conductor
        self._role = role
        self._zeros = zeros
        self._inner: dict[str, tuple[StandIn]] = {}
        self.training = zeros.outline.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._zeros.outline.train(self.training)
        return self._conductor.call_stand_in(self._role, self._zeros, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        zeros = self.__dict__.get("_zeros")
        if zeros is None:
            return super().__getattr__(name)
        value = getattr(zeros.outline, name)
        if isinstance(value, Tensor):
            return self._conductor.tensor_of(self._role, name, value)
        if isinstance(value, nn.Module):
            return self._inner_module(name, value)
        return value

    def _inner_module(self, name: str, outline: nn.Module) -> StandIn:
        if name not in self._inner:
            role = Role(f"{self._role.name}.{name}", self._role.stages, False)
            self._inner[name] = (StandIn(self._conductor, role, ZeroOutputs(outline, False)),)
        return self._inner[name][0]


def direct_calls(own: OwnModule, conductor: Conductor) -> Callable[[], None]:
    """Let the conductor decide what a call of the module does: its class becomes a subclass of the same name.

    Names, `isinstance` and hooks stay as they are.

    Returns:
        A function that gives the class back, unless something else has changed it since.
    """
    module = own.module
    kind: Any = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return conductor.call_own(own, super(directed, self).__call__, args, kwargs)  # type: ignore[misc]

    namespace = {
        "__call__": call,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    directed = type(kind.__name__, (kind,), namespace)
    module.__class__ = directed

    def give_back() -> None:
        if type(module) is directed:
            module.__class__ = kind

    return give_back


__all__ = ["StandIn", "direct_calls"]
