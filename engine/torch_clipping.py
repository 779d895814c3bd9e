"""torch's functions that clip gradients, between backward and step of an engine.

    torch.nn.utils.clip_grad_norm_          the next step clips, as by engine.clip_grad_norm; returns the norm
    clip_grad_value_, clip_grads_with_norm_ refused
    the script's own gradients              torch's own function

The engine has taken the gradients, so `.grad` is None and torch's functions would do nothing, without a word.
They look at nothing else that the engine could change, and scripts import them before it exists. So while an
engine lives the three functions first ask who has the gradients. After the last `destroy` they are torch's own.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from functools import partial
from types import GeneratorType
from typing import Any, final

from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_

from ..ops.torch_internals import exchange_inner
from ..utils.errors import UsageError, XdsError

_REMEDY = (
    "set gradient_clipping in the config, or call engine.clip_grad_norm(max_norm) before step()"
)


class GradHolder(ABC):
    """Has the gradients of an engine's parameters."""

    @abstractmethod
    def held(self, given: AbstractSet[int]) -> frozenset[int]:
        """The ids of all parameters whose gradients wait for a step; empty if none of `given` is among them.

        Empty as well where gradients are in `.grad`: the script has set them, or xds.deepspeed shows them.
        """

    @abstractmethod
    def clip(self, max_norm: float) -> Tensor:
        """Let the next step clip to `max_norm`. Returns the norm, []. For all ranks."""


@final
class _Functions:
    """The exchanged functions of torch, and the engines that live."""

    def __init__(self) -> None:
        self._holders: weakref.WeakSet[GradHolder] = weakref.WeakSet()
        self._own: dict[Callable[..., Any], Callable[..., Any]] = {}

    def add(self, holder: GradHolder) -> None:
        """From now on calls with its parameters go to `holder`."""
        self._holders.add(holder)
        if not self._own:
            for function in (clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_):
                call = self._norm if function is clip_grad_norm_ else self._refuse
                self._own[function] = exchange_inner(function, partial(call, function))

    def remove(self, holder: GradHolder) -> None:
        self._holders.discard(holder)
        if not self._holders:
            for function, own in self._own.items():
                exchange_inner(function, own)
            self._own = {}

    def _find(self, name: str, params: list[Any]) -> GradHolder | None:
        """The engine that has the gradients of `params`; None: no engine has."""
        given = {id(param) for param in params}
        hits = [(holder, held) for holder in self._holders if (held := holder.held(given))]
        if not hits:
            return None
        holder, held = hits[0]
        others = any(param.grad is not None and id(param) not in held for param in params)
        if len(hits) > 1 or others or not held <= given:
            raise UsageError(
                f"{name} of a part of an engine's parameters, or of others beside them: the engine clips the "
                f"gradients of all its parameters together; {_REMEDY}"
            )
        return holder

    def _norm(
        self,
        function: Callable[..., Any],
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        parameters, listed = _listed(parameters)
        holder = self._find("torch.nn.utils.clip_grad_norm_", listed)
        if holder is None:
            return self._own[function](parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        if float(norm_type) != 2.0:
            raise UsageError(
                f"torch.nn.utils.clip_grad_norm_(norm_type={norm_type}): the engine has the gradients, and "
                "clips by their 2-norm; leave out norm_type"
            )
        norm = holder.clip(max_norm)
        if error_if_nonfinite and not math.isfinite(norm):
            raise XdsError(
                "torch.nn.utils.clip_grad_norm_(error_if_nonfinite=True): the norm of the gradients is "
                f"{norm:g}; look at this batch, or lower the learning rate"
            )
        return norm

    def _refuse(
        self,
        function: Callable[..., Any],
        parameters: Tensor | Iterable[Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        parameters, listed = _listed(parameters)
        name = f"torch.nn.utils.{function.__name__.removeprefix('_')}"
        if self._find(name, listed) is not None:
            raise UsageError(
                f"{name} between backward and step: the engine has the gradients, and clips by their norm "
                f"alone; {_REMEDY}, or change them by xds.zero.set_full_grad"
            )
        return self._own[function](parameters, *args, **kwargs)


def _listed(parameters: Any) -> tuple[Any, list[Any]]:
    """What torch gets, and the same as a list. A generator can be read once, and torch warns of empty ones."""
    if isinstance(parameters, Tensor):
        return parameters, [parameters]
    listed = list(parameters)
    return listed if listed or not isinstance(parameters, GeneratorType) else parameters, listed


# torch has one of each function in a process, whose engines share them
functions = _Functions()

__all__ = ["GradHolder", "functions"]
