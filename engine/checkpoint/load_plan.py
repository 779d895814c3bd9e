"""The options of a load, and the checked plan of a load on this rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torch import Tensor

from ...zero.checkpoint.ranges import Catalogue, SavedFlat
from ...zero.checkpoint.restore import Restore
from ...zero.checkpoint.snapshot import Snapshot
from ...zero.checkpoint.targets import Target
from .io.checked_file import CheckedFiles
from .manifest import Manifest

DOING = "load_checkpoint"
MAX_NAMES = 20  # in one message


@dataclass(frozen=True)
class LoadOptions:
    """What to load; the names are those of `Engine.load_checkpoint`."""

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    fallback: bool = False

    @property
    def with_optimizer(self) -> bool:
        return self.load_optimizer_states and not self.load_module_only

    @property
    def with_scheduler(self) -> bool:
        return self.load_lr_scheduler_states and not self.load_module_only


@final
@dataclass(eq=False)
class Plan:
    """A load on this rank.

    own, buffers: what belongs to this rank alone, and buffers that differ from those of the first rank.
    """

    folder: Path
    manifest: Manifest
    snapshot: Snapshot
    catalogue: Catalogue
    restore: Restore
    files: CheckedFiles
    targets: list[Target] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_same_mesh(self) -> bool:
        """It was saved by as many stages of as many ranks."""
        return self.manifest.grid == self.snapshot.mesh

    @property
    def own_file(self) -> int | None:
        """The file with what belongs to this rank alone: its own; or that of its data rank on the first stage.

        None: there was another number of data ranks.
        """
        saved, here = self.manifest.grid, self.snapshot
        if self.is_same_mesh:
            return here.rank
        return saved.rank_at(data=here.place.data) if saved.data == here.mesh.data else None

    def file_of(self, flat: SavedFlat) -> int | None:
        """The file with this data rank's own values of a flat; None: no rank of this number held it."""
        holders = self.manifest.holders_of(flat)
        if self.is_same_mesh and self.snapshot.rank in holders:
            return self.snapshot.rank
        saved, data = self.manifest.grid, self.snapshot.place.data
        return next((rank for rank in holders if saved.coordinates(rank).data == data), None)


def some_of(names: Iterable[str]) -> str:
    """The first names for a message, and how many more there are."""
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return ", ".join(found[:MAX_NAMES]) + more
