"""What `initialize` chose for one engine: one object for each feature."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ..ops.comm.collectives import Collectives
from ..zero.core.filling import Filling
from ..zero.core.sharded_model import ShardedModel
from ..zero.core.update import Updater
from .config.config import Config
from .model.compiling import Compiler
from .optim.loss_scale import LossScale
from .preemption import Preemption
from .saves import Saves
from .steps.counters import Counters
from .telemetry.monitor import Monitor
from .telemetry.report import StepReport

if TYPE_CHECKING:
    from .checkpoint.training import Training
    from .optim.schedule_base import Scheduler


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
    filling: Filling
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
    undo: Callable[[], None]
    compiler: Compiler
    saves: Saves
    preemption: Preemption
    opened: list[Collectives]  # of all groups that this engine uses
    loop: LoopFactory

    @property
    def training(self) -> Training:
        """What checkpoints are made of."""
        from .checkpoint.training import Training

        return Training(
            module=self.module,
            sharded=self.sharded,
            updater=self.updater,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loss_scale=self.loss_scale,
            loader=self.loader,
            device=self.device,
            stage=self.config.zero_optimization.stage,
            saver=self.saves.saver,
        )
