"""The loss scale of the backward pass that is running.

`engine.backward` records it around autograd's call; `engine.scale` records it by a hook on the loss that it
returns. A backward pass that neither of them started computes gradients of the unscaled loss.

One pass may run through several engines, as that of a GAN's generator does. So each of them asks here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import final
from weakref import ReferenceType, ref

from torch import Tensor

from ...ops.torch_internals import after_backward


@final
class _Pass:
    """A running backward pass. What runs it holds it: `scaled_backward`, or autograd, also where it raises."""

    def __init__(self, loss_scale: float) -> None:
        self.loss_scale: float | None = loss_scale  # None: it has ended
        _passes[:] = [one for one in _passes if _scale_of(one) is not None]
        _passes.append(ref(self))

    def end(self) -> None:
        self.loss_scale = None


# The innermost last. One list for the process, as there is one autograd: its threads run nodes of all engines.
_passes: list[ReferenceType[_Pass]] = []


def _scale_of(one: ReferenceType[_Pass]) -> float | None:
    found = one()
    return None if found is None else found.loss_scale


@contextmanager
def scaled_backward(loss_scale: float) -> Iterator[None]:
    """Record `loss_scale` while the backward pass of a loss that was multiplied by it runs."""
    running = _Pass(loss_scale)
    try:
        yield
    finally:
        running.end()


def mark(loss: Tensor, loss_scale: float) -> None:
    """Record `loss_scale` whenever a backward pass starts from `loss`, which was multiplied by it."""

    def begin(_: Tensor) -> None:
        end = partial(_Pass.end, _Pass(loss_scale))  # autograd drops it with a pass that raises
        after_backward(end)

    loss.register_hook(begin)  # type: ignore[no-untyped-call]


def running_loss_scale() -> float | None:
    """The loss scale of the running backward pass; None if its loss was not scaled."""
    return next((scale for one in reversed(_passes) if (scale := _scale_of(one)) is not None), None)


__all__ = ["mark", "running_loss_scale", "scaled_backward"]
