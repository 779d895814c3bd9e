"""Runs updates on the host, in a thread, while the device computes.

step()       gradient sums are on the host, the norm is known
updates      | adam unit 0 | adam unit 1 | adam unit 2 |
to_device                  | copy unit 0 | copy unit 1 | copy unit 2 |
forward                                    unit 0 ...    stage 3: a unit waits for its own copy
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from ...offload.lanes import Done, Ticket
from .frozen import FrozenValues, Range
from .master import Master


@final
class Arrival(Ticket):
    """An update on the host, and then the copy of its values to the device."""

    def __init__(self) -> None:
        self._update: Ticket | None = None
        self._copy: Ticket | None = None

    def begin(self, update: Ticket) -> None:
        """The update has been submitted."""
        self._update = update

    def sent(self, copy: Ticket) -> None:
        """Its values are on their way."""
        self._copy = copy

    def wait(self) -> None:
        self._wait_sent().wait()

    def order(self) -> None:
        self._wait_sent().order()

    @property
    def is_done(self) -> bool:
        assert self._update is not None
        return self._update.is_done and (self._copy is None or self._copy.is_done)

    def _wait_sent(self) -> Ticket:
        assert self._update is not None
        self._update.wait()
        assert self._copy is not None
        return self._copy


@torch.no_grad()
def start_near(
    master: Master,
    update: Callable[[Tensor, Tensor | None], None],
    keep: Callable[[], FrozenValues],
) -> Ticket:
    """Start the update of a `master` whose values for forward are on the host as well. See `start_far`."""
    grad, compute = master.grads.for_update(), master.compute if master.casts else None
    master.wait()
    master.residence.begin()

    def work() -> None:
        kept = keep()
        update(grad, compute)
        kept.restore()

    ticket = master.host.lanes.updates.run(lambda: master.residence.run(work))
    master.begin_update(ticket)
    return ticket


@torch.no_grad()
def start_far(
    master: Master,
    update: Callable[[Tensor, Tensor | None], None],
    keep: Callable[[], FrozenValues],
    frozen: Sequence[Range],
) -> Arrival:
    """Start the update of `master`; the result completes when the device has the new values.

    Args:
        update: takes the gradient [n] and a place for the values in the compute dtype, if there is a cast.
        keep: saves what the update must not change: the elements `frozen`.
    """
    grad, host = master.grads.for_update(), master.host
    numel, dtype, casts = grad.numel(), master.params.dtype, master.casts
    mark = host.lanes.to_device.mark()
    master.wait()
    master.residence.begin()
    tensor, compute, arrival = master.raw, master.begin_send(), Arrival()

    def write(values: Tensor) -> None:
        kept = keep()
        update(grad, values if casts else None)
        kept.restore()
        if casts:
            for low, high in frozen:
                values[low:high].copy_(tensor[low:high])
        else:
            values.copy_(tensor)

    def work() -> None:
        values = host.sender.buffer(numel, dtype)
        is_done = master.residence.run(partial(write, values))
        arrival.sent(master.send(values, compute, mark) if is_done else Done())

    ticket = host.lanes.updates.run(work)
    arrival.begin(ticket)
    master.begin_update(ticket)
    return arrival


__all__ = ["Arrival", "start_far", "start_near"]
