"""Writes a prepared checkpoint: the interface of all savers, and the one that blocks until the commit."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import torch
from pydantic import TypeAdapter

from ...ops.comm.collectives import Collectives
from ...utils.errors import PeerError, XdsError
from .agreement import together
from .format import dump, parse, part_to_json
from .io.folders import MANIFEST, Claim, commit, discard, file_name, prune, write_latest
from .io.node_folders import Placement
from .io.tensor_file import Entry, Sums, write_tensors
from .manifest import Manifest, RankPart
from .nodes import Nodes

log = logging.getLogger("xds")
DOING = "save_checkpoint"
_PART = TypeAdapter(RankPart)


@dataclass(frozen=True, eq=False)
class Job:
    """One checkpoint to write; everything except the checksums is known.

    folder: where the ranks write; it becomes save_dir / tag.
    claim: the lock on the folder, of the rank that made it: rank 0, or the first one of each node.
    nodes: those that write into folders of their own; None: all ranks share the folder.
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
    nodes: Nodes | None = None

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


class Rounds(Protocol):
    """How the ranks of a save agree on its steps."""

    def from_first(self, make: Callable[[], str]) -> str:
        """What `make` returns on rank 0, on every rank.

        Raises XdsError, on all ranks: it failed.
        """

    def each(self, action: Callable[[], None]) -> None:
        """Run `action` on every rank.

        Raises:
            Disagreed: it failed on some rank, and every rank knows.
            XdsError: a rank is lost; what the others know is not known.
        """


@final
class Disagreed(XdsError):
    """A step of a save failed on some rank, and all ranks know."""


class Saver(ABC):
    """Writes checkpoints, and keeps the last `keep_last` checkpoints of a kind; 0 keeps all."""

    def __init__(self, keep_last: int) -> None:
        self._keep_last = keep_last

    @abstractmethod
    def save(self, job: Job) -> None:
        """Write a checkpoint, or start to. A collective; raises on all ranks or on none."""

    def finish(self, job: Job, parts: Sequence[Any]) -> None:
        """Commit, update `latest`, prune. Only on rank 0, after every rank's file is durable."""
        commit(job.folder, job.save_dir, self._manifest(job, parts))
        self._end(job)
        log.info("saved checkpoint %s", job.save_dir / job.tag)

    def finish_on_nodes(self, job: Job, nodes: Nodes, parts: Sequence[Any], rounds: Rounds) -> None:
        """The same where each node has a folder. On every rank. parts: only rank 0's are used."""
        text = rounds.from_first(lambda: dump(self._manifest(job, parts)).decode())
        manifest = parse(text.encode(), str(job.folder / MANIFEST))
        placement = Placement(job.folder, job.save_dir, manifest, sorted(nodes.local))

        def on_leaders(action: Callable[[], None]) -> Callable[[], None]:
            return action if nodes.is_leader else lambda: None

        try:
            rounds.each(on_leaders(lambda: placement.place(text.encode())))
        except Disagreed:  # otherwise another node may go on
            on_leaders(placement.withdraw)()
            raise
        rounds.each(on_leaders(placement.show))
        rounds.each(on_leaders(lambda: self._end(job)))
        if job.is_first:
            where = f"{job.save_dir / job.tag} of {len(nodes.nodes)} nodes"
            log.info("saved checkpoint %s", where)

    def _manifest(self, job: Job, parts: Sequence[Any]) -> Manifest:
        return job.manifest([_PART.validate_python(part) for part in parts])

    def _end(self, job: Job) -> None:
        """Update `latest`, and remove old checkpoints."""
        if job.save_latest:
            write_latest(job.save_dir, job.tag)
        if self._keep_last:
            prune(job.save_dir, job.tag, self._keep_last)

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
class _DirectRounds(Rounds):
    """By collectives."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def from_first(self, make: Callable[[], str]) -> str:
        is_first = self._collectives.rank == 0
        mine, sizes = together(
            self._collectives,
            DOING,
            lambda: bytearray(make().encode() if is_first else b""),
            share=len,
        )
        text = torch.empty(sizes[0], dtype=torch.uint8)
        if is_first:
            text = torch.frombuffer(mine, dtype=torch.uint8)
        text = text.to(self._collectives.device)
        self._collectives.broadcast(text, what="the manifest of a checkpoint")
        return bytes(text.cpu().numpy()).decode()

    def each(self, action: Callable[[], None]) -> None:
        try:
            together(self._collectives, DOING, action)
        except PeerError:
            raise
        except XdsError as error:
            raise Disagreed(str(error)) from error


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
            if job.nodes is None:
                together(
                    job.collectives,
                    DOING,
                    lambda: self.finish(job, parts) if job.is_first else None,
                )
            else:
                self.finish_on_nodes(job, job.nodes, parts, _DirectRounds(job.collectives))
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
