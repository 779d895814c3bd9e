"""What `initialize` chose for one engine: one object for each feature."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..zero.sharded_model import ShardedModel
from ..zero.update import Updater
from .checkpoint.saver import Saver
from .compiling import Compiler
from .config import Config
from .monitor import Monitor
from .precision import LossScale
from .preemption import Preemption
from .report import StepReport


class Scheduler(Protocol):
    """What the engine calls on a learning-rate schedule."""

    def step(self) -> None: ...


@dataclass
class Parts:
    """The pieces of an engine."""

    config: Config
    module: nn.Module
    sharded: ShardedModel
    updater: Updater
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
