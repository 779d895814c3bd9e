"""How far training has come, and how many samples a micro-batch and a step have."""

from __future__ import annotations

from typing import Protocol, final, overload

from ...utils.arguments import whole
from ...utils.errors import UsageError
from .accumulation import Accumulation


@final
class Counters:
    """The counters of one engine. The training step advances them, checkpoints save and restore them."""

    def __init__(
        self, accumulation: Accumulation, *, micro_batch_size: int, world_size: int
    ) -> None:
        """`micro_batch_size`: samples of one forward on one rank."""
        self.global_steps = 0  # optimizer steps, skipped ones included
        self.micro_steps = 0  # micro-batches of this rank
        self.skipped_steps = 0  # steps without an update, because gradients were not finite
        self.global_samples = 0  # samples over all ranks
        self.accumulation = accumulation
        self.micro_batch_size = micro_batch_size
        self._world_size = world_size

    def count_micro_batches(self, *, counts_all: bool = False) -> None:
        """step() was called: add the micro-batches that it ends. counts_all: see `Accumulation.count`."""
        num_micro_batches = self.accumulation.count(counts_all=counts_all)
        self.micro_steps += num_micro_batches
        self.global_samples += num_micro_batches * self.micro_batch_size * self._world_size

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


__all__ = ["CounterAttribute", "Counters"]
