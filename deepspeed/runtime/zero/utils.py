"""`deepspeed.runtime.zero.utils`: the exception of ZeRO, and what counts as a sharded parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....utils.errors import UsageError
from ...missing import placeholder
from .parameters import is_zero_param as is_zero_param


class ZeRORuntimeException(UsageError):
    """A setting of ZeRO that cannot work."""


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """True: the engine checks an optimizer when it gets it, and names what it needs."""
    return isinstance(optimizer, torch.optim.Optimizer)


def isinstance_namedtuple(obj: object) -> bool:
    return isinstance(obj, tuple) and hasattr(obj, "_fields") and hasattr(obj, "_asdict")


def is_builtin_type(obj: object) -> bool:
    return type(obj).__module__ == "builtins"


def apply_to_tensors_only(
    function: Callable[[Tensor], Any], value: Any, warning_msg_fn: Any = None
) -> Any:
    """`value` with `function` applied to each tensor in its lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance_namedtuple(value):
        return type(value)(*(apply_to_tensors_only(function, one) for one in value))
    if isinstance(value, Mapping):
        return {key: apply_to_tensors_only(function, one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return type(value)(apply_to_tensors_only(function, one) for one in value)  # type: ignore[call-arg]
    return value


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
