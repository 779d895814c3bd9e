"""Sends to the engine what a script calls on its optimizer and modules, as it does with plain torch.

    optimizer.zero_grad(), module.zero_grad()  drop the gradients of the step, which the engine has
    optimizer.step()                           ends a micro-batch; on the boundary updates, without the schedule
    optimizer.eval(), optimizer.train()        what they write into the masters is given to all parameters
    torch.nn.utils.clip_grad_norm_             the next step clips; see `torch_clipping.py`

Torch has no hooks for these calls, so the methods are replaced on the objects, from `initialize` to `destroy`.
Copies and pickles of the objects have torch's own methods.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import wraps
from types import MethodType
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from ..utils.arguments import wrong
from ..utils.errors import UsageError
from ..zero.model.update import Updater
from .steps.training_step import TrainingStep
from .torch_clipping import GradHolder, functions


class Driver(Protocol):
    """Whose `step` and `zero_grad` the script would call instead: the engine, or an adapter of it."""

    def zero_grad(self) -> None: ...

    def end_optimizer_step(self) -> None: ...

    def clip_grad_norm(self, max_norm: float) -> float: ...


class Owner(Driver, Protocol):
    """The engine itself."""

    def gradient_clipping(self) -> float: ...


@final
class TorchCalls(GradHolder):
    """The replaced methods of one engine's modules and optimizer. It does not keep the engine alive."""

    def __init__(
        self, engine: Owner, step: TrainingStep, updater: Updater, module: nn.Module
    ) -> None:
        self._engine = weakref.ref(engine)
        self._adapter: Callable[[], Driver | None] = lambda: None
        self._step = step
        self._updater, self._sharded = updater, updater.model
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # object, name, own attribute, new one
        self._mode = ""  # the last call of `eval` or `train` of the optimizer
        for one in module.modules():
            self._replace(one, "zero_grad", self._zero_module)
        functions.add(self)

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the methods of `optimizer` as well."""
        self._replace(optimizer, "zero_grad", self._zero_optimizer)
        self._replace(optimizer, "step", self._step_optimizer)
        for mode, call in (("eval", self._eval_optimizer), ("train", self._train_optimizer)):
            if callable(getattr(optimizer, mode, None)):
                self._replace(optimizer, mode, call)

    def go_to(self, adapter: Driver) -> None:
        """From now on `adapter` gets the calls, as long as it lives; then the engine again."""
        self._adapter = weakref.ref(adapter)

    def forget_mode(self) -> None:
        """A load has replaced weights and states: the next `eval` or `train` of the optimizer may write."""
        self._mode = ""

    def remove(self) -> None:
        """Give the objects their own methods back."""
        functions.remove(self)
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

    def _eval_optimizer(self, *call: Any) -> Any:
        return self._switch_optimizer("eval", *call)

    def _train_optimizer(self, *call: Any) -> Any:
        return self._switch_optimizer("train", *call)

    def _switch_optimizer(
        self, mode: str, original: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any
    ) -> Any:
        """For optimizers that evaluate other values than they train, such as schedule-free ones.

        Raises:
            UsageError: a second call of the same one has written weights.
        """
        if not self._replaced or self._engine() is None:
            return original(*args, **kwargs)
        if mode == self._mode:  # a Trainer calls train() in every micro-batch: nothing is sent
            before = _versions(optimizer)
            result = original(*args, **kwargs)
            if _versions(optimizer) != before:
                raise UsageError(
                    f"optimizer.{mode}() has written weights although it was the last such call as well, so "
                    "the model has not got them; call optimizer.eval() and optimizer.train() in turn"
                )
            return result
        self._mode = mode
        self._step.check_usable()
        with self._updater.changing():
            return original(*args, **kwargs)

    # -- torch.nn.utils.clip_grad_norm_ -----------------------------------------------------------------

    def held(self, given: AbstractSet[int]) -> frozenset[int]:
        params = [param for grads in self._sharded.reduction.order for param in grads.params]
        if given.isdisjoint(map(id, params)) or not self._step.has_gradients:
            return frozenset()
        self._sharded.backward_pass.end_script_backward()
        if any(param.grad is not None for param in params):
            return frozenset()
        return frozenset(id(param) for param in params if param.requires_grad)

    def clip(self, max_norm: float) -> Tensor:
        """
        Raises:
            UsageError: more micro-batches of the step may follow, or `max_norm` is no number above 0.
        """
        engine, driver = self._engine(), self._driver
        assert engine is not None and driver is not None
        name = "torch.nn.utils.clip_grad_norm_"
        if not self._step.reduces_when_asked():
            raise UsageError(
                f"{name} between micro-batches of a step: the engine clips the gradients of the whole step; "
                "call it where engine.is_gradient_accumulation_boundary(), or set gradient_clipping"
            )
        wanted, limit = float(max_norm), engine.gradient_clipping()
        if not wanted > 0:
            raise wrong(f"{name}: max_norm", max_norm, "a number above 0")
        norm = driver.clip_grad_norm(min(wanted, limit) if limit else wanted)
        return torch.tensor(norm, device=self._sharded.collectives.device)


def _versions(optimizer: torch.optim.Optimizer) -> int:
    """A number that grows with each write to the weights that the optimizer has."""
    return sum(param._version for group in optimizer.param_groups for param in group["params"])


__all__ = ["TorchCalls"]
