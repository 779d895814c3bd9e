"""Gradient accumulation: which micro-batch is the last of its step, and by what losses are divided.

    set_train_batch_size ──> steps ──first backward of a step──> steps_now, until the update

A new number of micro-batches takes effect with the next optimizer step: all losses of one step are divided by
the same number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from ...utils.errors import UsageError


@final
class Accumulation:
    """Counts forwards, backwards and calls of step() since the last update."""

    def __init__(self, steps: int, *, is_managed: bool) -> None:
        """`is_managed`: the engine counts micro-batches; otherwise every step() is an update."""
        self.steps = steps  # micro-batches of the following steps
        self.is_managed = is_managed
        self.in_no_sync = False
        self.done = 0  # micro-batches of the current step that step() has counted
        self._fixed: int | None = None  # micro-batches of the current step; None: none has begun
        self._forced: bool | None = None
        self._forwards = 0  # since the last step()
        self._backwards = 0

    @property
    def steps_now(self) -> int:
        """Micro-batches of the current step, or of the next one if none has begun."""
        return self.steps if self._fixed is None else self._fixed

    def forward(self) -> None:
        """Count a forward with a graph that begins."""
        self._forwards += 1

    def backward(self) -> None:
        """Count a backward that begins."""
        self._fixed = self.steps_now
        self._backwards += 1

    def is_last(self) -> bool:
        """Whether the current micro-batch is the last of its step (DeepSpeed's rule and override)."""
        if self._forced is not None:
            return self._forced
        return self.done + 1 >= self.steps_now

    def ends_step(self, *, counts_all: bool = False) -> bool:
        """Whether the next step() updates the parameters. counts_all: as `count` takes it."""
        if counts_all and self.is_managed and self._forced is None:
            return self.done + self._seen() >= self.steps_now
        return self.is_last() if self.is_managed else True

    def reduces_now(self, *, shards_grads: bool) -> bool:
        """Whether the gradients of a backward that starts now are reduced before it ends."""
        if self.in_no_sync:
            return False
        return shards_grads or (self.is_managed and self.is_last())

    def force(self, is_last: bool) -> None:
        """Override what `is_last` returns, until the next call of `force`."""
        if not self.is_managed:
            raise UsageError(
                "set_gradient_accumulation_boundary() with managed_gradient_accumulation = false: every step() "
                "is then a boundary; remove the call or set the key to true"
            )
        self._forced = is_last

    def _seen(self) -> int:
        """Micro-batches since the last step(): several backward passes of one forward are one."""
        return max(1, min(self._backwards, self._forwards or self._backwards))

    def count(self, *, counts_all: bool = False) -> int:
        """Count a call of step(), and return the number of micro-batches it stands for.

        Usually step() follows each micro-batch: one. If the script decides when a step ends, several backward
        passes may precede step().
        counts_all: several may precede it in any case.
        """
        seen = self._seen() if counts_all or not self.is_managed or self._forced is not None else 1
        self.done += seen
        self._forwards = self._backwards = 0
        return seen

    def end_step(self) -> None:
        """End the step: the parameters were updated, or the step was skipped."""
        self.done = 0
        self._fixed = None

    def forget(self) -> None:
        """Forget the micro-batches since the last step(): their gradients were dropped."""
        self._forwards = self._backwards = 0
        if self.done == 0:
            self._fixed = None

    def resume(self, done: int) -> None:
        """Continue a step after its first `done` micro-batches."""
        self.done = done
        self._forwards = self._backwards = 0
        self._fixed = self.steps if done else None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the context no gradients are reduced."""
        if self.in_no_sync:
            raise UsageError("no_sync() inside no_sync(): leave the outer context first")
        self.in_no_sync = True
        try:
            yield
        finally:
            self.in_no_sync = False


__all__ = ["Accumulation"]
