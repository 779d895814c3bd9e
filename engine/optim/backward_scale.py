"""The loss scale of the backward pass that is running, for all engines of this process.

`engine.backward` records it around autograd's call; `engine.scale` records it by a hook on the loss that it
returns. A backward pass that neither of them started computes gradients of the unscaled loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# One value for each running backward pass, the innermost last. Not thread-local: autograd runs its own threads.
_loss_scales: list[float] = []


@contextmanager
def scaled_backward(loss_scale: float) -> Iterator[None]:
    """Record `loss_scale` while the backward pass of a loss that was multiplied by it runs."""
    before = len(_loss_scales)
    _loss_scales.append(loss_scale)
    try:
        yield
    finally:
        del _loss_scales[before:]


def mark(loss: Tensor, loss_scale: float) -> None:
    """Record `loss_scale` whenever a backward pass starts from `loss`, which was multiplied by it."""

    def begin(_: Tensor) -> None:
        _loss_scales.append(loss_scale)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def end() -> None:
        _loss_scales.pop()

    loss.register_hook(begin)  # type: ignore[no-untyped-call]


def forget_failed() -> None:
    """Remove what `mark` left behind for a backward pass that raised. Does nothing inside a backward pass."""
    if _loss_scales and torch._C._current_graph_task_id() == -1:
        _loss_scales.clear()


def running_loss_scale() -> float | None:
    """The loss scale of the running backward pass; None if its loss was not scaled."""
    return _loss_scales[-1] if _loss_scales else None


__all__ = ["forget_failed", "mark", "running_loss_scale", "scaled_backward"]
