"""What an engine counts and tells: micro-batches, batch sizes, learning rates, bytes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ...utils.errors import UsageError
from ..accumulation import Accumulation
from ..parts import Parts


class Counts:
    """The part of an engine that answers a script's questions about its steps."""

    optimizer: Any
    global_steps: int
    micro_steps: int
    skipped_steps: int
    global_samples: int
    world_size: int
    _accumulation: Accumulation
    _micro_batch_size: int
    _parts: Parts

    # -- accumulation -----------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """The micro-batch under way is the last of its step (DeepSpeed's rule and override)."""
        return self._accumulation.is_last()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on, until called again, step() takes `is_boundary` for the answer."""
        self._accumulation.force(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in here reduce nothing; the first one after it, or step(), reduces it all.

        Valid at every stage. At stages 2 and 3 each rank holds whole gradients until then.
        """
        return self._accumulation.no_sync()

    def accumulated(self) -> tuple[int, int]:
        """Micro-batches of the step under way that step() has counted, and of how many."""
        return self._accumulation.done, self._accumulation.steps_now

    def resume_accumulation(self, done: int) -> None:
        """A checkpoint was loaded that was saved behind `done` micro-batches of a step."""
        self._accumulation.resume(done)

    # -- sizes and rates --------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(group["lr"]) for group in self._param_groups()]

    def get_mom(self) -> list[Any]:
        """Momentum (or betas) of every parameter group; 0 where the optimizer has neither."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self._param_groups()]

    def _param_groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def train_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self._micro_batch_size * self._accumulation.steps * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward on one rank."""
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self._accumulation.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the accumulation steps so that a step has so many samples; the micro-batch stays.

        It counts from the next optimizer step on: one that has begun ends as it began.
        """
        each = self._micro_batch_size * self.world_size
        if train_batch_size < 1 or train_batch_size % each:
            raise UsageError(
                f"set_train_batch_size({train_batch_size}): must be a multiple of micro-batch "
                f"({self._micro_batch_size}) x ranks ({self.world_size}) = {each}"
            )
        self._accumulation.steps = train_batch_size // each

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of one forward; the accumulation steps stay."""
        if micro_batch_size < 1:
            raise UsageError(f"set_train_micro_batch_size({micro_batch_size}): must be at least 1")
        self._micro_batch_size = micro_batch_size

    def bytes_sent(self) -> dict[str, int]:
        """Bytes this rank has sent since the engine was made, for each kind of collective."""
        return dict(self._parts.sharded.collectives.sent_bytes)

    def zero_optimization_stage(self) -> int:
        return int(self._parts.config.zero_optimization.stage)

    def gradient_clipping(self) -> float:
        return float(self._parts.config.gradient_clipping)
