"""How far training has come, and how many samples a micro-batch and a step have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, final, overload

from ..utils.arguments import whole
from ..utils.errors import UsageError
from .means import StepMeans

# -- gradient accumulation: which micro-batch is the last of its step, and by what losses are divided ----
#     set_train_batch_size ──> steps ──first backward of a step──> steps_now, until the update
#
# A new number of micro-batches takes effect with the next optimizer step: all losses of one step are divided by
# the same number.


@final
class Accumulation:
    """Counts forwards, backwards and calls of step() since the last update."""

    def __init__(self, steps: int, *, is_managed: bool) -> None:
        """`is_managed`: the engine counts micro-batches; otherwise every step() is an update."""
        self.steps = steps  # micro-batches of the following steps
        self.is_managed = is_managed
        self.extra = 0  # micro-batches of each step that this rank runs for others
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

    @property
    def micro_batch(self) -> int:
        """The number of the micro-batch of the current step whose forward comes next, from 0."""
        return self.done + self._backwards

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
        return self.done + 1 >= self.steps_now + self.extra

    def ends_step(self, *, counts_all: bool = False) -> bool:
        """Whether the next step() updates the parameters. counts_all: as `count` takes it."""
        if counts_all and self.is_managed and self._forced is None:
            return self.done + self._seen() >= self.steps_now + self.extra
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


@final
class Counters:
    """The counters of one engine. The training step advances them, checkpoints save and restore them."""

    def __init__(
        self,
        accumulation: Accumulation,
        means: StepMeans,
        *,
        micro_batch_size: int,
        world_size: int,
    ) -> None:
        """`micro_batch_size`: samples of one forward on one rank."""
        self.global_steps = 0  # optimizer steps, skipped ones included
        self.micro_steps = 0  # micro-batches of this rank
        self.skipped_steps = 0  # steps without an update, because gradients were not finite
        self.global_samples = 0  # samples over all ranks
        self.best_metric: float | None = None  # of the saves; None: none was finite
        self.saves_since_best = 0  # with a metric; all of them where none was finite
        self.accumulation = accumulation
        self.means = means
        self.micro_batch_size = micro_batch_size
        self._world_size = world_size

    def count_micro_batches(self, *, counts_all: bool = False) -> None:
        """step() was called: add the micro-batches that it ends. counts_all: see `Accumulation.count`."""
        done = self.accumulation.done
        num_micro_batches = self.accumulation.count(counts_all=counts_all)
        self.micro_steps += num_micro_batches
        if self.accumulation.extra:  # the samples of others are counted with this rank's own
            num_micro_batches = max(0, min(num_micro_batches, self.accumulation.steps_now - done))
        self.global_samples += num_micro_batches * self.micro_batch_size * self._world_size

    def count_save(self, metric: float | None, mode: str) -> None:
        """A checkpoint was saved with a metric; None: it is not finite. mode: "min" or "max" is better."""
        before, sign = self.best_metric, -1 if mode == "max" else 1
        if metric is not None and (before is None or sign * metric < sign * before):
            self.best_metric, self.saves_since_best = metric, 0
        else:
            self.saves_since_best += 1

    def train_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.micro_batch_size * self.accumulation.steps * self._world_size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the accumulation steps; the micro-batch stays. Raises UsageError: they are no whole number."""
        train_batch_size = whole("set_train_batch_size: train_batch_size", train_batch_size, 1)
        each = self.micro_batch_size * self._world_size
        if train_batch_size % each:
            raise UsageError(
                f"set_train_batch_size({train_batch_size}): must be a multiple of micro-batch "
                f"({self.micro_batch_size}) x ranks ({self._world_size}) = {each}"
            )
        self.accumulation.steps = train_batch_size // each

    def set_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of one forward; the accumulation steps stay."""
        self.micro_batch_size = whole(
            "set_train_micro_batch_size: micro_batch_size", micro_batch_size, 1
        )


class _HasCounters(Protocol):
    _counters: Counters


@final
class CounterAttribute:
    """An attribute of the engine that is one of its counters. A script may set it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, engine: None, owner: type) -> CounterAttribute: ...
    @overload
    def __get__(self, engine: _HasCounters, owner: type) -> int: ...
    def __get__(self, engine: _HasCounters | None, owner: type) -> int | CounterAttribute:
        if engine is None:  # the class is asked, as by inspect and pydoc
            return self
        value: int = getattr(engine._counters, self._name)
        return value

    def __set__(self, engine: _HasCounters, value: int) -> None:
        setattr(engine._counters, self._name, value)


__all__ = ["Accumulation", "CounterAttribute", "Counters"]
