"""Finds the checkpoint to load: rank 0 looks, and the others take its answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from ...ops.comm.collectives import Collectives
from ...utils.errors import DamagedError
from .agreement import together
from .io.folders import (
    check_folder,
    check_tag,
    newest_checkpoint,
    older_checkpoint,
    read_latest,
)
from .load_plan import DOING

log = logging.getLogger("xds")


def find_tag(
    collectives: Collectives, load_dir: str | Path, tag: str | None, *, falls_back: bool
) -> str | None:
    """`tag`; else the tag in `latest`; None where no tag is given and there is no `latest`. A collective.

    falls_back: take the newest checkpoint where `latest` is missing or wrong.
    """

    def look() -> str | None:
        folder = check_folder("load_dir", load_dir)
        if collectives.rank or tag is not None:
            return None if tag is None else check_tag(tag)
        return _named(folder, falls_back=falls_back)

    found: str | None = together(collectives, DOING, look, share=lambda found: found)[1][0]
    return found


def find_older(
    collectives: Collectives, load_dir: Path, refused: Sequence[str], error: DamagedError
) -> str:
    """The tag of the newest checkpoint before the last one of `refused`, which is damaged. A collective.

    Raises DamagedError: there is none.
    """

    def look() -> str | None:
        return None if collectives.rank else older_checkpoint(load_dir, refused[-1], refused)

    older: str | None = together(collectives, DOING, look, share=lambda found: found)[1][0]
    if older is None:
        raise DamagedError(
            f"{error}; there is no older checkpoint in {load_dir} to fall back to"
        ) from error
    if collectives.rank == 0:
        log.warning("%s; falling back to %s", error, load_dir / older)
    return older


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


__all__ = ["find_older", "find_tag"]
