"""Loss scaling for fp16 training: no scale, a static scale, or a dynamic one.

The scale changes after a step. Gradients are always unscaled with the scale that backward used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol, final
from weakref import ReferenceType, ref

from torch import Tensor

from ...ops.mesh import Mesh
from ...ops.torch_internals import after_backward
from ...utils.errors import XdsError
from ..config.config import Config

SCALE_FACTOR = 2.0
MAX_SCALE = 2.0**127  # the largest power of 2 in fp32, which multiplies the loss


class Divisor(Protocol):
    """What gradients of weighted losses are divided by; see `engine/steps/means.py`."""

    def divisor(self) -> float: ...


class Fp16Section(Protocol):
    """The config's section `fp16`."""

    enabled: bool
    loss_scale: float
    initial_scale_power: int
    loss_scale_window: int
    hysteresis: int
    consecutive_hysteresis: bool
    min_loss_scale: float


class LossScale(ABC):
    """The factor on the loss (`value`), updated by `after_step` from whether the gradients overflowed."""

    value: float
    scales_loss: bool  # gradients of the plain loss are too small for the precision
    skips_overflow: bool  # a step whose gradients overflowed is skipped, and training continues

    @abstractmethod
    def after_step(self, *, overflow: bool) -> None: ...

    def state_dict(self) -> dict[str, float]:
        """The values that change from step to step."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore `state`. The state of another kind of scale is ignored."""
        return


@final
class NoScale(LossScale):
    """fp32 and bf16: the loss is not scaled. bf16 can still skip steps whose gradients are not finite."""

    def __init__(self, *, skips_overflow: bool) -> None:
        self.value = 1.0
        self.scales_loss = False
        self.skips_overflow = skips_overflow

    def after_step(self, *, overflow: bool) -> None:
        return


@final
class StaticScale(LossScale):
    """fp16 with a fixed scale."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.scales_loss = value != 1.0
        self.skips_overflow = True

    def after_step(self, *, overflow: bool) -> None:
        return


@final
class DynamicScale(LossScale):
    """Halves after an overflow, doubles after `window` steps without one.

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.2,
        https://arxiv.org/abs/1710.03740. Hysteresis as in DeepSpeed: the scale is halved at the
        `hysteresis`-th overflow. The count restarts when the scale doubles, or, if `consecutive`, after any
        step without overflow.
    """

    def __init__(
        self, initial: float, window: int, hysteresis: int, *, consecutive: bool, minimum: float
    ) -> None:
        self.value = initial
        self.scales_loss = True
        self.skips_overflow = True
        self._window = window
        self._hysteresis = hysteresis
        self._left = hysteresis
        self._consecutive = consecutive
        self._minimum = minimum
        self._step = 0
        self._last_overflow = -1

    def after_step(self, *, overflow: bool) -> None:
        if overflow:
            self._overflowed()
        else:
            if self._consecutive:
                self._left = self._hysteresis
            num_good_steps = self._step - self._last_overflow - 1
            if num_good_steps > 0 and num_good_steps % self._window == 0:
                if not self._consecutive:
                    self._left = self._hysteresis
                self.value = min(self.value * SCALE_FACTOR, MAX_SCALE)
        self._step += 1

    def _overflowed(self) -> None:
        if self._left > 1:
            self._left -= 1
        elif self.value <= self._minimum:
            raise XdsError(
                f"fp16: gradients overflow although the loss scale is at fp16.min_loss_scale = "
                f"{self._minimum:g}: the model diverges in fp16; lower the learning rate, clip gradients, "
                "or use bf16"
            )
        else:
            self.value = max(self.value / SCALE_FACTOR, self._minimum)
        self._last_overflow = self._step

    def state_dict(self) -> dict[str, float]:
        return {
            "value": self.value,
            "left": self._left,
            "step": self._step,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if state:
            self.value = float(state["value"])
            self._left = int(state["left"])
            self._step = int(state["step"])
            self._last_overflow = int(state["last_overflow"])


def build_loss_scale(fp16: Fp16Section, *, skips_overflow: bool) -> LossScale:
    """The loss scale for the config's `fp16` section; `skips_overflow` applies where fp16 is off."""
    if not fp16.enabled:
        return NoScale(skips_overflow=skips_overflow)
    if fp16.loss_scale:
        return StaticScale(float(fp16.loss_scale))
    return DynamicScale(
        2.0**fp16.initial_scale_power,
        fp16.loss_scale_window,
        fp16.hysteresis,
        consecutive=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )


# -- what a sum of gradients over the ranks is multiplied with to be the gradient of the loss ------------


@final
class GradientFactor:
    """The mean over the ranks that have a loss of their own, without the loss scale of now."""

    def __init__(
        self, config: Config, mesh: Mesh, scale: LossScale, weights: Divisor | None = None
    ) -> None:
        """weights: of the losses, where they may have some."""
        is_mean_of_script = config.sequence.cut_by == "script"  # else losses are parts of one
        num_means = mesh.data * (mesh.sequence if is_mean_of_script else 1)
        self._mean = 1.0 / num_means if config.gradient_allreduce_op == "mean" else 1.0
        self._scale, self._weights = scale, weights

    def __call__(self) -> float:
        """Raises UsageError: the micro-batches have weights, whose sum is not known yet."""
        return self.without_weights() / self._divisor()

    def without_weights(self) -> float:
        """The same before the division by the weights."""
        return self._mean / self._scale.value

    def of_own(self) -> float:
        """What one rank's gradients are multiplied with to be those of its own loss. Raises as a call does."""
        return 1.0 / self._scale.value / self._divisor()

    def _divisor(self) -> float:
        return 1.0 if self._weights is None else self._weights.divisor()


# -- the loss scale of the backward pass that is running -------------------------------------------------
# `engine.backward` records it around autograd's call; `engine.scale` records it by a hook on the loss that it
# returns. A backward pass that neither of them started computes gradients of the unscaled loss.
#
# One pass may run through several engines, as that of a GAN's generator does. So each of them asks here.


@final
class _Pass:
    """A running backward pass. What runs it holds it: `scaled_backward`, or autograd, also where it raises."""

    def __init__(self, loss_scale: float) -> None:
        self.loss_scale: float | None = loss_scale  # None: it has ended
        _passes[:] = [reference for reference in _passes if _scale_of(reference) is not None]
        _passes.append(ref(self))

    def end(self) -> None:
        self.loss_scale = None


# The innermost last. One list for the process, as there is one autograd: its threads run nodes of all engines.
_passes: list[ReferenceType[_Pass]] = []


def _scale_of(reference: ReferenceType[_Pass]) -> float | None:
    running = reference()
    return None if running is None else running.loss_scale


@contextmanager
def scaled_backward(loss_scale: float) -> Iterator[None]:
    """Record `loss_scale` while the backward pass of a loss that was multiplied by it runs."""
    running = _Pass(loss_scale)
    try:
        yield
    finally:
        running.end()


def mark(loss: Tensor, loss_scale: float) -> None:
    """Record `loss_scale` whenever a backward pass starts from `loss`, which was multiplied by it."""

    def begin(_: Tensor) -> None:
        end = partial(_Pass.end, _Pass(loss_scale))  # autograd drops it with a pass that raises
        after_backward(end)

    loss.register_hook(begin)  # type: ignore[no-untyped-call]


def running_loss_scale() -> float | None:
    """The loss scale of the running backward pass; None if its loss was not scaled."""
    return next(
        (scale for reference in reversed(_passes) if (scale := _scale_of(reference)) is not None),
        None,
    )
