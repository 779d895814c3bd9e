"""The engine: a conductor that drives forward, backward and step, and owns the counters.

It never asks which ZeRO stage it runs: the sharded model and the updater know.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor

from ..utils.errors import UsageError, XdsError
from ..zero.access.access import Access
from ..zero.access.guards import Guards
from .accumulation import Accumulation
from .data.batches import call_with, check_loss, loss_of, move
from .optim.backward_scale import forget_failed, mark, running_loss_scale, scaled_backward
from .parts import Parts
from .states import States

log = logging.getLogger("xds")


@final
class Engine(States):
    """Trains `module` as its config says. Made by `xds.initialize`; names and semantics are DeepSpeed's.

    One optimizer step is `gradient_accumulation_steps()` rounds of forward, backward and step():

        loss = engine(batch)      forward, in the configured precision
        engine.backward(loss)     gradients, divided by the accumulation steps, reduced as the stage asks
        engine.step()             on the boundary: clip, update, publish, next learning rate
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.config = parts.config
        self.module = parts.module
        self.optimizer: Any = parts.optimizer  # None: a frozen model, which only infers
        self.lr_scheduler = parts.scheduler
        self.training_dataloader = parts.loader
        self.device = parts.device
        self.monitor = parts.monitor
        self.local_rank = parts.local_rank
        self.global_rank = parts.sharded.collectives.rank
        self.world_size = parts.sharded.collectives.world_size
        self.dp_world_size = self.world_size
        self.global_steps = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self.global_samples = 0
        self._sharded = parts.sharded
        self._updater = parts.updater
        self._scale = parts.loss_scale
        self._accumulation = Accumulation(
            parts.config.gradient_accumulation_steps,
            is_managed=parts.config.managed_gradient_accumulation,
        )
        self._access = Access(
            parts.sharded, parts.updater, self._gradient_factor, self._reduces_when_asked
        )
        parts.sharded.watch_own_backwards(self._own_backward_begins, self._factor_of_own_backward)
        self._guards = Guards(parts.module, self._access)
        self._report = parts.report
        self._micro_batch_size = parts.config.train_micro_batch_size_per_gpu
        self._was_applied = False
        self._grad_norm: float | None = None
        self._clipping: tuple[float, float] | None = None  # what clip_grad_norm measured, its limit
        self._batches: Iterator[Any] | None = None
        self._is_destroyed = False

    # -- forward, backward, step ------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, under autocast where the config says so. At stage 3 a collective.

        Raises Preempted: with checkpoint.preemption_save_dir a rank was asked to stop; all states are saved.
        """
        self._check_alive()
        self._parts.preemption.check()
        forget_failed()
        if torch.is_grad_enabled():
            self._accumulation.forward()
        watched = self._sharded.forward_context(
            is_training=self.module.training, is_compiled=self._parts.compiler.is_compiled
        )
        if self._parts.cast_inputs is not None:
            args, kwargs = move((args, kwargs), self.device, self._parts.cast_inputs)
        with (
            self._report.region("forward"),
            self._parts.autocast(),
            self._telling("forward"),
            watched,
        ):
            return self.module(*args, **kwargs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Gradients of `loss` / accumulation steps; they are reduced as the stage asks. A collective.

        Args:
            loss: a scalar with a graph.
            retain_graph: as in torch; several losses of one step are several calls.
            scale_wrt_gas: False leaves out the division by the accumulation steps.
        Returns:
            the loss, divided by the accumulation steps, detached.
        Raises:
            UsageError: `loss` is not a scalar, or has no graph.
        """
        self._check_trains()
        check_loss(loss)
        self._accumulation.backward()
        divisor = self._accumulation.steps_now if scale_wrt_gas else 1
        self._clipping = None  # measured before these gradients
        with self._report.region("backward"):
            self._sharded.begin_backward(reduces=self._reduces_now())
            try:
                factor = self._scale.value / divisor
                scaled = loss if factor == 1.0 else loss * factor
                with self._telling("backward"), scaled_backward(self._scale.value):
                    torch.autograd.backward(scaled, retain_graph=retain_graph)
            except BaseException:
                self._sharded.abandon_backward()
                raise
            self._sharded.end_backward()
        result = loss.detach() / divisor if divisor > 1 else loss.detach()
        self._report.add_loss(result)
        return result

    def scale(self, loss: Tensor, scale_wrt_gas: bool = True) -> Tensor:
        """`loss` times the loss scale over the accumulation steps, to call `.backward()` on yourself.

        In fp32 and bf16 a plain `loss.backward()` is right as well: the engine divides its gradients by the
        accumulation steps. In fp16 it raises, because small gradients would be lost without the loss scale.
        """
        check_loss(loss)
        steps = self._accumulation.steps_now if scale_wrt_gas else 1
        scaled = loss * (self._scale.value / steps)
        mark(scaled, self._scale.value)
        return scaled

    def _own_backward_begins(self) -> bool:
        """The script started a backward itself: whether its gradients are reduced before it ends."""
        self._check_alive()
        self._clipping = None
        self._accumulation.backward()
        return not self._accumulation.in_no_sync and self._sharded.policy.shards_grads

    def _factor_of_own_backward(self) -> float:
        """What the gradients of a backward that the script started are multiplied with.

        Raises UsageError: the loss needs a loss scale and has none.
        """
        included = running_loss_scale()  # another engine's, or what scale() multiplied with
        if included is not None:
            return self._scale.value / included
        if self._scale.scales_loss:
            raise UsageError(
                f"loss.backward() in fp16, on a loss without the loss scale ({self._scale.value:g}): small "
                "gradients would be lost; call engine.backward(loss) or engine.scale(loss).backward(). "
                "Gradients of earlier micro-batches are kept"
            )
        return 1.0 / self._accumulation.steps_now

    def _reduces_when_asked(self) -> bool:
        """Whether gradients that wait for their reduction are all that this step brings."""
        return self._accumulation.ends_step() and not self._accumulation.in_no_sync

    def step(self) -> None:
        """Count a micro-batch; on an accumulation boundary update the parameters. A collective there.

        Raises:
            UsageError: no backward has run since the last step().
            XdsError: the gradients are not finite and the precision does not skip such steps; the
                parameters are untouched and the engine can go on. Or, after the step is taken: a checkpoint
                that was written in the background is not there.
        """
        self._check_trains()
        if not self._sharded.has_seen_backward:
            raise UsageError(
                "engine.step() without engine.backward(loss) before it: every step needs the gradients of a "
                "loss; call backward once for each forward"
            )
        if self._accumulation.in_no_sync:
            raise UsageError(
                "engine.step() inside no_sync(): leave the context before the step, so that gradients are "
                "reduced"
            )
        is_boundary = self._accumulation.ends_step()
        self._was_applied = False
        self._sharded.forget_backward()
        num_micro_batches = self._accumulation.count()
        self.micro_steps += num_micro_batches
        self.global_samples += num_micro_batches * self._micro_batch_size * self.world_size
        if is_boundary:
            self._accumulation.end_step()
            with self._report.region("step"):
                self._take_step()
            self._sharded.collectives.end_step()
            self._report.step(self)
        self._parts.saver.check()
        if is_boundary:
            self._parts.preemption.boundary()

    def clip_grad_norm(self, max_norm: float) -> float:
        """Let the next step() clip to `max_norm`, not to gradient_clipping; inf only measures. A collective.

        For after the last backward of a step. Returns the norm that `get_global_grad_norm` tells after it.
        """
        self._check_alive()
        if not self._sharded.has_gradients:
            raise UsageError(
                f"clip_grad_norm({max_norm}) without gradients: call it after the last backward of a step, and "
                "before step()"
            )
        self._clipping = (self._measure(), max_norm)
        return self._clipping[0]

    def _measure(self) -> float:
        with self._report.region("reduce"):
            square_norm = self._sharded.finish_reduction()
        return math.sqrt(square_norm) * self._gradient_factor() if square_norm >= 0 else math.nan

    def _take_step(self) -> None:
        norm, limit = self._clipping or (self._measure(), self.config.gradient_clipping)
        self._grad_norm, self._clipping = norm, None
        self.global_steps += 1
        overflow = not math.isfinite(norm)
        if overflow:
            self._skip(norm)
        else:
            clip = limit / (norm + 1e-6) if limit and norm > limit else 1.0
            self._updater.step(self._gradient_factor() * clip)
            self._sharded.reset()
            self._was_applied = True
        self._scale.after_step(overflow=overflow)
        if self._was_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def _gradient_factor(self) -> float:
        """What a sum of gradients over the ranks is multiplied with to be the loss's gradient."""
        mean = 1.0 / self.world_size if self.config.gradient_allreduce_op == "mean" else 1.0
        return mean / self._scale.value

    def _skip(self, norm: float) -> None:
        self._sharded.reset()
        self.skipped_steps += 1
        if not self._scale.skips_overflow:
            raise XdsError(
                f"step {self.global_steps}: the gradient norm over all ranks is {norm}, so the loss or a "
                "gradient is not finite; the parameters are untouched. Look at this batch, lower the "
                "learning rate, or set gradient_clipping"
            )
        log.warning(
            "step %d skipped on rank %d: the gradient norm over all ranks is %s (loss scale %g)",
            self.global_steps,
            self.global_rank,
            norm,
            self._scale.value,
        )

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step: `gradient_accumulation_steps()` micro-batches from `data_iter`.

        The module must return the loss, or a tuple or mapping that begins with it or has `loss`.
        Without `data_iter` batches come from `training_dataloader`, over and over.
        Returns:
            the loss, averaged over micro-batches and ranks, [] fp32.
        """
        batches = self._next_batches(data_iter)
        self.train()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        steps = self._accumulation.steps_now
        for _ in range(steps):
            with self._telling("the data iterator of train_batch"):
                batch = next(batches)
            loss = loss_of(call_with(self, move(batch, self.device)))
            self.backward(loss)
            total += loss.detach().double()
            self.step()
        return self._average(total / steps)

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any], num_micro_batches: int | None = None) -> Tensor:
        """The loss of the next micro-batches (default: as many as a step takes), averaged as in training."""
        count = num_micro_batches or self._accumulation.steps
        was_training = self.module.training
        self.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for _ in range(count):
            total += loss_of(call_with(self, move(next(data_iter), self.device))).double()
        self.train(was_training)
        return self._average(total / count)

    def _next_batches(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if data_iter is not None:
            return data_iter
        if self.training_dataloader is None:
            raise UsageError(
                "train_batch() without data_iter: pass an iterator of batches, or training_data to "
                "xds.initialize"
            )
        if self._batches is None:
            self._batches = self._parts.report.repeat(self.training_dataloader)
        return self._batches

    def _average(self, value: Tensor) -> Tensor:
        table = self._sharded.collectives.gather_small(value.view(1))
        return table.mean().float()

    def _telling(self, where: str) -> AbstractContextManager[None]:
        return self._sharded.collectives.publishing_errors(where)

    # -- accumulation -----------------------------------------------------------------------------------

    def _reduces_now(self) -> bool:
        return self._accumulation.reduces_now(shards_grads=self._sharded.policy.shards_grads)

    def was_step_applied(self) -> bool:
        """The last step() changed the parameters (not between boundaries, not when skipped)."""
        return self._was_applied

    def zero_grad(self) -> None:
        """Drop all gradients since the last update. At any time, before the first backward as well.

        `zero_grad()` of the module or of the optimizer drops nothing: the engine has the gradients.
        """
        self._check_alive()
        self._clipping = None
        self._sharded.drop_gradients()
        self._accumulation.forget()

    # -- what a script asks -----------------------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the last step's gradients over all ranks, unscaled, before clipping; None before one."""
        return self._grad_norm

    @property
    def loss_scale(self) -> float:
        """The factor the next loss is multiplied with."""
        return self._scale.value

    def uneven_forwards(self) -> AbstractContextManager[None]:
        """Inside, ranks may run unequal numbers of forwards at stage 3: those that are done serve the others.

        For evaluation on unequal data, and for generation that stops at different lengths; no backward. Each
        gather costs a small message more. Entry and exit are for all ranks; other stages need nothing.
        """
        self._check_alive()
        return self._sharded.uneven_forwards()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `generate`; ranks may stop at different lengths."""
        with self.uneven_forwards(), self._parts.autocast():
            return self.module.generate(*args, **kwargs)  # type: ignore[operator]

    def train(self, mode: bool = True) -> Engine:
        """Put the module in training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the module in evaluation mode."""
        return self.train(False)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each found block from now on; takes what `Compiler.compile` takes, all optional."""
        self._check_alive()
        self._parts.compiler.compile(*args, **kwargs)

    @property
    def is_compiled(self) -> bool:
        """The model was compiled by the config or by compile()."""
        return self._parts.compiler.is_compiled

    @property
    def training(self) -> bool:
        return self.module.training

    def destroy(self) -> None:
        """Take every hook off the model, close the monitors. Parameters stay, whole; a collective.

        Raises XdsError, when all is done: the last checkpoint could not be written in the background.
        """
        if not self._is_destroyed:
            self._parts.preemption.end()
            self.reload_states()
            self._is_destroyed = True
            self._guards.remove()
            self._access.release()
            self._sharded.detach()
            self._parts.compiler.undo()
            self._parts.undo()
            self.monitor.close()
            self._sharded.collectives.stop_watching()
            self._parts.saver.close()

    def _check_alive(self) -> None:
        if self._is_destroyed:
            raise UsageError("this engine was destroyed: make a new one with xds.initialize")
        if self._parking is not None:
            raise UsageError("the engine's states are offloaded: call reload_states() first")

    def _forget_batches(self) -> None:
        self._batches = None

    def _check_trains(self) -> None:
        self._check_alive()
        self._parts.preemption.check()
        if self.optimizer is None:
            raise UsageError(
                "this engine only infers: every parameter of its model was frozen at xds.initialize; call "
                "forward alone, or initialize again with parameters that require gradients"
            )

    def __getattr__(self, name: str) -> Any:
        """Unknown names are looked up on the module, as in DeepSpeed."""
        parts = self.__dict__.get("_parts")
        if parts is None:
            raise AttributeError(name)
        try:
            return getattr(parts.module, name)
        except AttributeError:
            raise AttributeError(
                f"neither xds.Engine nor {type(parts.module).__name__} has an attribute {name!r}"
            ) from None


__all__: Sequence[str] = ["Engine"]
