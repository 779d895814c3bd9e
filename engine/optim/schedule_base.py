"""The base class of the learning-rate schedules, and checks of their arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, final

import torch

from ...utils.arguments import needed_arguments, wrong
from ...utils.errors import UsageError

PerGroup = float | Sequence[float]
"""A number for all parameter groups, or one for each."""


@final
class WrongArgument(UsageError, ValueError):
    """An argument that a schedule cannot use; a ValueError as in torch's schedules."""


class HasParamGroups(Protocol):
    """The part of an optimizer that a schedule uses."""

    param_groups: list[dict[str, Any]]


class Scheduler(Protocol):
    """The methods of a learning-rate schedule that the engine calls."""

    def step(self) -> None: ...


class Schedule(ABC):
    """Sets the lr of every parameter group of an optimizer for iteration `last_batch_iteration`.

    Args:
        optimizer: a torch.optim.Optimizer, or anything with its `param_groups`. An lr that is a
            tensor stays that tensor: it is filled in place.
        last_batch_iteration: -1 starts from the beginning and writes the first lr; any other value
            leaves the groups as they are until `step()`.
    """

    def __init__(self, optimizer: HasParamGroups, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The lr of each group at the current iteration."""

    def get_last_lr(self) -> list[float]:
        """The lr that each group of the optimizer has now."""
        return group_lrs(self.optimizer)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to the given one, and write its lr."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = (
            following if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to the saved iteration and write its lr.

        Raises:
            UsageError: `state` is not the state of a schedule of this kind.
        """
        if "last_batch_iteration" not in state:
            raise UsageError(
                f"{type(self).__name__}.load_state_dict needs the key 'last_batch_iteration', got "
                f"{sorted(map(str, state))}; this state was saved by another scheduler. Load it "
                "with the scheduler.type that saved it."
            )
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self._write()

    def _write(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _start(self) -> None:
        if self.last_batch_iteration == -1:
            self._write()


def check_schedule(given: Any) -> None:
    """
    Raises:
        UsageError: `step` of the schedule `given` needs arguments, which the engine does not have.
    """
    name = type(given).__name__
    if not callable(getattr(given, "step", None)):
        raise wrong("lr_scheduler", given, "a schedule with a method step()")
    needed = needed_arguments(type(given).step)
    if needed:
        raise UsageError(
            f"lr_scheduler = {name}: its step() needs {', '.join(needed)}, which engine.step() does not have; "
            f"leave out lr_scheduler, make a {name} of engine.optimizer and step it in the script"
        )


def between(lows: list[float], highs: list[float], ratio: float) -> list[float]:
    return [low + (high - low) * ratio for low, high in zip(lows, highs, strict=True)]


def group_lrs(optimizer: HasParamGroups) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def check(ok: bool, name: str, value: object, need: str) -> None:
    if not ok:
        raise WrongArgument(f"scheduler.params.{name} = {value!r}: {need}; change it.")


def whole_number(name: str, value: object, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise WrongArgument(
            f"scheduler.params.{name} = {value!r}: needs a whole number, at least {least}."
        )
    return value


def for_groups(optimizer: HasParamGroups, name: str, value: PerGroup) -> list[float]:
    num_groups = len(optimizer.param_groups)
    values = list(value) if isinstance(value, Sequence) else [value] * num_groups
    need = f"needs a number, or one for each of the optimizer's {num_groups} parameter groups"
    numbers = all(isinstance(one, (int, float)) for one in values)
    check(numbers and len(values) == num_groups, name, value, need)
    return values
