"""Counts the gradients of one flat buffer that arrive in a backward, and says when all have arrived.

A gradient may arrive more than once: a reentrant checkpoint runs a separate graph for every call of a block.
The arrivals in the previous backward determine how many make a slot complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


@final
class Arrivals:
    """The arrivals of the running backward, by slot."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._expected = [1] * len(params)  # number of arrivals that make each slot complete
        self._counts = [0] * len(params)
        self._begun = 0  # slots with an arrival
        self._remaining = 0  # slots that are not complete

    def begin_backward(self) -> None:
        """A backward starts."""
        self._expected = [
            (seen or 1) if param.requires_grad else 0
            for param, seen in zip(self._params, self._counts, strict=True)
        ]
        self._counts = [0] * len(self._params)
        self._begun = 0
        self._remaining = sum(expected > 0 for expected in self._expected)

    def add(self, position: int) -> bool:
        """A gradient has arrived in slot `position`. True: all slots are complete now."""
        count = self._counts[position] + 1
        self._counts[position] = count
        self._begun += count == 1
        if count != self._expected[position]:
            return False
        self._remaining -= 1
        return self._remaining == 0

    @property
    def absent(self) -> list[nn.Parameter]:
        """Parameters that need a gradient and have none in the running or last backward."""
        slots = zip(self._params, self._counts, strict=True)
        return [param for param, seen in slots if param.requires_grad and not seen]

    @property
    def is_complete(self) -> bool:
        """Every expected gradient has arrived."""
        return self._remaining <= 0

    @property
    def has_frozen(self) -> bool:
        """Some parameters were frozen after `initialize`, so they get no gradient in this backward."""
        return 0 in self._expected

    def expect_no_more(self) -> None:
        """The missing gradients will not arrive."""
        self._remaining = 0

    def expects_more(self) -> bool:
        """The graph of the running backward still produces some gradient. Call only inside of a backward."""
        expected = sum(
            torch._C._will_engine_execute_node(get_gradient_edge(param).node)
            for param in self._params
            if param.requires_grad
        )
        return self._begun < expected


__all__ = ["Arrivals"]
