"""`deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine`: `torch.save` and `torch.load`."""

from __future__ import annotations

from typing import Any, final

import torch

from ...missing import placeholder
from .checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

ENGINE_NAME = "TorchCheckpointEngine"


@final
class TorchCheckpointEngine(CheckpointEngine):
    """A file is what `torch.save` writes."""

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.name = ENGINE_NAME

    def create(self, info: CheckpointCommitInfo) -> None:
        """Does nothing."""

    def save(self, state_dict: Any, path: str) -> None:
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Tensors and plain values; a file with other objects in it is refused, because loading runs code."""
        return torch.load(path, map_location=map_location, weights_only=True)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
