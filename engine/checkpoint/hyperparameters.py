"""What rates and other hyperparameters may be: the rules of the config, for what a checkpoint holds.

`verify` and a load call `check_state_values`; a save warns. Weights can be read whatever these values are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from ...utils.schema.values import FLAG, WHOLE, Value
from ..config.classes import RATE, Rate
from ..config.optimizer import OPTIMIZERS
from ..config.scheduler import SCHEDULERS
from .io.tensor_table import shown

RATES = ("base_lrs", "_last_lr")  # of torch's schedules, one for each group
POSITIONS = ("last_epoch", "_step_count", "last_batch_iteration")
_SWITCH = Value(bool | Annotated[Literal[0, 1], WHOLE])
_POSITION = Value(Annotated[float, Field(ge=-1, allow_inf_nan=False)])
_RATE_OR_NULL = Value(Rate | None)
_OF_FUNCTIONS = ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler")


def check_state_values(
    state: Mapping[str, Any], *, with_optimizer: bool = True, with_scheduler: bool = True
) -> None:
    """Check the optimizer's and the schedule's numbers in the engine's state, with its tensors.

    Raises:
        ValueError: names the first one that the config would refuse, and what is needed.
    """
    optimizer, scheduler = state["optimizer"], state["lr_scheduler"]
    if with_optimizer and optimizer is not None:
        check_groups(optimizer["type"], optimizer["groups"])
    if with_scheduler and scheduler is not None:
        is_known = scheduler["type"] in {
            *_OF_FUNCTIONS,
            *SCHEDULERS.built_in,
            *SCHEDULERS.from_torch,
        }
        _check_scheduler(scheduler["state"], "lr_scheduler", is_known=is_known)


def check_groups(kind: str, groups: Iterable[Mapping[str, Any]]) -> None:
    """The same for the parameter groups of an optimizer of this class. Its tensors are not looked at."""
    rules = _rules_of(kind)
    for number_, group in enumerate(groups):
        where = f"optimizer.groups[{number_}]"
        if "lr" not in group:
            raise ValueError(f"{where} has no lr")
        for key, value in group.items():
            if key != "params":
                _check(rules.get(key), value, f"{where}.{shown(key)[1:-1]}")


def _rules_of(kind: str) -> dict[str, Value]:
    """The rules for the hyperparameters of the class; of one that is not known, those for its rates."""
    rules = OPTIMIZERS.arguments(kind)
    if not rules:
        return dict.fromkeys(("lr", "initial_lr"), _RATE_OR_NULL)
    return {key: _SWITCH if rule is FLAG else rule for key, rule in rules.items()} | {
        "initial_lr": RATE
    }


def _check(rule: Value | None, value: Any, where: str) -> None:
    plain = _plain(value)
    if rule is None:
        if _has_nan(plain):
            raise ValueError(f"{where} is {shown(plain)}, which is no number")
        return
    try:
        rule.read(plain)
    except ValueError:
        text = f"a tensor of {list(plain.shape)}" if isinstance(plain, Tensor) else shown(plain)
        raise ValueError(f"{where} is {text}; it must be {rule.need}") from None


def _plain(value: Any) -> Any:
    """The value with numbers for tensors of one element."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value


def _has_nan(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_nan, value))
    return isinstance(value, float) and math.isnan(value)


def _check_scheduler(state: Any, where: str, *, is_known: bool) -> None:
    """Check rates and positions in the state, also of schedules in it; of a known class every number."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            here = f"{where}.{shown(key)[1:-1]}"
            if key in RATES and isinstance(value, Sequence):
                for at, rate in enumerate(value):
                    _check(RATE, rate, f"{here}[{at}]")
            elif key in POSITIONS:
                _check(_POSITION, value, here)
            else:
                _check_scheduler(value, here, is_known=is_known)
    elif isinstance(state, list | tuple):
        for at, value in enumerate(state):
            _check_scheduler(value, f"{where}[{at}]", is_known=is_known)
    elif is_known and isinstance(_plain(state), float) and not math.isfinite(_plain(state)):
        raise ValueError(f"{where} is {shown(state)}; it must be finite")


__all__ = ["check_groups", "check_state_values"]
