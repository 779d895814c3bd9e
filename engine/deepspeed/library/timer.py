"""`deepspeed.utils.timer`: named wall-clock timers, samples per second, and the names of the engine's timers.

On a CUDA device a timer records events on the current stream, so a start or stop synchronizes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch

from ....ops.comm.message_log import Clock
from ....ops.device import device_of
from ....utils.errors import UsageError
from ...process.process import pick_device
from ...telemetry.memory import memory_text
from ...telemetry.timers import times_line
from ..errors import in_their_form
from .log import log_dist, logger

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"
TIME_EPSILON = 1e-6  # seconds
GIB = 2**30


@final
class NamedTimer:
    """The time between each `start` and `stop`, in ms."""

    def __init__(self, name: str, clock: Clock | None = None) -> None:
        self.name_ = name
        self.started_ = False
        self.elapsed_records: list[float] | None = None
        self._clock = clock or Clock(torch.device("cpu"))
        self._start: Any = None
        self._spans: list[Callable[[], float]] = []

    def start(self) -> None:
        """Begin to measure."""
        if self.started_:
            raise UsageError(f"timer {self.name_!r} has already been started; stop it first")
        self.started_ = True
        self._start = self._clock.now()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End what `start` began. The arguments have no effect, as in DeepSpeed."""
        if not self.started_:
            raise UsageError(f"timer {self.name_!r} is not started; start it first")
        self.started_ = False
        start, end = self._start, self._clock.now()
        self._spans.append(lambda: self._clock.milliseconds(start, end))

    def reset(self) -> None:
        """Forget all times."""
        self.started_ = False
        self.elapsed_records = None
        self._spans.clear()

    def elapsed(self, reset: bool = True) -> float:
        """The sum of the times in ms; waits for the device. A time that is running is included."""
        was_started = self.started_
        if was_started:
            self.stop()
        self.elapsed_records = [span() for span in self._spans]
        found = sum(self.elapsed_records)
        if reset:
            self.reset()
        if was_started:
            self.start()
        return found


@final
class SynchronizedWallClockTimer:
    """Timers by name: `timers("data").start()`."""

    Timer = NamedTimer

    def __init__(self) -> None:
        self.timers: dict[str, NamedTimer] = {}
        self._clock = Clock(pick_device())

    def get_timers(self) -> dict[str, NamedTimer]:
        """The timers so far, by name."""
        return self.timers

    def __call__(self, name: str) -> NamedTimer:
        if name not in self.timers:
            self.timers[name] = NamedTimer(name, self._clock)
        return self.timers[name]

    @staticmethod
    def memory_usage() -> str:
        """Memory in use on the device, or of the process on a CPU."""
        return memory_text(pick_device())

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the times of `names` over `normalizer` in ms, on `ranks` (default: 0), without unknown names."""
        _check(normalizer)
        known = [name for name in names if name in self.timers]
        times = {name: self.timers[name].elapsed(reset=reset) / normalizer for name in known}
        log_dist(times_line(times), ranks or [0])


def _check(normalizer: float) -> None:
    if not normalizer > 0:
        raise UsageError(f"normalizer = {normalizer}: must be above 0")


def _check_interval(steps: Any) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps <= 0:
        need = (
            "a positive integer or None" if steps else "greater than 0, a positive integer, or None"
        )
        with in_their_form():
            raise UsageError(f"steps_per_output = {steps!r}: steps_per_output must be {need}")


@final
class ThroughputTimer:
    """Samples per second over all steps from `start_step` on.

    Args:
        config: has `enabled` and `synchronized`: wait for a CUDA device at each start and stop.
        batch_size: samples of one optimizer step.
        steps_per_output: log a line every so many steps; None: never.
        monitor_memory: without effect.
        logging_fn: gets the lines; None is `deepspeed.utils.logger.info`.
    Raises:
        UsageError: steps_per_output is not a positive integer or None.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        if steps_per_output is not None:
            _check_interval(steps_per_output)
        self.config = config
        self.batch_size = batch_size or 1
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.logging = logging_fn or logger.info
        self.started = False
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0  # seconds
        self.step_elapsed_time = 0.0
        self.start_time = 0.0  # of the micro-batch, in seconds of a clock; 0 before `start_step`
        self.end_time = 0.0
        self.initialized = False  # it was started once

    def update_epoch_count(self) -> None:
        """Begin an epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begin to measure a micro-batch."""
        if self.config.enabled:
            self.started = self.initialized = True
            counts = self.global_step_count >= self.start_step
            self.start_time = self._now() if counts else 0.0

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-batch; with `global_step` also an optimizer step."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += int(global_step)
        if not self.start_time:
            return
        self.end_time = self._now()
        seconds = self.end_time - self.start_time
        self.total_elapsed_time += seconds
        self.step_elapsed_time += seconds
        if global_step:
            if report_speed and self._is_report_boundary():
                self.logging(self._line())
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Samples per second since `start_step`; -inf before that."""
        num_steps = self.global_step_count - self.start_step
        if num_steps < 1:
            return float("-inf")
        return self.batch_size * num_steps / (self.total_elapsed_time + TIME_EPSILON)

    def _is_report_boundary(self) -> bool:
        """Whether a line is due after this step."""
        if self.steps_per_output is None:
            return False
        _check_interval(self.steps_per_output)
        return self.global_step_count % self.steps_per_output == 0

    def _now(self) -> float:
        if self.config.synchronized:
            device_of(pick_device()).synchronize()
        return time.perf_counter()

    def _line(self) -> str:
        use = device_of(pick_device()).memory()
        speed = self.batch_size / (self.step_elapsed_time + TIME_EPSILON)
        return (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/"
            f"global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={speed}, "
            f"MemAllocated={use.now_bytes / GIB:.2f}GB, MaxMemAllocated={use.peak_bytes / GIB:.2f}GB"
        )
