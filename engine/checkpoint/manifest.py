"""The fields of a checkpoint's manifest, and their types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from ...utils.schema.checked_types import Positive, Size, Text
from ...zero.checkpoint.ranges import ConstantRange, Range, SavedFlat

FORMAT, VERSION = "xds-checkpoint", 1
MAX_SECONDS = 250_000_000_000  # the year 9892, near the end of Python's dates
Seconds = Annotated[float, Field(strict=True, ge=0, lt=MAX_SECONDS)]


@dataclass(frozen=True)
class FileRecord:
    """The record of one rank's file.

    path: its name in the checkpoint's folder.
    crc32: one for each `chunk_bytes` of the file; the last chunk may be shorter.
    ranges, constants: the parts of the flat buffers that it holds.
    own: values of this rank alone; their tensors are in the file.
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
    """Everything of a checkpoint except the tensors.

    state: the engine's values; its tensors are in files[0].
    saved_seconds: when it was saved, in Unix time; 0 if the writer did not record it.
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
        """Optimizer steps taken before the save."""
        return int(self.state["counters"]["global_steps"])

    @property
    def micro_steps(self) -> int:
        """Micro-batches processed before the save."""
        return int(self.state["counters"]["micro_steps"])
