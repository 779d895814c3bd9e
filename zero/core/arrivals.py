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
    """The arrivals of the running backward, by slot.

    Nearly all slots get one gradient. For them the hook only clears `awaits` and counts `remaining`.

    awaits: the slot expects its only gradient, which may stay in `.grad` until all have arrived.
    remaining: slots that are not complete.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], is_small: Sequence[bool], is_large: Sequence[bool]
    ) -> None:
        """
        Args:
            is_small: by slot; its gradient may stay in `.grad` in the first backward already, when it is not
                known yet that there is one only.
            is_large: by slot; its gradient never stays there.
        """
        self.awaits = [False] * len(params)
        self.remaining = 0
        self._params = params
        self._is_small, self._is_large = is_small, is_large
        self._expected = [1] * len(params)  # number of arrivals that make each slot complete
        self._counts = [0] * len(params)  # without those of `awaits`
        self._awaited = [False] * len(params)  # `awaits` as it was opened
        self._has_counts = False  # an earlier backward has been counted

    def begin_backward(self) -> None:
        """A backward starts. Its gradients arrive after `open`."""
        seen = self._seen()
        self._expected = [
            (count or 1) if param.requires_grad else 0
            for param, count in zip(self._params, seen, strict=True)
        ]
        self._has_counts = self._has_counts or any(seen)
        self._counts = [0] * len(self._params)
        self._close()
        self.remaining = len(self._params) - self._expected.count(0)

    def open(self) -> None:
        """From now on gradients are counted."""
        self.awaits[:] = [
            expected == 1 and (is_small or self._has_counts) and not is_large
            for expected, is_small, is_large in zip(
                self._expected, self._is_small, self._is_large, strict=True
            )
        ]
        self._awaited = list(self.awaits)

    def add(self, position: int) -> bool:
        """A gradient has arrived in slot `position`. True: all slots are complete now."""
        if self.awaits[position]:
            self.awaits[position] = False
        else:
            count = self._counts[position] + 1
            self._counts[position] = count
            if self._awaited[position] or count != self._expected[position]:
                return False
        self.remaining -= 1
        return self.remaining == 0

    def _seen(self) -> list[int]:
        """The arrivals of each slot since `begin_backward`."""
        return [
            count + (awaited and not awaits)
            for count, awaited, awaits in zip(self._counts, self._awaited, self.awaits, strict=True)
        ]

    def _close(self) -> None:
        self.awaits[:] = self._awaited = [False] * len(self._params)

    @property
    def absent(self) -> list[nn.Parameter]:
        """Parameters that need a gradient and have none in the running or last backward."""
        slots = zip(self._params, self._seen(), strict=True)
        return [param for param, seen in slots if param.requires_grad and not seen]

    @property
    def is_complete(self) -> bool:
        """Every expected gradient has arrived."""
        return self.remaining <= 0

    @property
    def has_frozen(self) -> bool:
        """Some parameters were frozen after `initialize`, so they get no gradient in this backward."""
        return 0 in self._expected

    def expect_no_more(self) -> None:
        """The missing gradients will not arrive. One that does is late."""
        if self.remaining:
            self._counts = self._seen()
            self._close()
            self.remaining = 0

    def expects_more(self) -> bool:
        """The graph of the running backward still produces some gradient. Call only inside of a backward."""
        expected = sum(
            torch._C._will_engine_execute_node(get_gradient_edge(param).node)
            for param in self._params
            if param.requires_grad
        )
        return sum(map(bool, self._seen())) < expected


__all__ = ["Arrivals"]
