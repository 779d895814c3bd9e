"""What a checkpoint's manifest says: its fields and their types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from ...utils.schema.checked_types import Positive, Size, Text
from ...zero.checkpoint.ranges import ConstantRange, Range, SavedFlat

FORMAT, VERSION = "xds-checkpoint", 1
MAX_SECONDS = 250_000_000_000  # the year 9892: what Python has dates for
Seconds = Annotated[float, Field(strict=True, ge=0, lt=MAX_SECONDS)]


@dataclass(frozen=True)
class FileRecord:
    """One rank's file.

    path: its name in the checkpoint's folder. crc32: of every `chunk_bytes` of it, the last one shorter.
    ranges, constants: what it holds of the flats. own: values of this rank alone, with tensors in the file.
    """

    path: Text
    size_bytes: Positive
    chunk_bytes: Positive
    crc32: tuple[Size, ...]
    ranges: tuple[Range, ...]
    constants: tuple[ConstantRange, ...]
    own: Any


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but the tensors. `state`: the engine's values; its tensors are in files[0].

    saved_seconds: when it was saved, in Unix time; 0 where the writer did not say.
    """

    format: Text
    version: Size
    xds: Text
    tag: Text
    world_size: Positive
    stage: Size
    flats: tuple[SavedFlat, ...]
    files: tuple[FileRecord, ...]
    state: Any
    saved_seconds: Seconds = 0.0

    @property
    def global_steps(self) -> int:
        """Optimizer steps taken before it was saved."""
        return int(self.state["counters"]["global_steps"])

    @property
    def micro_steps(self) -> int:
        """Micro-batches seen before it was saved."""
        return int(self.state["counters"]["micro_steps"])
