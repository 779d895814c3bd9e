"""Reports training steps: log lines every `steps_per_print`, monitor events, timings, memory, throughput."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import Tensor

from ...ops.comm.collectives import Collectives
from ...ops.device import device_of, wide
from ...zero.model.sharded_model import ShardedModel
from ..config.config import Config
from .timers import EVENT_NAMES, Throughput, Timers, breakdown, times_line

if TYPE_CHECKING:
    from ..profiling.profile import Profile
    from ..profiling.steps import Profiled, StepProfiler
    from .memory import MemoryPoints
    from .record import RunRecord
    from .traffic import SentBytes

log = logging.getLogger("xds")
MIB = 1 << 20


Event = tuple[str, float, int]
"""Name, value, and the number of samples (over all ranks) seen when it was measured."""


class Writer(ABC):
    """One destination of events."""

    @abstractmethod
    def write(self, events: Sequence[Event]) -> None:
        """Write `events`; after the return they survive a crash of the process."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections; nothing is written afterwards."""


@final
class Monitor:
    """All writers that a config enables; without writers, writing does nothing."""

    def __init__(self, writers: Sequence[Writer] = (), record: RunRecord | None = None) -> None:
        """record: gets the events of the script; it has those of the engine already."""
        self._writers = tuple(writers)
        self._record = record

    @property
    def enabled(self) -> bool:
        """False if nothing would be written; the caller can then skip building events."""
        return self.takes_steps or self._record is not None

    @property
    def takes_steps(self) -> bool:
        """Whether the engine writes events of its own."""
        return bool(self._writers)

    def write_events(self, events: Sequence[tuple[str, Any, int]]) -> None:
        """Write events; a value is anything that float() accepts, including a tensor of one element."""
        if self.enabled:
            plain = [(name, float(value), int(samples)) for name, value, samples in events]
            self.write_step(plain)
            if self._record is not None:
                self._record.write(plain)

    def write_step(self, events: Sequence[Event]) -> None:
        """Write events of the engine."""
        for writer in self._writers:
            writer.write(events)

    def close(self) -> None:
        """Close every writer, once; later events are dropped."""
        writers, self._writers = self._writers, ()
        for writer in writers:
            writer.close()
        record, self._record = self._record, None
        if record is not None:
            record.close()


class Reported(Protocol):
    """The part of an engine that a report reads."""

    global_steps: int
    global_samples: int
    skipped_steps: int
    device: torch.device

    def mean_loss(self) -> float: ...
    def get_lr(self) -> list[float]: ...
    def get_global_grad_norm(self) -> float | None: ...
    def train_batch_size(self) -> int: ...
    @property
    def loss_scale(self) -> float: ...

    @property
    def global_rank(self) -> int: ...


class Measured(Protocol):
    """What a feature has measured in the last step, the same on all ranks."""

    def events(self) -> list[tuple[str, float]]:
        """Names and values for monitors."""

    def text(self) -> str:
        """For a line of the log."""

    def line(self) -> dict[str, Any]:
        """For the record: a line, with its kind."""


@final
class StepReport:
    """Collects losses and timings during a step and reports them after it."""

    def __init__(
        self,
        config: Config,
        device: torch.device,
        monitor: Monitor,
        opened: Sequence[Collectives],
        sharded: ShardedModel,
        record: RunRecord | None = None,
        measured: Sequence[Measured] = (),
    ) -> None:
        """For all ranks: each says which host it is on.

        opened: the collectives of all groups of the engine; the list may grow.
        """
        rates = config.timers.throughput
        self.timers = Timers(device, enabled=config.wall_clock_breakdown)
        self.throughput = Throughput(device, enabled=rates.enabled, synchronized=rates.synchronized)
        self._config = config
        self.monitor = monitor
        self._profiler: StepProfiler | None = None
        self._record = record
        self._memory: MemoryPoints | None = None
        self._traffic: SentBytes | None = None
        if config.flops_profiler.enabled:
            from ..profiling.steps import StepProfiler

            self._profiler = StepProfiler(config.flops_profiler, sharded.collectives)
        if config.memory_breakdown:
            from .memory import MemoryPoints

            self._memory = MemoryPoints(device)
        if config.comms_logger.enabled:
            from ...ops.comm.exchange import host_numbers
            from .traffic import SentBytes

            self._traffic = SentBytes(opened, sharded, host_numbers(sharded.collectives))
        self._measured = measured
        self._losses: list[Tensor] = []
        self._collects = monitor.takes_steps or config.steps_per_print is not None

    def region(self, name: str) -> AbstractContextManager[None]:
        """Time, profile, and read the memory around the `with` block, as the config says."""
        measured = self.timers.region(name)
        if self._record is not None:
            measured = self._record.region(name, measured)
        if self._profiler is not None:
            measured = self._profiler.region(name, measured)
        return measured if self._memory is None else self._memory.region(name, measured)

    def spending(self, name: str) -> AbstractContextManager[None]:
        """Around what is of the class `name` in the ledger of time: see ledger.py."""
        return nullcontext() if self._record is None else self._record.ledger.spending(name)

    def drop_step(self) -> float:
        """The step that runs is dropped. Returns its seconds where a ledger is kept."""
        return 0.0 if self._record is None else self._record.ledger.drop() / 1e6

    def recovered(self, reason: str, seconds: dict[str, float]) -> None:
        """The ranks go on after a failure. seconds: that were lost, by class."""
        if self._record is not None:
            self._record.recovered(reason, seconds)

    def stand_in(self, *, writes: bool) -> None:
        """This group of ranks writes the record of the run from now on, or another one."""
        if self._record is not None:
            self._record.is_reserve = not writes

    def has_joined(self) -> None:
        """This process takes part in a run of others from now on."""
        if self._record is not None:
            self._record.has_joined()

    def follow(self, engine: Profiled) -> None:
        """`engine` begins to train."""
        if self._profiler is not None:
            self._profiler.follow(engine)

    @property
    def last_profile(self) -> Profile | None:
        """This rank's part of what the profiler has counted last; None before that."""
        return None if self._profiler is None else self._profiler.last

    def name_actions(self, row: Sequence[Any]) -> None:
        """The last regions were the actions of a pipeline's `row` that compute."""
        if self._record is not None:
            self._record.name_actions(row)

    def saved(self, folder: str | Path, tag: str, metric: float | None) -> None:
        """A checkpoint was saved."""
        if self._record is not None:
            self._record.saved(folder, tag, metric)

    def add_loss(self, loss: Tensor) -> None:
        """Add a micro-batch's share of the step's loss."""
        if self._collects:
            self._losses.append(loss)

    def step(self, engine: Reported) -> None:
        """Report an optimizer step that has ended, applied or skipped."""
        if self._profiler is not None:
            self._profiler.step()
        self.throughput.step(engine.train_batch_size())
        losses, self._losses = self._losses, []
        if self._record is not None:
            self._record.step(engine, self._measured)
        milliseconds = breakdown(self.timers.take_milliseconds())
        memory = [] if self._memory is None else self._memory.take_lines()
        every = self._config.steps_per_print
        prints = every is not None and engine.global_steps % every == 0 and engine.global_rank == 0
        if not prints and not self.monitor.takes_steps:
            return
        loss = _sum_of(losses)
        if self.monitor.takes_steps:
            self.monitor.write_step(self._events(engine, loss, milliseconds))
        if prints:
            for line in [self._line(engine, loss), *self._times(milliseconds), *memory]:
                log.info("%s", line)

    def _times(self, milliseconds: dict[str, float]) -> list[str]:
        """The times of the last micro-batch, and of the step."""
        if not milliseconds:
            return []
        last = breakdown(self.timers.last_milliseconds())
        return [times_line(last, "_microstep"), times_line(milliseconds)]

    def _events(
        self, engine: Reported, loss: float, milliseconds: dict[str, float]
    ) -> list[tuple[str, float, int]]:
        at = engine.global_samples
        events = [
            ("Train/Samples/train_loss", loss, at),
            ("Train/Samples/lr", engine.get_lr()[0], at),
            ("Train/Samples/grad_norm", engine.get_global_grad_norm() or 0.0, at),
        ]
        if self._config.fp16.enabled:
            events.append(("Train/Samples/loss_scale", engine.loss_scale, at))
        sent = self._traffic.events() if self._traffic is not None else ()
        measured = [event for each in self._measured for event in each.events()]
        events += [(f"Train/Samples/{name}", value, at) for name, value in [*sent, *measured]]
        return events + [
            (f"Train/Samples/elapsed_time_ms_{EVENT_NAMES[name]}", value, at)
            for name, value in milliseconds.items()
        ]

    def _line(self, engine: Reported, loss: float) -> str:
        parts = [
            f"step {engine.global_steps}",
            f"skipped {engine.skipped_steps}",
            f"loss {loss:.4f}",
            "lr " + ", ".join(f"{lr:.3e}" for lr in engine.get_lr()),
            f"grad norm {engine.get_global_grad_norm() or 0.0:.4f}",
        ]
        rates = self.throughput.read()
        if rates is not None:
            parts.append(f"{rates.last:.1f} samples/s")
        if self._traffic is not None:
            parts.append(self._traffic.text())
        parts += [each.text() for each in self._measured]
        if self._config.memory_breakdown:
            use = device_of(engine.device).memory()
            parts.append(
                f"memory {use.now_bytes / MIB:.0f} MiB, peak {use.peak_bytes / MIB:.0f} MiB"
            )
        return ", ".join(parts)


def _sum_of(losses: Sequence[Tensor]) -> float:
    """The sum of scalars. Waits for the device, once."""
    if not losses:
        return 0.0
    values: list[float] = torch.stack([wide(loss.reshape(())) for loss in losses]).tolist()
    return sum(values)
