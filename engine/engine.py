"""The engine that `xds.initialize` returns: DeepSpeed's names for training, its states and its counters.

Engine ──> TrainingStep (steps/)    forward, backward, step
       ──> States                   state dicts, checkpoints, offload_states
       ──> Counters (steps/)        steps, samples, batch sizes
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from ..utils.arguments import wrong
from ..utils.errors import UsageError
from ..zero.access.access import Access
from ..zero.access.guards import Guards
from ..zero.core.backward_pass import IN_ROLLOUT
from .counters import Accumulation, CounterAttribute, Counters
from .internals import Internals
from .parts import Parts
from .process.process import local_rank
from .states import States
from .steps.batch_loop import Loop
from .steps.training_step import TrainingStep
from .torch_calls import TorchCalls

if TYPE_CHECKING:
    from .checkpoint.saver import Progress
    from .generation.rollout import Rollouts
    from .generation.weights import Weights
    from .profiling.profile import Profile
    from .telemetry.comms import CommsSummary


# read by the loops and by the layer of DeepSpeed's names
_FOR_LAYERS = {"internals", "end_step", "end_optimizer_step"}

log = logging.getLogger("xds")


@final
class Engine:
    """Trains `module` as its config says. Made by `xds.initialize`; names and semantics are DeepSpeed's.

    One optimizer step is `gradient_accumulation_steps()` rounds of forward, backward and step():

        loss = engine(batch)      forward, in the configured precision
        engine.backward(loss)     gradients, divided by the accumulation steps, reduced as the stage asks
        engine.step()             on the boundary: clip, update, publish, next learning rate
    """

    global_steps = CounterAttribute()  # optimizer steps, skipped ones included
    micro_steps = CounterAttribute()  # micro-batches of this rank
    skipped_steps = CounterAttribute()
    global_samples = CounterAttribute()
    saves_since_best = CounterAttribute()  # saves with a metric after the one with the best

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.config = parts.config
        self.module = parts.module
        self.optimizer: Any = parts.optimizer  # None: a frozen model, which only infers
        self.training_dataloader = parts.loader
        self.device = parts.device
        self.monitor = parts.report.monitor
        self.local_rank = local_rank()
        self._sharded = parts.sharded
        self._accumulation = Accumulation(
            parts.config.gradient_accumulation_steps,
            is_managed=parts.config.managed_gradient_accumulation,
        )
        self._counters = Counters(
            self._accumulation,
            parts.means,
            micro_batch_size=parts.config.train_micro_batch_size_per_gpu,
            world_size=self.dp_world_size,
        )
        self._states = States(parts, self._counters)
        self._step = TrainingStep(parts, self._counters, self._states)
        self._access = Access(parts.sharded, parts.updater, self._step)
        self._guards = Guards(parts.module, self._access, defers=parts.sharded.defers)
        self._rollouts: Rollouts | None = None  # until the first one
        self._torch_calls = TorchCalls(self, self._step, parts.updater, parts.module)
        if parts.optimizer is not None:
            self._torch_calls.take_optimizer(parts.optimizer)
        self.internals = Internals(
            parts, self._step, self._states, self._accumulation, self._guards, self._torch_calls
        )
        self._batches: Loop = parts.loop(parts, self._step, self._counters)
        parts.schedules.begin(self._counters)
        parts.recovery.bind(parts, self._counters, self._step, self._states)
        parts.outer.bind(parts, self._counters)

    # -- ranks: other ones after a recovery ---------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """The number of this rank among those of the engine."""
        own = self._sharded.collectives
        return self._parts.outer.number * own.world_size + own.rank

    @property
    def world_size(self) -> int:
        """The ranks of the engine."""
        return self._parts.outer.num_groups * self._sharded.collectives.world_size

    @property
    def dp_rank(self) -> int:
        """The place of this rank among those with other samples."""
        mesh, rank = self._sharded.flat_groups.mesh, self._sharded.collectives.rank
        return self._parts.outer.number * mesh.data + mesh.coordinates(rank).data

    @property
    def dp_world_size(self) -> int:
        """The ranks with other samples."""
        return self._parts.outer.num_groups * self._sharded.flat_groups.mesh.data

    # -- forward, backward, step ------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        raise UsageError(
            "xds.initialize returns one engine, which has optimizer, training_dataloader and lr_scheduler: "
            "write engine = xds.initialize(...), or take the tuple of xds.deepspeed.initialize"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, under autocast where the config says so. At stage 3 a collective.

        Raises Preempted: with checkpoint.preemption_save_dir a rank was asked to stop; all states are saved.
        """
        self._states.check_usable()
        self._batches.refuse("forward")
        self._parts.preemption.check()
        recovery = self._parts.recovery
        if recovery.is_on and torch.is_grad_enabled():
            self._begin_step()
        with recovery:
            if not recovery.has_lost:
                self._step.prove(args, kwargs)
        return self._step.forward(args, kwargs)

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        weight: float | Tensor | None = None,
    ) -> Tensor:
        """Gradients of `loss` / accumulation steps; they are reduced as the stage asks. A collective.

        With `weight` on every micro-batch of every rank the step's gradient is that of the mean over all items:
        sum(weight * gradient) / sum(weight), over micro-batches and ranks. No message is added.

        Args:
            loss: a scalar with a graph. With `weight` its gradient must be finite, also where weight is 0.
            retain_graph: as in torch; several losses of one step are several calls.
            scale_wrt_gas: False leaves out the division by the accumulation steps.
            weight: how many items, such as tokens, `loss` is the mean of: a number or a scalar tensor, at least
                0. A step whose weights are all 0 is skipped.

        Returns:
            the loss, divided by the accumulation steps where it has no weight, detached.

        Raises:
            UsageError: `loss` is not a scalar, or has no graph; or only some backwards of a step have a weight.
        """
        self._check_trains()
        self._batches.refuse("backward")
        recovery = self._parts.recovery
        self._begin_step()
        with recovery:
            if not recovery.has_lost:
                return self._step.backward(
                    loss, retain_graph=retain_graph, divides=scale_wrt_gas, weight=weight
                )
        return self._step.share_of(loss, divides=scale_wrt_gas and weight is None)

    def _begin_step(self) -> None:
        """A step begins or goes on. If a rank fails here the step is dropped at its end."""
        with self._parts.recovery:
            self._parts.recovery.begin_step()

    def scale(self, loss: Tensor, scale_wrt_gas: bool = True) -> Tensor:
        """`loss` times the loss scale over the accumulation steps, to call `.backward()` on yourself.

        In fp32 and bf16 a plain `loss.backward()` is right as well: the engine divides its gradients by the
        accumulation steps. In fp16 it raises, because small gradients would be lost without the loss scale.
        """
        self._batches.refuse("scale")
        return self._step.scale(loss, divides=scale_wrt_gas)

    def step(self) -> None:
        """Count a micro-batch; on an accumulation boundary update the parameters. A collective there.

        `optimizer.step()` does the same, but `lr_scheduler` stays as it is, as in torch. If both are called,
        the second one updates nothing.

        Raises:
            UsageError: no backward has run since the last step().
            XdsError: the gradients are not finite and the precision does not skip such steps; the
                parameters are untouched and the engine can go on. Or, after the step is taken: a checkpoint
                that was written in the background is not there.
        """
        self._check_trains()
        self._batches.refuse("step")
        self.end_step()

    def end_step(self) -> None:
        """`step` of the loops of train_batch. Scripts call `step`."""
        self._end_step(by_optimizer=False)

    def end_optimizer_step(self) -> None:
        """What `optimizer.step()` of the script does. Scripts call that."""
        self._check_trains()
        self._batches.refuse("optimizer.step")
        self._end_step(by_optimizer=True)

    def _end_step(self, *, by_optimizer: bool) -> None:
        recovery = self._parts.recovery
        with recovery:
            if not recovery.has_lost and self._step.step(
                self.lr_scheduler, by_optimizer=by_optimizer
            ):
                recovery.commit()
                weight = self._step.means.weight
                if weight is None:
                    weight = self._counters.train_batch_size() / self._parts.outer.num_groups
                self._parts.outer.advance(weight if self._step.was_applied else 0.0)
                for follower in self._parts.after_steps:
                    follower.advance(self.global_steps - self.skipped_steps)
                self._parts.report.step(self)
                self._parts.preemption.boundary()  # the failure of an earlier save does not prevent this one
        if recovery.has_lost:
            recovery.recover()
        if self._parts.saver is not None:
            self._parts.saver.check()

    def clip_grad_norm(self, max_norm: float) -> float:
        """Let the next step() clip to `max_norm`, not to gradient_clipping; inf only measures. A collective.

        Call it after the last backward of a step. Returns the norm that `get_global_grad_norm` returns after
        the step.
        """
        self._states.check_usable()
        self._batches.refuse("clip_grad_norm", "set gradient_clipping in the config to clip")
        with self._parts.recovery:
            if not self._parts.recovery.has_lost:
                return self._step.clip(max_norm)
        return math.nan  # of a step that is dropped

    def zero_grad(self) -> None:
        """Drop all gradients since the last update. At any time, before the first backward as well.

        `zero_grad()` of the module or of the optimizer does the same. Only after an `optimizer.step()` that has
        counted a micro-batch and updated nothing they drop nothing.
        """
        self._states.check_usable()
        self._step.drop_gradients()

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step: `gradient_accumulation_steps()` micro-batches from `data_iter`.

        The module must return the loss, or a tuple or mapping that begins with it or has `loss`.
        Without `data_iter` batches come from `training_dataloader`, over and over.

        Returns:
            the loss, averaged over micro-batches and ranks, [] fp32.
        """
        self._check_trains()
        return self._batches.train(self, data_iter)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        num_micro_batches: int | None = None,
        *,
        return_logits: bool = False,
        reduce_output: str | None = "avg",
        compute_loss: bool = True,
    ) -> Any:
        """The loss of the next micro-batches (default: as many as a step takes), averaged as in training.

        Args:
            return_logits: return (loss, outputs): what the module returned for each micro-batch of this rank;
                in a pipeline None on ranks without the last stage.
            reduce_output: "avg", or None for the losses of this rank's micro-batches.
            compute_loss: False returns None for the loss, for outputs alone.
        """
        self._states.check_usable()
        if reduce_output not in ("avg", None):
            raise wrong("eval_batch: reduce_output", reduce_output, '"avg" or None')
        with self._parts.report.spending("evaluation"):
            return self._batches.evaluate(
                self,
                data_iter,
                num_micro_batches,
                return_logits=return_logits,
                reduces=reduce_output == "avg",
                computes_loss=compute_loss,
            )

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Let train_batch and eval_batch use `fn(batch)` for each micro-batch they read; None: as read."""
        self._batches.set_batch_fn(fn)

    def set_data_post_process_func(
        self, post_process_func: Callable[[Any, dict[str, Any]], Any] | None
    ) -> None:
        """Let the loader of a curriculum give `post_process_func(batch, state)` for each micro-batch.

        `state` has DeepSpeed's keys: `current_difficulties` by metric, `curriculum_step` (from 1),
        `consumed_samples`, and `batch`, the numbers of the step's samples that are left. None: as read.

        Raises UsageError: the engine's loader has no curriculum.
        """
        from .data.curriculum import sampler_of

        if post_process_func is not None and not callable(post_process_func):
            raise wrong("set_data_post_process_func", post_process_func, "a function, or None")
        sampler_of(self.training_dataloader).post_process = post_process_func

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Mapping[str, Callable[[int], Any]] | Callable[[int], Any]
    ) -> None:
        """Give metrics with schedule_type = "custom" functions of the step (from 1), before the first step.

        With the section `curriculum_learning` a function, or a dict with one.

        Raises UsageError: there is no such metric, or too few samples are selected for the first step.
        """
        if self._parts.config.curriculum_learning.enabled:
            self._parts.schedules.set_function(schedule_func_dict)
            return
        from .data.curriculum import sampler_of

        sampler_of(self.training_dataloader).selection.set_custom(schedule_func_dict)

    # -- accumulation and batch sizes -------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """The micro-batch under way is the last of its step (DeepSpeed's rule and override)."""
        return self._accumulation.is_last()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on, until called again, step() takes `is_boundary` for the answer."""
        self._batches.refuse("set_gradient_accumulation_boundary")
        self._accumulation.force(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in here reduce nothing; the first one after it, or step(), reduces it all.

        Valid at every stage. At stages 2 and 3 each rank holds whole gradients until then.
        """
        self._batches.refuse("no_sync", "pipelines reduce gradients once a step")
        return self._accumulation.no_sync()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the accumulation steps so that a step has so many samples; the micro-batch stays.

        It counts from the next optimizer step on: one that has begun ends as it began.
        """
        self._parts.recovery.refuse("set_train_batch_size")
        self._counters.set_train_batch_size(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of one forward; the accumulation steps stay."""
        self._parts.recovery.refuse("set_train_micro_batch_size")
        self._counters.set_micro_batch_size(micro_batch_size)

    # -- the module -------------------------------------------------------------------------------------

    @contextmanager
    def uneven_forwards(self) -> Iterator[None]:
        """Inside, ranks may run unequal numbers of forwards: those that are done serve the others.

        For evaluation on unequal data, and for generation that stops at different lengths; no backward. Entry
        and exit are for all ranks. Stage 3, and experts on several ranks, need it: each gather of parameters or
        exchange of tokens costs a small message more.

        Raises:
            UsageError: experts are on several ranks at stage 3.
        """
        self._states.check_usable()
        parts, streams = self._parts, self._sharded.gatherer is not None
        with (
            parts.uneven.running(parts.autocast, streams=streams),
            self._sharded.uneven_forwards(),
        ):
            yield

    @contextmanager
    def generating(
        self,
        *,
        memory_limit: int | None = None,
        seed: int | None = None,
        own_numbers: bool = True,
        bits: int | None = None,
    ) -> Iterator[nn.Module]:
        """Inside, the module generates: its own `generate`, or its forward. The begin is for all ranks.

        At stage 3 all units are gathered once, if that fits into memory. Nothing is sent afterwards, so ranks
        may generate unequal lengths. Else forwards gather the units one after the other; ranks that are done
        serve the others, and the end is for all ranks too. A log line says which.

        The module is in eval mode, without gradients. Afterwards modes and torch's random numbers are as
        before, so the training has the bits of one without rollouts.

        Args:
            memory_limit: bytes that gathered units may take on this rank. None: 70 % of what is free, which the
                ranks of a machine share on CPUs. 0 streams.
            seed: of the random numbers inside. None: the first rollout draws those that the script would draw,
                and each later one goes on where the one before has ended.
            own_numbers: False: the script's random numbers go on inside. `seed` has no effect then.
            bits: 8: with `offload_param`, streamed units come from copies in 8 bits that this makes in host
                memory. Matrices of blocks are rounded, in groups of 256; those of fp64 are not. Training keeps
                the exact ones.

        Raises:
            UsageError: the model is cut into pipeline stages; the parameters are not on the host, with bits; or
                backward, a step or a load is called inside.
        """
        self._states.check_usable()
        self._batches.refuse("generate", "export the weights to generate without a pipeline")
        rollouts = self._found_rollouts().running(memory_limit, seed, own_numbers, bits)
        with self._parts.report.spending("evaluation"), rollouts as module:
            yield module

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `generate` inside of `generating()`; all arguments are the module's."""
        with self.generating():
            return self._found_rollouts().generate(args, kwargs)

    def _found_rollouts(self) -> Rollouts:
        if self._rollouts is None:
            from .generation.rollout import Rollouts

            self._rollouts = Rollouts(self._parts)
        return self._rollouts

    def train(self, mode: bool = True) -> Engine:
        """Put the module in training mode."""
        self.module.train(mode)
        self._parts.kept_units.keep(is_asked=not mode)
        return self

    def eval(self) -> Engine:
        """Put the module in evaluation mode, on every rank.

        At stage 3 the units that forwards without gradients use stay gathered until `train()` or a forward with
        gradients, while they take at most 70 % of the memory that is free at the first one.
        """
        return self.train(False)

    @property
    def training(self) -> bool:
        return self.module.training

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each found block from now on; takes what `Compiler.compile` takes, all optional."""
        self._states.check_usable()
        self._parts.compiler.compile(*args, **kwargs)

    @property
    def is_compiled(self) -> bool:
        """The model was compiled by the config or by compile()."""
        return self._parts.compiler.is_compiled

    @property
    def lr_scheduler(self) -> Any:
        """The schedule that `step` steps and checkpoints save. A script may set another one."""
        return self._parts.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        if scheduler is not None:
            from .optim.schedule_base import check_schedule

            check_schedule(scheduler)
        self._parts.scheduler = scheduler

    # -- readings -----------------------------------------------------------------------------------------

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

    def mean_loss(self) -> float:
        """The mean of the losses of the last step over micro-batches and ranks, weighted as gradients are.

        It comes with the gradient norm, so it costs no message. nan before the first step, where user code has
        called `loss.backward()` itself. 0 where all weights are 0: that step was skipped.
        """
        return self._step.means.loss

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the last step's gradients over all ranks, unscaled, before clipping; None before one.

        None as well at stages 1 and 2 with zero_optimization.compute_grad_norm = false.
        After the freeze of a 1-bit optimizer it is that of the momentum.
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
        for collectives in (*self._parts.opened, *self._parts.outer.opened):
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
        from .data.metrics import gather_rows

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
        """Bytes that this rank holds now: param, grad, master, optimizer, buckets; and on "host" and "disk".

        buckets: gathered parameters, and buffers for gradients and messages.
        """
        return self._states.memory_plan()

    def zero_optimization_stage(self) -> int:
        """The stage of the config."""
        return int(self.config.zero_optimization.stage)

    def gradient_clipping(self) -> float:
        """The limit of the config; 0 is none."""
        return float(self.config.gradient_clipping)

    # -- states -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole model's state dict on every rank, on the CPU, in the dtypes that forward uses."""
        return self.full_state_dict(rank0_only=False)

    def full_state_dict(
        self, *, rank0_only: bool = True, full_precision: bool = False
    ) -> dict[str, Any]:
        """The whole model's state dict, on the CPU, gathered parameter by parameter. A collective.

        Args:
            rank0_only: the other ranks get {}, and need no memory for it.
            full_precision: fp32 masters instead of 16-bit values.
        """
        self._states.check_usable()
        return self._states.full_state_dict(rank0_only=rank0_only, full_precision=full_precision)

    def weights(
        self,
        *,
        bucket_bytes: int = 1 << 28,
        names: str = "transformers",
        dtype: torch.dtype | None = None,
        merge_adapters: bool = False,
    ) -> Weights:
        """The whole tensors of the model, (name, tensor) by (name, tensor), for another program. A collective.

        Every rank runs a loop over the result to its end. At stage 3 tensors are gathered in flat buckets, the
        next one while this one is used, and each rank sends its part once to every other rank. Tensors are read
        only, and those of stages 0 to 2 are the parameters themselves: use them before the next step. A tied
        tensor comes once. The order is that of the buckets, the same on every rank.

        Args:
            bucket_bytes: of a bucket; two of them are in memory. A larger tensor is a bucket of its own.
            names: "transformers": without the wrappers of PEFT and torch.compile. "module": those of
                `engine.module.state_dict()`.
            dtype: of floating tensors; None is the one that forwards compute with. A narrower one is sent.
            merge_adapters: add PEFT's active adapters (LoRA, LoHa, LoKr, VeRA) to their weights, and leave
                them out. Parameters are not changed.

        Raises:
            UsageError: wrong arguments, other ones on another rank, pipeline stages, or an adapter that is no
                sum of weights or changes one of two tied weights.
        """
        from .generation.weights import WeightOptions, Weights

        self._states.check_usable()
        self._batches.refuse("weights", "full_state_dict() has the weights of all stages")
        options = WeightOptions(bucket_bytes, names, dtype, merge_adapters)
        return Weights(self._sharded, self.module, options)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Overwrite parameters, masters and buffers by whole values, the same on every rank. A collective.

        Raises UsageError, and nothing has changed, where names or shapes do not fit.
        """
        self._states.check_usable()
        self._states.load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        metric: float | Tensor | None = None,
        keep_best: int = 0,
        mode: str = "min",
    ) -> bool:
        """Write all that training needs to go on to save_dir/tag (default `global_step{N}`). A collective.

        At every instant the last committed checkpoint is whole; a failure on one rank raises on all.
        With checkpoint.async_save it returns once the states are copied to host memory; the commit comes
        later, and what goes wrong is raised by the next step(), wait_for_checkpoint() or destroy().
        client_state: JSON values, tensors and plain types, nested (`checkpoint/packing.py`); rank 0's is kept.
        exclude_frozen_parameters: leave the values of frozen parameters out of the files; a load then leaves
            the model's own as they are.
        metric: a number that tells how good the model is; the same on every rank, or None on some. A value that
            is not finite counts as the worst. load_checkpoint(folder, "best") takes the best one; of equal ones
            the earliest. `saves_since_best` counts the saves since then.
        keep_best: how many of the best stay, beside the last one and those of checkpoint.keep_last. Others with
            a metric, whose tags differ only in numbers, are removed; 0 removes none.
        mode: "min" where a smaller metric is better, or "max".
        """
        from .checkpoint.save import SaveOptions

        self._states.check_usable()
        name = f"global_step{self.global_steps}" if tag is None else tag
        if self._parts.recovery.has_saved(save_dir, name):
            log.info(
                "save_checkpoint: no second save of step %d, from which the run goes on",
                self.global_steps,
            )
            return True
        how = self.config.checkpoint.tag_validation
        options = SaveOptions(
            save_latest, exclude_frozen_parameters, how, (metric, mode, keep_best)
        )
        begun_seconds = time.monotonic()
        with self._parts.report.spending("save"):
            given = self._parts.recovery.run(
                self._states.save, save_dir, tag, client_state, options
            )
        self._parts.saves.saved(time.monotonic() - begun_seconds)
        self._parts.report.saved(save_dir, name, given)
        return True

    def should_save(self) -> bool:
        """It is time for a checkpoint, by `checkpoint.interval`: the same on all ranks, after the same step.

        True after a step until the next one, and again after that one, until `save_checkpoint` is called.

        Raises UsageError: the config has no checkpoint.interval.
        """
        return self._parts.saves.is_due()

    @property
    def last_client_state(self) -> Mapping[str, Any] | None:
        """What the script gave to its last save, or its last load brought. A save on a signal keeps it."""
        return self._states.client_state

    def wait_for_checkpoint(self) -> None:
        """Return when no checkpoint is being written in the background (checkpoint.async_save).

        With recovery, if a rank fails meanwhile, the checkpoint is written again by the ranks that go on.
        Raises XdsError: it could not be written; the one before it is the last.
        """
        recovery, saver = self._parts.recovery, self._parts.saver
        if saver is None:
            return
        with self._parts.report.spending("save"):
            while True:
                with recovery:
                    saver.wait(recovery)
                    return
                recovery.recover(stays=True)

    def checkpoint_progress(self) -> Progress | None:
        """What this rank is writing in the background; None: nothing."""
        return None if self._parts.saver is None else self._parts.saver.progress()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        fallback: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint of any stage and number of ranks (default: `latest`). A collective.

        Returns its folder and client_state; (None, None) with a warning where there is no `latest`.
        tag: "best" takes the one with the best metric, unless one was saved under this tag.
        fallback: where a file of it is damaged or missing, warn and take the one of the next fewer steps; where
            there is no `latest`, that of the most.
        Raises UsageError, and nothing has changed, where it is damaged or does not fit.
        """
        from .checkpoint.load_plan import LoadOptions

        self._states.check_usable()
        self._check_outside("load_checkpoint()")
        what = (load_module_strict, load_optimizer_states, load_lr_scheduler_states)
        options = LoadOptions(*what, load_module_only, fallback)
        with self._parts.report.spending("start"):
            found = self._states.load(load_dir, tag, options)
        if found[0] is not None:
            self._torch_calls.forget_mode()
            for follower in self._parts.after_steps:
                follower.resume(self.global_steps - self.skipped_steps)
        if found[0] is not None and not load_module_only:
            self._batches.forget()
            self._parts.recovery.loaded(found[0])
        return found

    def resume(self, folder: str | Path) -> tuple[str | None, dict[str, Any]]:
        """Go on from the last checkpoint in `folder`, or start where there is none. A collective.

        A damaged one is left out, with a warning, and the one before it is loaded.
        Returns its folder and client_state; (None, {}) at the start. In a new process that recovery has given
        states it loads nothing, and returns None and the client_state of these: the other ranks train.
        Raises UsageError, and nothing has changed, where checkpoints are there and none can be loaded.
        """
        from .checkpoint.load import has_checkpoint

        self._states.check_usable()
        if self._parts.recovery.has_taken_over:
            return None, dict(self._states.client_state or {})
        found = has_checkpoint(self._sharded.collectives, folder)
        if not self._parts.outer.of_first(found):
            return None, {}
        path, client_state = self.load_checkpoint(folder, fallback=True)
        return path, client_state or {}

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory until `reload_states`, to lend the device to something else.

        Args:
            include: any of optim_states, hp_params, lp_params, lp_grads, contiguous_grad_buffer (or enum
                members of these values); None is all of them. Gradients are released, not moved.
            pin_memory: page-locked host memory. `non_blocking` is accepted; the copies are waited for.
        On a CPU the states are in host memory already: nothing moves, but the engine refuses to run until
        `reload_states` all the same.

        Raises:
            UsageError: gradients wait for a step, states are away already, or an unknown name or device.
        """
        self._states.check_usable()
        self._check_outside("offload_states()")
        self._states.offload(include, device, pin_memory=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` moved. Without one before it nothing happens."""
        self._states.reload()

    # -- the end ----------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Take every hook off the model, close the monitors, free all states. A collective.

        The model keeps its parameters, whole. Masters, optimizer states, gradients and host buffers are freed;
        the optimizer's tensors have no elements afterwards.

        Raises XdsError, when all is done: the last checkpoint could not be written in the background.
        """
        if not self._states.are_released:
            try:
                try:
                    if self._parts.recovery.is_on and sys.exc_info()[0] is None:
                        self.wait_for_checkpoint()  # later a rank that fails ends the run
                finally:
                    self._destroy()
            finally:
                self._parts.preemption.end()  # until here a signal does not end a save in the background

    def _destroy(self) -> None:
        self.reload_states()
        self._states.are_released = True
        self._guards.remove()
        self._torch_calls.remove()
        self._batches.close()
        self._access.release()
        self._sharded.detach()
        self._parts.compiler.undo()
        for undo in reversed(self._parts.undo):
            undo()
        self.monitor.close()
        self._sharded.collectives.stop_watching()
        self._parts.recovery.end()
        self._parts.outer.end()
        try:
            if self._parts.saver is not None:
                self._parts.saver.close()  # it may still read the states
        finally:
            self._parts.updater.release()
            self._sharded.release()

    def _check_trains(self) -> None:
        self._states.check_usable()
        self._parts.preemption.check()
        if self.optimizer is None:
            raise UsageError(
                "this engine only infers: every parameter of its model was frozen at xds.initialize; call "
                "forward alone, or initialize again with parameters that require gradients"
            )
        self._check_outside("backward, step() or train_batch()")

    def _check_outside(self, doing: str) -> None:
        if self._rollouts is not None and self._rollouts.is_running:
            raise UsageError(IN_ROLLOUT.format(doing))

    if not TYPE_CHECKING:  # type checkers then refuse unknown names

        def __getattr__(self, name: str) -> Any:
            """Unknown names are methods of a feature of the config, or the module's, as in DeepSpeed."""
            parts = self.__dict__.get("_parts")
            if parts is None:
                raise AttributeError(name)
            if name in parts.schedules.names:
                return parts.schedules.names[name]
            try:
                return getattr(parts.module, name)
            except AttributeError:
                raise AttributeError(
                    f"neither xds.Engine nor {type(parts.module).__name__} has an attribute {name!r}"
                ) from None

    def __dir__(self) -> list[str]:
        """The public names: the engine's own, and the methods of features of the config."""
        own = [name for name in super().__dir__() if not name.startswith("_")]
        return sorted({*own, *self._parts.schedules.names} - _FOR_LAYERS)


__all__ = ["Engine"]
