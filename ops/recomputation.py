"""Tells which call of a forward a call in a recomputation of torch's checkpoint repeats.

    forward    checkpoint A    layer(x)  layer(y)      makes a, b
               checkpoint B    layer(z)                makes c
    backward   recompute  B    layer(z)                gets c
               recompute  A    layer(x)  layer(y)      gets a, b

torch has one object for each call of a checkpoint, which its hooks of saved tensors know in the forward and in
each recomputation. So any order of backwards and any number of micro-batches between are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, final
from weakref import WeakKeyDictionary

from .torch_internals import checkpoints

Value = TypeVar("Value")


@final
class FirstCalls(Generic[Value]):
    """What the calls of one function have made in checkpoints that wait for backward, in the order of calls.

    Reentrant checkpoints have no graph of their first call, so nothing is kept of it.
    """

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[Any, list[Value]] = WeakKeyDictionary()  # of a checkpoint
        self._num_repeated: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of a recomputation

    def value(self, make: Callable[[], Value]) -> tuple[Value, bool]:
        """What this call makes, or what the call has made that it repeats. And whether it is a first call."""
        around = checkpoints()
        runs = [place for place, each in enumerate(around) if each.recomputation is not None]
        first = runs[-1] + 1 if runs else 0
        repeated = self._next(around[runs[-1]]) if runs else []
        value = repeated[0] if repeated else make()
        for each in around[first:]:  # checkpoints in a recomputation are new ones
            self._made.setdefault(each.checkpoint, []).append(value)
        return value, not repeated

    def _next(self, around: Any) -> list[Value]:
        number = self._num_repeated.get(around.recomputation, 0)
        self._num_repeated[around.recomputation] = number + 1
        return self._made.get(around.checkpoint, [])[number : number + 1]


__all__ = ["FirstCalls"]
