"""Finds the checkpoint to load: all ranks choose the same one, in the folder that they share.

`NodeFinder` in node_finding.py does it where each node has a folder of its own.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ...ops.comm.collectives import Collectives
from ...utils.errors import DamagedError
from .agreement import together
from .io.folders import (
    check_folder,
    check_tag,
    newest_checkpoint,
    older_checkpoint,
    read_latest,
    read_manifest,
)
from .load_plan import DOING
from .manifest import Manifest

log = logging.getLogger("xds")


@dataclass(frozen=True)
class Choice:
    """A checkpoint of `tag`. save: which of several saves under this tag; "" where there is only one."""

    tag: str
    save: str = ""


class Finder(ABC):
    """Finds a checkpoint in `load_dir`. Every method is for all ranks."""

    def __init__(self, collectives: Collectives, load_dir: str | Path) -> None:
        self._collectives = collectives
        self._load_dir = load_dir

    @abstractmethod
    def first(self, tag: str | None, *, falls_back: bool) -> Choice | None:
        """The checkpoint of `tag`; of the tag in `latest`; None where no tag is given and there is no `latest`.

        falls_back: take the newest one where `latest` is missing or wrong.
        """

    @abstractmethod
    def older(self, refused: list[Choice], error: DamagedError) -> Choice:
        """The newest one before the last one of `refused`, which is damaged: `error`.

        Raises DamagedError: there is none.
        """

    @abstractmethod
    def read(self, choice: Choice) -> Manifest:
        """Its manifest, as this rank has it."""


@final
class SharedFinder(Finder):
    """Rank 0 looks; the others take its answer."""

    def first(self, tag: str | None, *, falls_back: bool) -> Choice | None:
        def look() -> str | None:
            folder = check_folder("load_dir", self._load_dir)
            if self._collectives.rank or tag is not None:
                return None if tag is None else check_tag(tag)
            return _named(folder, falls_back=falls_back)

        found = together(self._collectives, DOING, look, share=lambda found: found)[1][0]
        return None if found is None else Choice(found)

    def older(self, refused: list[Choice], error: DamagedError) -> Choice:
        load_dir = Path(self._load_dir)

        def look() -> str | None:
            if self._collectives.rank:
                return None
            return older_checkpoint(load_dir, refused[-1].tag, [one.tag for one in refused])

        older: str | None = together(self._collectives, DOING, look, share=lambda f: f)[1][0]
        if older is None:
            raise none_older(load_dir, error) from error
        if self._collectives.rank == 0:
            log.warning("%s; falling back to %s", error, load_dir / older)
        return Choice(older)

    def read(self, choice: Choice) -> Manifest:
        check_tag(choice.tag)
        return read_manifest(Path(self._load_dir), choice.tag)


def _named(folder: Path, *, falls_back: bool) -> str | None:
    """The tag in `latest`, or the newest one."""
    try:
        found = read_latest(folder)
    except DamagedError as error:
        found = newest_checkpoint(folder) if falls_back else None
        if found is None:
            raise
        log.warning("%s; falling back to %s", error, folder / found)
    if found is None and falls_back:
        found = newest_checkpoint(folder)
        if found is not None:
            log.warning("there is no file `latest` in %s; falling back to %s", folder, found)
    return found


def none_older(load_dir: Path, error: DamagedError) -> DamagedError:
    """The error to raise where no checkpoint is left to fall back to."""
    return DamagedError(f"{error}; there is no older checkpoint in {load_dir} to fall back to")


__all__ = ["Choice", "Finder", "SharedFinder", "none_older"]
