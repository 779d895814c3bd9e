"""`deepspeed.runtime.dataloader`: the loaders of `initialize(training_data=...)` and `deepspeed_io`."""

from __future__ import annotations

from torch.utils.data import DataLoader as DeepSpeedDataLoader

from ...engine.data.loaders import RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
