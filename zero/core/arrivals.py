"""Counts the gradients of the running backward by slot: which have arrived, and whether more will."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import final

from torch import nn
from torch.autograd.graph import get_gradient_edge

from ...ops.torch_internals import will_execute


class Added(Enum):
    """What became of a gradient that has arrived."""

    NOT_READY = 1  # the bucket expects more gradients
    READY = 2  # it was the last one that the bucket expects
    LATE = 3  # the bucket is being sent: nothing was done; see `GradBucket.take`


@final
class Arrivals:
    """The arrivals of the running backward, by slot.

    Nearly all slots get one gradient. For them the hook calls `add_awaited` alone.

    awaits: the slot expects its only gradient, which may stay in `.grad` until all have arrived.
    remaining: slots that are not complete. One without elements, a slice of which other ranks have all, is.
    has_frozen: some parameters were frozen after `initialize`, so they get no gradient in this backward.
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
        self.has_frozen = False
        self._params = params
        self._is_small, self._is_large = is_small, is_large
        # a slot without elements gets no gradient
        self._least = [int(param.numel() > 0) for param in params]
        self._expected = list(self._least)  # number of arrivals that make each slot complete
        self._counts = [0] * len(params)  # without those of `awaits`
        # `awaits` as `open` set it: a slot that is True here and False in `awaits` has had its gradient
        self._awaited_at_open = [False] * len(params)
        self._has_counts = False  # an earlier backward has been counted
        self._next = (
            0  # the gradients before this slot have arrived, or the graph does not produce them
        )

    def begin_backward(self) -> None:
        """A backward starts. Its gradients arrive after `open`."""
        seen = self._seen()
        self._expected = [
            (count or least) if param.requires_grad else 0
            for param, count, least in zip(self._params, seen, self._least, strict=True)
        ]
        self._has_counts = self._has_counts or any(seen)
        self._counts = [0] * len(self._params)
        self._next = 0
        self._close()
        self.has_frozen = not all(param.requires_grad for param in self._params)
        self.remaining = len(self._params) - self._expected.count(0)

    def open(self) -> None:
        """From now on gradients are counted."""
        self.awaits = [
            expected == 1 and (is_small or self._has_counts) and not is_large
            for expected, is_small, is_large in zip(
                self._expected, self._is_small, self._is_large, strict=True
            )
        ]
        self._awaited_at_open = list(self.awaits)

    def add_awaited(self, position: int) -> Added | None:
        """The only gradient of slot `position` has arrived. None: it is not awaited, and nothing was done."""
        if not self.awaits[position]:
            return None
        self.awaits[position] = False
        self.remaining -= 1
        return Added.NOT_READY if self.remaining else Added.READY

    def add(self, position: int) -> Added:
        """A gradient has arrived in slot `position`."""
        added = self.add_awaited(position)
        if added is not None:
            return added
        count = self._counts[position] + 1
        self._counts[position] = count
        if self._awaited_at_open[position] or count != self._expected[position]:
            return Added.NOT_READY
        self.remaining -= 1
        return Added.NOT_READY if self.remaining else Added.READY

    def _seen(self) -> list[int]:
        """The arrivals of each slot since `begin_backward`."""
        return [
            count + (awaited and not awaits)
            for count, awaited, awaits in zip(
                self._counts, self._awaited_at_open, self.awaits, strict=True
            )
        ]

    def _close(self) -> None:
        self.awaits = [False] * len(self._params)
        self._awaited_at_open = list(self.awaits)

    @property
    def absent(self) -> list[nn.Parameter]:
        """Parameters that need a gradient and have none in the running or last backward."""
        slots = zip(self._params, self._expected, self._seen(), strict=True)
        return [param for param, expected, seen in slots if expected and not seen]

    @property
    def is_complete(self) -> bool:
        """Every expected gradient has arrived."""
        return self.remaining <= 0

    def expect_no_more(self) -> None:
        """The missing gradients will not arrive. One that does is late."""
        if self.remaining:
            self._counts = self._seen()
            self._close()
            self.remaining = 0

    def expects_more(self) -> bool:
        """The graph of the running backward still produces some gradient. Call only inside of a backward.

        Each module of a unit asks when it ends. A slot that awaits nothing does so until the backward ends, so
        all calls of a backward look at each slot once.
        """
        while self._next < len(self._params) and not self._may_still_arrive(self._next):
            self._next += 1
        return self._next < len(self._params)

    def _may_still_arrive(self, position: int) -> bool:
        """The graph produces a gradient for this slot, and none has arrived."""
        param = self._params[position]
        has_arrived = self._awaited_at_open[position] and not self.awaits[position]
        if has_arrived or self._counts[position] or not param.requires_grad:
            return False
        return will_execute(get_gradient_edge(param).node)


__all__ = ["Added", "Arrivals"]
