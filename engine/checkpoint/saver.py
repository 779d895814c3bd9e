"""Writes a prepared checkpoint: the interface of all savers, and the one that blocks until the commit."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from pydantic import TypeAdapter

from ...ops.comm.collectives import Collectives
from .agreement import together
from .format import part_to_json
from .io.folders import Claim, commit, discard, file_name, prune, write_latest
from .io.tensor_file import Entry, Sums, write_tensors
from .manifest import Manifest, RankPart

log = logging.getLogger("xds")
DOING = "save_checkpoint"
_PART = TypeAdapter(RankPart)


@dataclass(frozen=True, eq=False)
class Job:
    """One checkpoint to write; everything except the checksums is known.

    folder: where the ranks write; it becomes save_dir / tag.
    claim: the lock on the folder, on rank 0, which made it.
    part: builds this rank's part of the manifest from its file's checksums.
    manifest: builds the manifest from the parts of all ranks.
    """

    collectives: Collectives
    save_dir: Path
    folder: Path
    claim: Claim | None
    tag: str
    save_latest: bool
    entries: Sequence[Entry]
    part: Callable[[str, Sums], RankPart]
    manifest: Callable[[list[RankPart]], Manifest]

    @property
    def is_first(self) -> bool:
        return self.collectives.rank == 0

    def end(self, *, discards: bool) -> None:
        """Release the folder; remove it first if the save failed."""
        if self.claim is not None:
            if discards:
                discard(self.folder)
            self.claim.release()

    @property
    def path(self) -> Path:
        """This rank's file."""
        return self.folder / file_name(self.folder, self.collectives.rank)

    def part_json(self, sums: Sums) -> dict[str, Any]:
        """This rank's part of the manifest, as JSON."""
        return part_to_json(self.part(self.path.name, sums))


@dataclass(frozen=True)
class Progress:
    """How much of its file this rank has written in the background."""

    tag: str
    written_bytes: int
    total_bytes: int


class Saver(ABC):
    """Writes checkpoints, and keeps the last `keep_last` checkpoints of a kind; 0 keeps all."""

    def __init__(self, keep_last: int) -> None:
        self._keep_last = keep_last

    @abstractmethod
    def save(self, job: Job) -> None:
        """Write a checkpoint, or start to. A collective; raises on all ranks or on none."""

    def finish(self, job: Job, parts: Sequence[Any]) -> None:
        """Commit, update `latest`, prune. Only on rank 0, after every rank's file is durable."""
        manifest = job.manifest([_PART.validate_python(part) for part in parts])
        commit(job.folder, job.save_dir, manifest)
        if job.save_latest:
            write_latest(job.save_dir, job.tag)
        if self._keep_last:
            prune(job.save_dir, job.tag, self._keep_last)
        log.info("saved checkpoint %s", job.save_dir / job.tag)

    @abstractmethod
    def check(self) -> None:
        """Raises XdsError, once, if a save in the background has failed."""

    @abstractmethod
    def wait(self) -> None:
        """Return when nothing is being written. Raises what `check` raises."""

    @abstractmethod
    def progress(self) -> Progress | None:
        """None: nothing is being written."""

    @abstractmethod
    def close(self) -> None:
        """Wait, and release all resources. Raises what `check` raises."""


@final
class Direct(Saver):
    """`save` returns when the checkpoint is committed."""

    def save(self, job: Job) -> None:
        is_saved = False
        try:
            _, parts = together(
                job.collectives,
                DOING,
                lambda: write_tensors(job.path, job.entries),
                share=job.part_json,
            )
            together(
                job.collectives,
                DOING,
                lambda: self.finish(job, parts) if job.is_first else None,
            )
            is_saved = True
        finally:
            job.end(discards=not is_saved)

    def check(self) -> None:
        return

    def wait(self) -> None:
        return

    def progress(self) -> None:
        return None

    def close(self) -> None:
        return
