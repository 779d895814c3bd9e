"""`deepspeed.runtime.checkpoint_engine`: writers of single files, for scripts that save with them."""

from __future__ import annotations

from typing import Any

from ...missing import placeholder
from .checkpoint_engine import CheckpointCommitInfo as CheckpointCommitInfo
from .torch_checkpoint_engine import TorchCheckpointEngine as TorchCheckpointEngine


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
