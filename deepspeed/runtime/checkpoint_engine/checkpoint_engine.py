"""`deepspeed.runtime.checkpoint_engine.checkpoint_engine`: what a writer of files has to do."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from ...missing import placeholder


@dataclass
class CheckpointCommitInfo:
    """What is written: tag, folder, and whether `latest` will name it."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """Saves and loads single files. `engine.save_checkpoint` does not use it."""

    def __init__(self, config_params: Any = None) -> None:
        self.name: str | None = None

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """A checkpoint begins."""

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None:
        """Write one file."""

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """All files are written."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        return False

    def set_commit_info(  # noqa: B027 (optional)
        self, info: CheckpointCommitInfo
    ) -> None:
        """Does nothing: files are written at once."""

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        return None

    def cleanup(self) -> None:  # noqa: B027 (optional)
        """Does nothing."""

    def preserves_storage_sharing(self) -> bool:
        return True


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
