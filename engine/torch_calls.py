"""Sends to the engine what a script calls on its optimizer and modules, as it does with plain torch.

    optimizer.zero_grad(), module.zero_grad()  drop the gradients of the step, which the engine has
    optimizer.step()                           ends a micro-batch; on the boundary updates, without the schedule

Torch has no hooks for these calls, so the methods are replaced on the objects, from `initialize` to `destroy`.
Copies and pickles of the objects have torch's own methods.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, Protocol, final

import torch
from torch import nn

from ..utils.errors import UsageError
from ..zero.model.sharded_model import ShardedModel
from .steps.training_step import TrainingStep


class Driver(Protocol):
    """Whose `step` and `zero_grad` the script would call instead: the engine, or an adapter of it."""

    def zero_grad(self) -> None: ...

    def end_optimizer_step(self) -> None: ...


@final
class TorchCalls:
    """The replaced methods of one engine's modules and optimizer. It does not keep the engine alive."""

    def __init__(
        self, engine: Driver, step: TrainingStep, sharded: ShardedModel, module: nn.Module
    ) -> None:
        self._engine = weakref.ref(engine)
        self._adapter: Callable[[], Driver | None] = lambda: None
        self._step = step
        self._sharded = sharded
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # object, name, own attribute, new one
        for one in module.modules():
            self._replace(one, "zero_grad", self._zero_module)

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the methods of `optimizer` as well."""
        self._replace(optimizer, "zero_grad", self._zero_optimizer)
        self._replace(optimizer, "step", self._step_optimizer)

    def go_to(self, adapter: Driver) -> None:
        """From now on `adapter` gets the calls, as long as it lives; then the engine again."""
        self._adapter = weakref.ref(adapter)

    def remove(self) -> None:
        """Give the objects their own methods back."""
        for owner, name, own, new in self._replaced:
            if vars(owner).get(name) is not new:  # replaced again since; `new` calls the own method
                continue
            if own is None:
                del vars(owner)[name]
            else:
                vars(owner)[name] = own
        self._replaced = []

    def _replace(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        own, original = vars(owner).get(name), getattr(owner, name)
        calls, of = weakref.WeakMethod(call), weakref.ref(owner)

        @wraps(getattr(original, "__func__", original))  # with the marks of torch's schedules
        def replaced(one: Any, *args: Any, **kwargs: Any) -> Any:
            if one is not of():  # a copy
                return getattr(type(one), name)(one, *args, **kwargs)
            send = calls()
            return original(*args, **kwargs) if send is None else send(original, one, args, kwargs)

        # not by assignment: a compiled module sets the attributes of another one
        new = vars(owner)[name] = MethodType(replaced, owner)
        self._replaced.append((owner, name, own, new))

    @property
    def _driver(self) -> Driver | None:
        return self._adapter() or self._engine() if self._replaced else None

    def _zero_optimizer(
        self, original: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any
    ) -> Any:
        if self._step.has_gradients:
            self._drop()
        elif self._replaced:
            self._sharded.backward_pass.manual_grads.clear()
        return original(*args, **kwargs)

    def _zero_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if self._step.has_gradients:
            trained = {
                id(param) for grads in self._sharded.reduction.order for param in grads.params
            }
            missing = trained.difference(map(id, module.parameters()))
            if missing and missing != trained:
                raise UsageError(
                    f"zero_grad() of a {type(module).__name__} that is a part of the engine's model, while "
                    "gradients wait for a step: they can only be dropped together; call engine.zero_grad(), or "
                    "freeze the part during the backward that shall not train it"
                )
            if not missing:
                self._drop()
        return original(*args, **kwargs)

    def _drop(self) -> None:
        driver = self._driver
        # a loop that calls zero_grad() after each optimizer.step() accumulates all the same
        if driver is not None and not self._step.only_counted:
            driver.zero_grad()

    def _step_optimizer(
        self, original: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any
    ) -> Any:
        driver = self._driver
        if driver is None or self._step.is_updating:
            return original(*args, **kwargs)
        closure, loss = args[0] if args else kwargs.get("closure"), None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        driver.end_optimizer_step()
        return loss


__all__ = ["TorchCalls"]
