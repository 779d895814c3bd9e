"""Tries torch's optimizers and schedules on one number, before they are used.

torch checks their parameters in the constructor, in the first step, or not at all. Its errors name neither the
section of the config nor the class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...utils.errors import UsageError, XdsError


def try_optimizer(kind: type[torch.optim.Optimizer], params: Mapping[str, Any]) -> None:
    """One step of `kind` with `params`.

    Raises:
        UsageError: it fails; names optimizer.params and torch's reason.
    """

    def one_step() -> None:
        weight = torch.zeros(1, requires_grad=True)
        optimizer = kind([weight], **params)
        weight.grad = torch.ones(1)
        optimizer.step()
        if not torch.isfinite(weight).all():
            raise ValueError("the first step gives a weight that is not finite")

    _try("optimizer", kind.__name__, params, one_step)


def has_fused(kind: type[torch.optim.Optimizer], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's fused kernel of `kind` updates tensors of `dtype` on `device`.

    One step asks. torch's tables do not agree: 2.11 has a CUDA kernel of Adagrad, and its class refuses CUDA.
    """
    weight = torch.zeros(1, device=device, dtype=dtype, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    params: dict[str, Any] = {"fused": True}
    try:
        kind([weight], **params).step()
    except RuntimeError:
        return False
    return True


def try_schedule(make: Callable[[torch.optim.Optimizer], Any], name: str, params: Any) -> None:
    """Two steps of the schedule that `make` builds. Raises UsageError like `try_optimizer`."""

    def two_steps() -> None:
        weight = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        schedule = make(optimizer)
        for _ in range(2):
            optimizer.step()
            schedule.step()

    _try("scheduler", name, params, two_steps)


def _try(section: str, name: str, params: Any, trial: Callable[[], None]) -> None:
    try:
        trial()
    except XdsError:
        raise
    except Exception as error:
        raise UsageError(
            f"{section}.params = {dict(params)!r} for {name}: torch refuses them with {type(error).__name__}: "
            f"{error}; see the documentation of torch's {name}"
        ) from None


__all__ = ["has_fused", "try_optimizer", "try_schedule"]
