"""Modules that stand for modules of other stages, and own modules that call the stage runner."""

from __future__ import annotations

from functools import partial
from typing import Any, final

from torch import Tensor, nn

from .stage_runner import ModuleRole, OwnModule, StageRunner
from .zeros import ZeroOutputs


@final
class StandIn(nn.Module):
    """Has no parameters. Its attributes are those of a copy on the meta device."""

    def __init__(self, runner: StageRunner, role: ModuleRole, zeros: ZeroOutputs) -> None:
        super().__init__()
        self._runner = runner
        self._role = role
        self._zeros = zeros
        self._inner: dict[str, tuple[StandIn]] = {}
        self.training = zeros.outline.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._zeros.train(self.training)
        return self._runner.call_stand_in(self._role, self._zeros, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        zeros = self.__dict__.get("_zeros")
        if zeros is None:
            return super().__getattr__(name)
        value = getattr(zeros.outline, name)
        if isinstance(value, Tensor):
            return self._runner.tensor_of(self._role, name, value)
        if isinstance(value, nn.Module):
            return self._inner_module(name, value)
        return value

    def _inner_module(self, name: str, outline: nn.Module) -> StandIn:
        if name not in self._inner:
            role = ModuleRole(f"{self._role.name}.{name}", self._role.stages, False)
            self._inner[name] = (StandIn(self._runner, role, ZeroOutputs(outline, False)),)
        return self._inner[name][0]


@final
class CallInterceptor:
    """Lets the stage runner decide what calls of own modules do: their classes become subclasses.

    The subclasses have the same names; `isinstance`, hooks and names of parameters stay as they are.
    Modules of one class get one subclass.
    """

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner
        self._own: dict[int, OwnModule] = {}
        self._kinds: dict[type[nn.Module], type[nn.Module]] = {}  # class -> its subclass

    def intercept(self, own_module: OwnModule) -> None:
        """Direct the calls of a module."""
        kind = type(own_module.module)
        if kind not in self._kinds:
            self._kinds[kind] = self._subclass(kind)
        self._own[id(own_module.module)] = own_module
        own_module.module.__class__ = self._kinds[kind]

    def restore(self) -> None:
        """Give the classes back, unless something else has changed them since."""
        classes = {directed: kind for kind, directed in self._kinds.items()}
        for own_module in self._own.values():
            kind = classes.get(type(own_module.module))
            if kind is not None:
                own_module.module.__class__ = kind
        self._own.clear()

    def _subclass(self, kind: Any) -> Any:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            own_module = self._own.get(id(module))
            if own_module is None:  # a copy of a module, or after `restore`
                return kind.__call__(module, *args, **kwargs)
            return self._runner.call_own(own_module, partial(kind.__call__, module), args, kwargs)

        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        return type(kind.__name__, (kind,), {"__call__": call, **names})


__all__ = ["CallInterceptor", "StandIn"]
