"""`deepspeed.runtime.dataloader`: the loaders of `initialize(training_data=...)` and `deepspeed_io`."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader as DeepSpeedDataLoader

from ...engine.data.loaders import RepeatingLoader
from ..missing import placeholder

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
