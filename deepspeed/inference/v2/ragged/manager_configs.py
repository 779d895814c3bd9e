"""`deepspeed.inference.v2.ragged.manager_configs`: limits of an inference engine, for reading."""

from __future__ import annotations

from enum import Enum
from typing import Any

from pydantic import PositiveInt, model_validator

from ....missing import placeholder
from ....runtime.config_utils import DeepSpeedConfigModel


class AllocationMode(Enum):
    """RESERVE: all memory but `size` bytes. ALLOCATE: `size` blocks."""

    RESERVE = "reserve"
    ALLOCATE = "allocate"


class MemoryConfig(DeepSpeedConfigModel):
    """The memory of cached keys and values."""

    mode: AllocationMode = AllocationMode.RESERVE
    size: PositiveInt = 1_000_000_000


class DSStateManagerConfig(DeepSpeedConfigModel):
    """How many sequences and tokens there may be at a time."""

    max_tracked_sequences: PositiveInt = 2048
    max_ragged_batch_size: PositiveInt = 768  # tokens
    max_ragged_sequence_count: PositiveInt = 512
    max_context: PositiveInt = 8192  # tokens
    memory_config: MemoryConfig = MemoryConfig()
    offload: bool = False

    @model_validator(mode="after")
    def _check_sequences(self) -> DSStateManagerConfig:
        for name in ("max_tracked_sequences", "max_ragged_batch_size"):
            if self.max_ragged_sequence_count > getattr(self, name):
                raise ValueError(
                    f"max_ragged_sequence_count = {self.max_ragged_sequence_count}: must be at most {name} = "
                    f"{getattr(self, name)}"
                )
        return self


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["AllocationMode", "DSStateManagerConfig", "MemoryConfig"]
