"""The fields of a checkpoint's manifest, and their types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from ...ops.mesh import AXES, Axis, Mesh
from ...utils.schema.checked_types import Positive, Size, Text
from ...zero.checkpoint.ranges import ConstantRange, Range, SavedFlat

FORMAT, VERSION = "xds-checkpoint", 2
READ_VERSIONS = (1, 2)  # version 1 has no pipeline stages: all ranks hold all flats
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
class RankPart:
    """What one rank contributes to a manifest. Its numbers of flats are those of its part of the model.

    flats: of the part, from the first rank of a part other than the first; from other ranks none.
    """

    file: FileRecord
    flats: tuple[SavedFlat, ...] = ()


@dataclass(frozen=True)
class SavedNode:
    """Ranks, ascending, whose files are in one folder that no other rank saw. name: of the first one's host."""

    name: Text
    ranks: tuple[Size, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything of a checkpoint except the tensors.

    mesh: how many ranks there are along each axis; file number r is that of rank r.
    holders: tuples of ranks, ascending: each flat names one, the ranks that hold its shards, in order.
    state: the engine's values; its tensors are in files[0].
    saved_seconds: when it was saved, in Unix time; 0 if the writer did not record it.
    nodes: of xds 0.1.0, where each node saved into a folder of its own, the nodes by their first rank. Then
        several files may have the same elements, in whole or not at all. All files are in one folder here.
    totals: the elements of each key in all files; older checkpoints do not contain it.
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
    mesh: dict[Axis, Positive] = field(default_factory=dict)
    holders: tuple[tuple[Size, ...], ...] = ()
    nodes: tuple[SavedNode, ...] = ()
    totals: dict[Text, Size] = field(default_factory=dict)

    @property
    def grid(self) -> Mesh:
        """The ranks that wrote it."""
        return Mesh(**self.mesh)

    def holders_of(self, flat: SavedFlat) -> tuple[int, ...]:
        """The ranks that hold the shards of `flat`, in order."""
        return self.holders[flat.held_by]

    @property
    def global_steps(self) -> int:
        """Optimizer steps taken before the save."""
        return int(self.state["counters"]["global_steps"])

    @property
    def micro_steps(self) -> int:
        """Micro-batches processed before the save."""
        return int(self.state["counters"]["micro_steps"])


def ranges_of(manifest: Manifest) -> list[Range]:
    """All ranges, each element once: of the first node that has it."""
    if not manifest.nodes:
        return [one for record in manifest.files for one in record.ranges]
    found: list[Range] = []
    taken: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for node in manifest.nodes:
        here = [one for rank in node.ranks for one in manifest.files[rank].ranges]
        fresh = [one for one in here if not _covers(taken.get((one.flat, one.key), []), one)]
        for one in fresh:
            taken.setdefault((one.flat, one.key), []).append((one.start, one.stop))
        found += fresh
    return found


def _covers(spans: list[tuple[int, int]], one: Range) -> bool:
    start = one.start
    for low, high in sorted(spans):
        if low <= start < high:
            start = high
    return start >= one.stop


def totals_of(files: Iterable[FileRecord]) -> dict[str, int]:
    """The `totals` of a manifest."""
    found: dict[str, int] = {}
    for record in files:
        parts: tuple[Range | ConstantRange, ...] = (*record.ranges, *record.constants)
        for one in parts:
            found[one.key] = found.get(one.key, 0) + one.stop - one.start
    return found


def lengths_of(mesh: Mesh) -> dict[Axis, int]:
    """The `mesh` of a manifest."""
    return dict(zip(AXES, mesh.shape, strict=True))


__all__ = [
    "FORMAT",
    "READ_VERSIONS",
    "VERSION",
    "FileRecord",
    "Manifest",
    "RankPart",
    "SavedNode",
    "lengths_of",
    "ranges_of",
    "totals_of",
]
