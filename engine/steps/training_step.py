"""One training step on this rank: forward, backward, and on the accumulation boundary the update."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from ...ops.device import device_of
from ...ops.kernels.decide import CLIP_EPS
from ...ops.optim.scale import Scale
from ...utils.arguments import wrong
from ...utils.errors import PeerError, UnscaledLossError, UsageError, XdsError
from ...zero.core.backward_pass import BackwardRules, ScriptBackward
from ...zero.core.reduction import REGROUP, SAVE, STOP, Scope, StepStatus
from ..counters import Counters
from ..data.batches import as_inputs, check_loss, move
from ..means import UNIT, Weight
from ..optim.loss_scale import mark, running_loss_scale, scaled_backward
from ..parts import Parts
from ..states import States

if TYPE_CHECKING:
    from ..optim.schedule_base import Scheduler


# -- whether the next step is likely to be neither clipped nor skipped, from the norms of the last ones

NUM_NORMS = 8  # recent steps that count
NEAR_LIMIT = 0.8  # of the clipping limit


@final
class Forecast:
    """Watches the gradient norms of one engine."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=NUM_NORMS)

    def observe(self, norm: float) -> None:
        """A step had this norm; inf or nan if it was skipped."""
        self._norms.append(norm)

    def is_plain(self, limit: float) -> bool:
        """No recent step was skipped, and no norm came near `limit`. A limit of 0 means no clipping."""
        if not self._norms:
            return False
        highest = max(norm if math.isfinite(norm) else math.inf for norm in self._norms)
        return highest < NEAR_LIMIT * limit if limit else math.isfinite(highest)


log = logging.getLogger("xds")


@final
class TrainingStep(BackwardRules):
    """Runs forward and backward, and applies the update. Owns the norm and the limit of the clipping.

    It never asks which ZeRO stage it runs: the sharded model and the updater know.
    """

    def __init__(self, parts: Parts, counters: Counters, states: States) -> None:
        self.was_applied = False  # the last step changed the parameters
        self.grad_norm: float | None = None
        self.is_updating = False  # the engine itself calls the optimizer
        self._parts = parts
        self._sharded = parts.sharded
        self._scale = parts.loss_scale
        self._report = parts.report
        self._counters = counters
        self._accumulation = counters.accumulation
        self._states = states
        self._clipping: tuple[float, float] | None = None  # what clip_grad_norm measured, its limit
        self._forecast = Forecast()
        self._by_optimizer = False  # optimizer.step() was called last, not engine.step()
        self._only_counted = False  # and it updated nothing
        self._warned: set[str] = set()
        self._schedule_place: Any = None  # after the last step of the schedule
        self._allocates_states = True  # at the first forward that trains
        self.means = parts.means
        self.gradient_factor = parts.gradient_factor
        parts.sharded.backward_pass.ask(self)

    def check_usable(self) -> None:
        """See `States.check_usable`."""
        self._states.check_usable()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output, under autocast where the config says so."""
        kwargs = self._parts.packing.inputs(args, kwargs)
        if torch.is_grad_enabled():
            self._accumulation.forward()
            self._allocate_states()
        return self._run(args, kwargs)

    def prove(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward of packed rows that is trained: see `Packing.trial`. A collective."""
        packing, module = self._parts.packing, self._parts.module
        if self._accumulation.micro_batch or not module.training:
            return
        trial = packing.trial(args, packing.inputs(args, kwargs))
        if trial is not None:
            with trial.observing(module):
                for inputs in trial.runs:
                    self._run(*inputs)
                    trial.end_run()
            packing.judge(trial)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._parts.module
        self._sharded.check_unchanged()
        self._parts.kept_units.before_forward()
        watched = self._sharded.forward_context(
            is_training=module.training, is_compiled=self._parts.compiler.is_compiled
        )
        if self._parts.cast_inputs is not None:
            args, kwargs = move((args, kwargs), self._parts.device, self._parts.cast_inputs)
        with (
            self._report.region("forward"),
            self._parts.autocast(),
            self._sharded.collectives.publishing_errors("forward"),
            watched,
            self._parts.packing.apart(args, kwargs),
        ):
            return module(*args, **kwargs)

    def _allocate_states(self) -> None:
        """Once: the optimizer's states get memory before any activation.

        A GPU's allocator splits a block that activations have freed. A part that stays for the whole training
        keeps the rest from being joined again, so the next forward would allocate more. On other devices the
        order does not matter; a script finds the same states on all of them.
        """
        if self._allocates_states:
            self._allocates_states = False
            device_of(
                self._parts.device
            ).empty_cache()  # what the construction of the model has left
            self._parts.updater.allocate_states()

    def backward(
        self, loss: Tensor, *, retain_graph: bool, divides: bool, weight: Weight | None = None
    ) -> Tensor:
        """Gradients of `loss` over the accumulation steps (if it `divides`); returns that loss, detached.

        With a `weight` gradients of `loss` times it, and the loss as it is.
        """
        check_loss(loss)
        if weight is not None:
            weight = self.means.checked(weight)
            divides = False
        self.means.begin(is_weighted=weight is not None)
        self._parts.loss_check.check(loss)
        self._sharded.end_script_backward()
        self._accumulation.backward()
        divisor = self._accumulation.steps_now if divides else 1
        self._clipping = None  # measured before these gradients
        with self._report.region("backward"):
            self._expect(is_weighted=weight is not None)
            self._sharded.backward_pass.begin(
                reduces=self._reduces_now(), ends_step=self._ends_step()
            )
            try:
                factor: Weight = self._scale.value / divisor
                if weight is not None:
                    factor = weight * (factor / UNIT)  # near 1; the update makes up for it
                scaled = loss if isinstance(factor, float) and factor == 1.0 else loss * factor
                with (
                    self._sharded.collectives.publishing_errors("backward"),
                    scaled_backward(self._scale.value),
                ):
                    torch.autograd.backward(scaled, retain_graph=retain_graph)
            except BaseException:
                self._sharded.backward_pass.abandon()
                raise
            self._sharded.backward_pass.end()
        result = loss.detach() / divisor if divisor > 1 else loss.detach()
        self.means.add(result, weight)
        if weight is None:
            self._report.add_loss(result)
        return result

    def begin_stages(self) -> None:
        """Before a run of pipeline stages."""
        if torch.is_grad_enabled():
            self._allocate_states()
        self._sharded.check_unchanged()

    @contextmanager
    def stage_forward(self, batch: Any) -> Iterator[None]:
        """Around the forward of one pipeline stage for this micro-batch."""
        watched = self._sharded.forward_context(
            is_training=self._parts.module.training,
            is_compiled=self._parts.compiler.is_compiled,
        )
        apart = self._parts.packing.apart(*as_inputs(batch))
        with self._report.region("forward"), self._parts.autocast(), watched, apart:
            yield

    @contextmanager
    def stage_backward(self, scope: Scope) -> Iterator[None]:
        """Around the backward of one pipeline stage for one micro-batch."""
        self._clipping = None
        with self._report.region("backward"), scaled_backward(self._scale.value):
            self._sharded.backward_pass.begin(reduces=bool(scope.reduces), scope=scope)
            try:
                yield
            except BaseException:
                self._sharded.backward_pass.abandon()
                raise
            self._sharded.backward_pass.end()

    def stage_weights(self) -> AbstractContextManager[None]:
        """Around the weight gradients of one pipeline stage that come after its backward."""
        return self._report.region("backward")

    def scale(self, loss: Tensor, *, divides: bool) -> Tensor:
        """`loss` with the factors that `backward` would multiply it with."""
        check_loss(loss)
        steps = self._accumulation.steps_now if divides else 1
        scaled = loss * (self._scale.value / steps)
        mark(scaled, self._scale.value)
        return scaled

    def step(self, scheduler: Scheduler | None, *, by_optimizer: bool = False) -> bool:
        """Count a micro-batch; on the boundary update the parameters. Returns whether it was the boundary.

        by_optimizer: optimizer.step() was called. All micro-batches since the last step count, and the schedule
            stays. Without gradients it does nothing, as in torch.
        """
        if not self._sharded.backward_pass.has_seen_one:
            self._step_again(scheduler, by_optimizer=by_optimizer)
            return False
        if self._accumulation.in_no_sync:
            raise UsageError(
                "engine.step() inside no_sync(): leave the context before the step, so that gradients are "
                "reduced"
            )
        if self._parts.updater.optimizer is not None:
            self._parts.updater.optimizer.check_step()
        self._sharded.end_script_backward()
        is_boundary = self._accumulation.ends_step(counts_all=by_optimizer)
        self.was_applied = False
        self._sharded.backward_pass.clear_seen()
        self._counters.count_micro_batches(counts_all=by_optimizer)
        self._by_optimizer = by_optimizer
        self._only_counted = by_optimizer and not is_boundary
        if is_boundary:
            self._accumulation.end_step()
            self.is_updating, is_weighted = True, self.means.is_weighted
            try:
                with self._report.region("step"):
                    self._update(None if by_optimizer else scheduler)
            finally:
                self.is_updating = False
                self.means.end()  # also where the step raises: its gradients are dropped
            if is_weighted:
                self._report.add_loss(torch.tensor(self.means.loss))
            self._sharded.collectives.end_step()
        return is_boundary

    def _step_again(self, scheduler: Scheduler | None, *, by_optimizer: bool) -> None:
        """There are no gradients, possibly because the script calls engine.step() and optimizer.step().

        Raises:
            UsageError: engine.step() was called, and not after optimizer.step().
        """
        if by_optimizer:
            self._warn_once(
                "optimizer.step() without gradients updates nothing: engine.step() has used them, zero_grad() "
                "has dropped them, or backward was not called. Call either optimizer.step() or engine.step(), "
                "after backward and before zero_grad()"
            )
            return
        if not self._by_optimizer:
            raise UsageError(
                "engine.step() without engine.backward(loss) before it: every step needs the gradients of a "
                "loss; call backward once for each forward, and zero_grad() not between backward and step"
            )
        self._by_optimizer = False
        self._warn_once(
            "engine.step() after optimizer.step() updates nothing: optimizer.step() has used the gradients. "
            "Call one of them"
        )
        if self.was_applied and scheduler is not None:  # which optimizer.step() leaves as it is
            self._step_schedule(scheduler)

    def _warn_once(self, text: str, *args: Any) -> None:
        if text not in self._warned and self._sharded.collectives.rank == 0:
            log.warning(text, *args)
        self._warned.add(text)

    def _step_schedule(self, scheduler: Scheduler) -> None:
        """Next learning rate. Warns if the script has stepped the schedule as well."""
        before, place = self._schedule_place, _place_of(scheduler)
        is_number = isinstance(before, int) and isinstance(place, int)
        if is_number and 0 < place - before <= self._accumulation.steps_now:  # else a load
            self._warn_once(
                "lr_scheduler.step() was called, and engine.step() steps the schedule as well: it advances "
                "twice in a step. Remove the call, or give the schedule not to the engine"
            )
        scheduler.step()
        self._schedule_place = _place_of(scheduler)

    def clip(self, max_norm: float) -> float:
        """Let the next update clip to `max_norm`; returns the norm of the gradients."""
        max_norm = _limit(max_norm)
        self._sharded.end_script_backward()
        if not self._sharded.has_gradients:
            raise UsageError(
                f"clip_grad_norm({max_norm}) without gradients: call it after the last backward of a step, and "
                "before step()"
            )
        self._clipping = (self._measure(), max_norm)
        return self._clipping[0]

    def restart(self) -> None:
        """The running step is dropped, and none of its micro-batches counts."""
        self.means.end()
        self._accumulation.resume(0)
        self._clipping, self._by_optimizer, self._only_counted = None, False, False

    def share_of(self, loss: Tensor, *, divides: bool) -> Tensor:
        """What `backward` returns for this loss."""
        return loss.detach() / (self._accumulation.steps_now if divides else 1)

    @property
    def has_gradients(self) -> bool:
        """A backward has begun since the last update, so `drop_gradients` may drop some."""
        return self._sharded.has_new_gradients or self._accumulation.done > 0

    @property
    def only_counted(self) -> bool:
        """optimizer.step() was the last call, and was no boundary. No backward has begun since."""
        return self._only_counted and not self._sharded.backward_pass.has_seen_one

    def drop_gradients(self) -> None:
        """Forget all gradients since the last update."""
        if self._accumulation.is_managed and self._accumulation.done:
            self._warn_once(
                "zero_grad() after %d of %d micro-batches of a step: their gradients are dropped, and the step "
                "has those of the others alone",
                self._accumulation.done,
                self._accumulation.steps_now,
            )
        self.means.end()
        self._sharded.backward_pass.drop()
        self._accumulation.forget()

    def reduces_when_asked(self) -> bool:
        """Whether gradients that wait for their reduction are all of this step."""
        return self._accumulation.ends_step() and not self._accumulation.in_no_sync

    def _reduces_now(self) -> bool:
        return self._accumulation.reduces_now(shards_grads=self._sharded.reduces_each_backward)

    def _expect(self, *, is_weighted: bool = False) -> None:
        """Tell the updater the factor on gradients if the step of this backward is likely to be a plain one.

        With weights the factor is known later.
        """
        limit = self._parts.config.gradient_clipping
        plain = self._ends_step() and self._forecast.is_plain(limit) and not is_weighted
        self._parts.updater.expect(self.gradient_factor() if plain else None)

    def _ends_step(self) -> bool:
        """The backward that begins is likely to be the last of its step."""
        accumulation = self._accumulation
        return accumulation.is_managed and accumulation.is_last() and not accumulation.in_no_sync

    def begin_script_backward(self) -> ScriptBackward:
        """See `BackwardRules`."""
        self.check_usable()
        self.means.begin_unseen()
        self._clipping = None
        self._accumulation.backward()
        self._expect()
        reduces = not self._accumulation.in_no_sync and self._sharded.reduces_each_backward
        return ScriptBackward(reduces, self._ends_step())

    def script_factor(self) -> float:
        """See `BackwardRules`.

        Raises UsageError: the loss needs a loss scale and has none.
        """
        included = running_loss_scale()  # another engine's, or what scale() multiplied with
        if included is not None:
            return self._scale.value / included
        if self._scale.scales_loss:
            raise UnscaledLossError(
                "Loss scaling is required: loss.backward() in fp16, on a loss without the loss scale "
                f"({self._scale.value:g}): small gradients would be lost; call engine.backward(loss) or "
                "engine.scale(loss).backward(). Gradients of earlier micro-batches are kept"
            )
        return 1.0 / self._accumulation.steps_now

    @torch.no_grad()
    def _measure(self) -> float:
        with self._report.region("reduce"):
            return self._norm(self._start_finish())

    def _start_finish(self) -> StepStatus:
        parts = self._parts
        parts.recovery.before_vote()
        regroups = parts.recovery.must_regroup
        # not in one message: a process that comes would not hear that the others save
        saves = parts.saves.is_asked and not regroups
        flags = STOP * parts.preemption.is_asked + REGROUP * regroups + SAVE * saves
        try:
            return self._sharded.start_finish(flags=flags, means=self.means.message())
        except PeerError as error:
            return self._parts.recovery.settle(error)

    def _norm(self, status: StepStatus) -> float:
        try:
            square = self._sharded.end_finish(status)
        except PeerError as error:
            square = self._parts.recovery.settle(error).square
        self.means.arrived(status.means)
        self._parts.preemption.agree(status)
        self._parts.recovery.agree(status)
        self._parts.saves.agree(status)
        return math.sqrt(square) * self.gradient_factor() if square >= 0 else math.nan

    def _measure_for_update(self) -> tuple[float, list[bool]]:
        """The norm, and where a script has written, which the host reads in the same wait."""
        with self._report.region("reduce"), self._dropping():
            status = self._start_finish()
            status.attach(self._parts.updater.ask_written())
            return self._norm(status), status.flags

    def _update_decided(self) -> tuple[float, bool]:
        """The norm, and whether the parameters are updated, which the device has decided without the host.

        The host reads the norm while the device updates. Where it is no plain step nothing has changed.
        """
        limit = self._parts.config.gradient_clipping
        factor = self.gradient_factor.without_weights()
        with self._report.region("reduce"), self._dropping():
            status = self._start_finish()
        scale = Scale(None, status.decide(factor, limit))
        is_done = self._parts.updater.step(scale, decided=status)
        with self._dropping():
            return self._norm(status), is_done

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """If the body raises UsageError, because ranks differ, drop the gradients as in a skipped step."""
        try:
            yield
        except UsageError:
            self._sharded.skip()
            raise

    @torch.no_grad()
    def _update(self, scheduler: Scheduler | None) -> None:
        limit, is_done = self._parts.config.gradient_clipping, False
        written: list[bool] = []
        if self._clipping is not None:
            norm, limit = self._clipping
        elif self._parts.updater.takes_decisions:
            norm, is_done = self._update_decided()
        else:
            norm, written = self._measure_for_update()
        self.grad_norm, self._clipping = norm, None
        self._forecast.observe(norm)
        self._counters.global_steps += 1
        overflow = not math.isfinite(norm)
        if overflow:
            self._skip(norm)
        elif self.means.has_no_items:
            self._skip_empty()
        else:
            if not is_done:
                clip = limit / (norm + CLIP_EPS) if limit and norm > limit else 1.0
                self._parts.updater.step(Scale(self.gradient_factor() * clip), written=written)
            with self._parts.recovery:  # the step counts, whoever is lost now
                self._parts.updater.check_published()
            self._sharded.reduction.reset()
            if self._parts.auto_ratio is not None:
                self._parts.auto_ratio.after_update()
            self.was_applied = True
        self._scale.after_step(overflow=overflow)
        if self.was_applied and scheduler is not None:
            self._step_schedule(scheduler)
        skip_step = None if self.was_applied else getattr(scheduler, "skip_step", None)
        if skip_step is not None:  # a schedule that follows the loader's batches
            skip_step()

    def _skip_empty(self) -> None:
        """No micro-batch has an item: weight decay and momentum alone would move the parameters."""
        self._sharded.skip()
        self._counters.skipped_steps += 1
        step = self._counters.global_steps
        if self._sharded.collectives.rank == 0:
            log.warning("step %d skipped: the weights of all its losses are 0", step)

    def _skip(self, norm: float) -> None:
        self._sharded.skip()
        self._counters.skipped_steps += 1
        step = self._counters.global_steps
        if not self._scale.skips_overflow:
            raise XdsError(
                f"step {step}: the gradient norm over all ranks is {norm}, so the loss or a gradient is not "
                "finite; the parameters are untouched. Look at this batch, lower the learning rate, or set "
                "gradient_clipping"
            )
        log.warning(
            "step %d skipped on rank %d: the gradient norm over all ranks is %s (loss scale %g)",
            step,
            self._sharded.collectives.rank,
            norm,
            self._scale.value,
        )


def _place_of(scheduler: Scheduler) -> Any:
    """How far it has come: of torch's schedules, and of those that the config names."""
    return getattr(scheduler, "last_epoch", getattr(scheduler, "last_batch_iteration", None))


def _limit(max_norm: Any) -> float:
    try:
        limit = math.nan if isinstance(max_norm, str) else float(max_norm)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        limit = math.nan
    if not limit >= 0:
        raise wrong("clip_grad_norm: max_norm", max_norm, "a number, at least 0; inf only measures")
    return limit


__all__ = ["Forecast", "NEAR_LIMIT", "NUM_NORMS", "TrainingStep"]
