"""With which loss scale the backward that is running was started, by whichever engine of this process.

`engine.backward` says so around autograd's call, `engine.scale` by a hook on what it returns. A backward that
neither of them started brings gradients of the plain loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# of the backward passes that are running, the innermost last; not for a thread: autograd has threads of its own
_loss_scales: list[float] = []


@contextmanager
def scaled_backward(loss_scale: float) -> Iterator[None]:
    """Around a backward of a loss that was multiplied by `loss_scale`."""
    before = len(_loss_scales)
    _loss_scales.append(loss_scale)
    try:
        yield
    finally:
        del _loss_scales[before:]


def mark(loss: Tensor, loss_scale: float) -> None:
    """A backward through `loss` is one of a loss that was multiplied by `loss_scale`."""

    def begin(_: Tensor) -> None:
        _loss_scales.append(loss_scale)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def end() -> None:
        _loss_scales.pop()

    loss.register_hook(begin)  # type: ignore[no-untyped-call]


def forget_failed() -> None:
    """Outside of any backward: one that raised has not ended what `mark` began."""
    if _loss_scales and torch._C._current_graph_task_id() == -1:
        _loss_scales.clear()


def running_loss_scale() -> float | None:
    """The loss scale of the backward that is running; None where nobody scaled its loss."""
    return _loss_scales[-1] if _loss_scales else None


__all__ = ["forget_failed", "mark", "running_loss_scale", "scaled_backward"]
