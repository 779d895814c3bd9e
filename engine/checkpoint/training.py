"""The objects of an engine whose states a checkpoint saves and loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...zero.model.sharded_model import ShardedModel
from ...zero.model.update import Updater
from ..optim.loss_scale import LossScale
from ..optim.schedule_base import Scheduler
from .saver import Saver


@dataclass(frozen=True)
class Training:
    """The objects that own the states of one engine. optimizer: None if the model is frozen."""

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
