"""What a checkpoint holds of an engine: the objects whose states are saved and loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ...zero.core.sharded_model import ShardedModel
from ...zero.core.update import Updater
from ..optim.loss_scale import LossScale
from .saver import Saver


class Scheduler(Protocol):
    """What the engine calls on a learning-rate schedule."""

    def step(self) -> None: ...


@dataclass(frozen=True)
class Training:
    """The states of one engine, each with its owner. optimizer: None where the model is frozen."""

    module: nn.Module
    sharded: ShardedModel
    updater: Updater
    optimizer: Any
    scheduler: Scheduler | None
    loss_scale: LossScale
    loader: Any
    device: torch.device
    stage: int
    saver: Saver
