"""What rates and other hyperparameters may be: the rules of the config, for what a checkpoint holds.

`verify` and a load call `check_state_values`; a save warns. Weights can be read whatever these values are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from ...ops.optim.config import RATE, Rate
from ...ops.weights.tensor_table import shown
from ...utils.schema.values import FLAG, WHOLE, Value
from ..config.optimizer import OPTIMIZERS
from ..config.scheduler import SCHEDULERS

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
        known = {*_OF_FUNCTIONS, *SCHEDULERS.built_in, *SCHEDULERS.from_torch}
        is_known = scheduler["type"] in known
        for key, value, where in _leaves(scheduler["state"], "", "lr_scheduler"):
            rule = _POSITION if key in POSITIONS else RATE if key in RATES else None
            if rule is not None:
                _check(rule, value, where)
            elif is_known and isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{where} is {shown(value)}; it must be finite")


def check_groups(kind: str, groups: Iterable[Mapping[str, Any]]) -> None:
    """The same for the parameter groups of an optimizer of this class. Its tensors are not looked at."""
    rules = OPTIMIZERS.arguments(kind)
    if rules:
        rules = {key: _SWITCH if rule is FLAG else rule for key, rule in rules.items()}
        rules["initial_lr"] = RATE
    else:  # a class that is not known
        rules = dict.fromkeys(("lr", "initial_lr"), _RATE_OR_NULL)
    for number, group in enumerate(groups):
        where = f"optimizer.groups[{number}]"
        if "lr" not in group:
            raise ValueError(f"{where} has no lr")
        for key, value in group.items():
            if key != "params":
                _check(rules.get(key), value, f"{where}.{shown(key)[1:-1]}")


def _check(rule: Value | None, value: Any, where: str) -> None:
    plain = _plain(value)
    if rule is None:
        if any(
            isinstance(leaf, float) and math.isnan(leaf) for _, leaf, _ in _leaves(plain, "", "")
        ):
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


def _leaves(value: Any, key: str, where: str) -> Iterator[tuple[str, Any, str]]:
    """(key, value, place) of all that is in mappings and sequences; rates one by one, positions whole."""
    if isinstance(value, Mapping) and key not in POSITIONS:
        for name, inner in value.items():
            yield from _leaves(inner, name, f"{where}.{shown(name)[1:-1]}")
    elif isinstance(value, Sequence) and not isinstance(value, str) and key not in POSITIONS:
        for position, inner in enumerate(value):
            yield from _leaves(inner, key if key in RATES else "", f"{where}[{position}]")
    else:
        yield key, _plain(value), where


__all__ = ["check_groups", "check_state_values"]
