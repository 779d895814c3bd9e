"""What `initialize` chose for one engine: one object for each feature."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import nn

from ..ops.comm.collectives import Collectives
from ..zero.model.sharded_model import ShardedModel
from ..zero.model.update import Updater
from .config.config import Config
from .config.sections import Checkpoint
from .optim.loss_scale import LossScale
from .steps.counters import Counters
from .telemetry.report import Monitor, StepReport

if TYPE_CHECKING:
    from ..zero.core.reduction import StepStatus
    from ..zero.model.auto_ratio import AutoRatio
    from .checkpoint.saver import Progress, Saver
    from .model.compiling import Compiler
    from .model.recomputing import Recomputing
    from .optim.schedule_base import Scheduler


# -- what an engine imports at its first use: checkpoints, and the compiler of blocks --------------------


@final
class Saves:
    """The checkpoints of one engine. Makes the `Saver` at the first one, or at once for the background."""

    def __init__(
        self, section: Checkpoint, collectives: Collectives, timeout_seconds: float
    ) -> None:
        """Raises UsageError: it saves in the background, and the process group has no store."""
        self._section = section
        self._collectives = collectives
        self._timeout_seconds = timeout_seconds
        self._saver = self._build() if section.async_save else None

    @property
    def saver(self) -> Saver:
        if self._saver is None:
            self._saver = self._build()
        return self._saver

    def _build(self) -> Saver:
        from .checkpoint.saver import Saver

        return Saver(
            self._collectives,
            keep_last=self._section.keep_last,
            in_background=self._section.async_save,
            timeout_seconds=self._timeout_seconds,
        )

    def check(self) -> None:
        """Raises XdsError, once, if a save in the background has failed."""
        if self._saver is not None:
            self._saver.check()

    def wait(self) -> None:
        """Return when nothing is being written. Raises what `check` raises."""
        if self._saver is not None:
            self._saver.wait()

    def progress(self) -> Progress | None:
        """None: nothing is being written."""
        return None if self._saver is None else self._saver.progress()

    def close(self) -> None:
        """Wait, and release all resources. Raises what `check` raises."""
        if self._saver is not None:
            self._saver.close()


@final
class Compiling:
    """The compiled blocks of one model: makes the `Compiler` when it is first used."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        config: Config,
        recomputing: Recomputing | None,
    ) -> None:
        """Nothing is compiled yet. recomputing: of `blocks`; None: nothing is recomputed.

        Raises:
            ConfigError: the section is enabled and names an unknown backend or option.
        """
        self._model, self._blocks = model, blocks
        self._config, self._recomputing = config, recomputing
        self._compiler = self._build() if config.compile.enabled else None

    def _build(self) -> Compiler:
        from .model.compiling import Compiler

        return Compiler(self._model, self._blocks, self._config, self._recomputing)

    @property
    def is_compiled(self) -> bool:
        return self._compiler is not None and self._compiler.is_compiled

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """See `Compiler.compile`."""
        if self._compiler is None:
            self._compiler = self._build()
        self._compiler.compile(*args, **kwargs)

    def undo(self) -> None:
        """Restore the forwards of before `compile`."""
        if self._compiler is not None:
            self._compiler.undo()


class Saving(Protocol):
    """The part of an engine that is needed to save its states."""

    global_steps: int

    def save_checkpoint(self, save_dir: str) -> bool: ...
    def wait_for_checkpoint(self) -> None: ...


class Preemption(ABC):
    """How one engine reacts to a signal to stop."""

    is_asked = False  # what this rank says in the message of its steps

    @abstractmethod
    def begin(self, engine: Saving) -> None:
        """The engine is ready."""

    @abstractmethod
    def agree(self, status: StepStatus) -> None:
        """What the ranks said in the message of the step that runs."""

    @abstractmethod
    def boundary(self) -> None:
        """A step has ended. If it is the last step after a signal, all states are saved here."""

    @abstractmethod
    def check(self) -> None:
        """A step begins. Raises Preempted if all states are saved."""

    @abstractmethod
    def end(self) -> None:
        """The engine takes no more steps."""


@final
class NoPreemptionSave(Preemption):
    """A signal has its usual effect on the process."""

    def begin(self, engine: Saving) -> None:
        return

    def agree(self, status: StepStatus) -> None:
        return

    def boundary(self) -> None:
        return

    def check(self) -> None:
        return

    def end(self) -> None:
        return


class LoopFactory(Protocol):
    """Makes the loop of train_batch and eval_batch."""

    def __call__(self, parts: Parts, step: Any, counters: Counters) -> Any: ...


@dataclass
class Parts:
    """The pieces of an engine."""

    config: Config
    module: nn.Module
    sharded: ShardedModel
    updater: Updater
    auto_ratio: AutoRatio | None
    optimizer: Any  # None: a frozen model
    scheduler: Scheduler | None
    loss_scale: LossScale
    autocast: Callable[[], AbstractContextManager[Any]]
    cast_inputs: torch.dtype | None
    device: torch.device
    local_rank: int
    monitor: Monitor
    report: StepReport
    loader: Any
    undo: list[Callable[[], None]]  # for the end, the last one first
    compiler: Compiling
    saves: Saves
    preemption: Preemption
    opened: list[Collectives]  # of all groups that this engine uses
    loop: LoopFactory
