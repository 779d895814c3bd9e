"""What `initialize` chose for one engine: one object for each feature."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..ops.comm.collectives import Collectives
from ..zero.model.auto_ratio import OffloadRatio
from ..zero.model.sharded_model import ShardedModel
from ..zero.model.update import Updater
from .checkpoint.saver import Saver
from .config.config import Config
from .model.compiling import Compiler
from .optim.loss_scale import LossScale
from .preemption import Preemption
from .steps.counters import Counters
from .telemetry.monitor import Monitor
from .telemetry.report import StepReport


class Scheduler(Protocol):
    """The methods of a learning-rate schedule that the engine calls."""

    def step(self) -> None: ...


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
    offload_ratio: OffloadRatio
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
    saver: Saver
    preemption: Preemption
    opened: list[Collectives]  # of all groups that this engine uses
    loop: LoopFactory
