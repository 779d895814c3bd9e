"""What a script reads of an engine: numbers about its steps, batches, bytes and memory; values of metrics."""

from __future__ import annotations

from abc import ABC
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..utils.errors import UsageError
from .config.config import Config
from .data.metrics import gather_rows
from .parts import Parts
from .states import States
from .steps.accumulation import Accumulation
from .steps.batch_loop import Loop
from .steps.counters import Counters
from .steps.training_step import TrainingStep

if TYPE_CHECKING:
    from .profiling.profile import Profile
    from .telemetry.comms import CommsSummary


class Readings(ABC):
    """The part of `Engine` that only reads. `Engine` sets the attributes."""

    config: Config
    optimizer: Any
    _parts: Parts
    _accumulation: Accumulation
    _counters: Counters
    _step: TrainingStep
    _states: States
    _batches: Loop

    def train_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self._counters.train_batch_size()

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward on one rank."""
        return self._counters.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self._accumulation.steps

    def was_step_applied(self) -> bool:
        """The last step() changed the parameters (not between boundaries, not when skipped)."""
        return self._step.was_applied

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the last step's gradients over all ranks, unscaled, before clipping; None before one.

        None as well at stages 1 and 2 with zero_optimization.compute_grad_norm = false.
        """
        return self._step.grad_norm if self.config.zero_optimization.shows_grad_norm else None

    @property
    def loss_scale(self) -> float:
        """The factor the next loss is multiplied with."""
        return self._parts.loss_scale.value

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(group["lr"]) for group in self._param_groups()]

    def get_mom(self) -> list[Any]:
        """Momentum (or betas) of every parameter group; 0 where the optimizer has neither."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self._param_groups()]

    def _param_groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    @property
    def num_stages(self) -> int:
        """The ranks that share one model: pipeline.stages of the config."""
        return self._batches.place.num_ranks

    @property
    def stage_id(self) -> int:
        """This rank's place among them, from 0."""
        return self._batches.place.rank

    def is_first_stage(self) -> bool:
        """This rank has the first layers of the model: its iterator is read."""
        return self._batches.place.is_first

    def is_last_stage(self) -> bool:
        """This rank has the last layers of the model: it has the outputs of eval_batch."""
        return self._batches.place.is_last

    def bytes_sent(self) -> dict[str, int]:
        """Bytes this rank has sent since the engine was made, for each kind of collective."""
        sent: Counter[str] = Counter()
        for collectives in self._parts.opened:
            sent.update(collectives.sent_bytes)
        return dict(sent)

    def comms_summary(self, *, show_straggler: bool = False) -> CommsSummary:
        """Counts, times and bandwidths of this rank's collectives since the engine was made; print it.

        Needs `comms_logger` of the config. show_straggler: also compare the waits of all ranks; a collective.
        """
        log = self._parts.sharded.collectives.message_log
        if not log.is_on and not log.rows():
            raise UsageError(
                "engine.comms_summary(): collectives are not logged; set comms_logger.enabled to true in the "
                "config"
            )
        from .telemetry.comms import summary_of

        return summary_of(self._parts.sharded.collectives, show_straggler=show_straggler)

    def gather_for_metrics(self, values: Any, num_samples: int | None) -> Any:
        """`values` of all data ranks, in the order of the dataset, each sample once. A collective.

        Row i of each data rank is taken in turn. With DistributedSampler(dataset, engine.dp_world_size,
        engine.dp_rank, shuffle=False) and its whole part, or one batch of it, that is the dataset's order; with
        shuffling it is that of the epoch. A copy is sent to every rank.

        Args:
            values: a tensor [rows, ...] with a row for each sample of this rank, or a dict or tuple of such
                tensors, nested. Data ranks may have different numbers of rows. Ranks of a pipeline without
                the last stage pass anything, such as the None that eval_batch returns for the outputs.
            num_samples: the samples of the dataset, minus those that earlier calls have gathered. Later rows
                are dropped: the sampler has repeated samples to fill up. None keeps all rows.
        Returns:
            the same on every rank: tensors [at most num_samples, ...] on `device`, detached, in dicts and
                tuples.
        Raises:
            UsageError, on every rank: a value has no rows; numbers of rows differ on a rank; dtypes or other
                dimensions differ by rank; there are more rows than a sampler's repeats explain; or tensor or
                sequence ranks with the same samples have different values.
        """
        sharded = self._parts.sharded
        return gather_rows(
            sharded.collectives,
            sharded.flat_groups.mesh,
            values,
            num_samples,
            has_values=self._batches.place.is_last,
        )

    def flops_profile(self) -> Profile | None:
        """This rank's part of what `flops_profiler` of the config has counted last; None before that."""
        return self._parts.report.last_profile

    def memory_plan(self) -> dict[str, int]:
        """Bytes that this rank holds now: param, grad, master, optimizer, buckets; and on "host" and "disk"."""
        return self._states.memory_plan()

    def zero_optimization_stage(self) -> int:
        """The stage of the config."""
        return int(self.config.zero_optimization.stage)

    def gradient_clipping(self) -> float:
        """The limit of the config; 0 is none."""
        return float(self.config.gradient_clipping)


__all__ = ["Readings"]
