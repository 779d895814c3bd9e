"""Recognizes the checkpoints of DeepSpeed itself, which have to be imported first."""

from __future__ import annotations

from pathlib import Path

from ...engine.checkpoint.imports.deepspeed import is_deepspeed
from ...engine.checkpoint.io.folders import LATEST, MANIFEST, named_in
from ...utils.errors import UsageError


def refuse_theirs(folder: Path, tag: str | None) -> None:
    """Raise where `folder`, or its checkpoint `tag` (None: the one in `latest`), was written by DeepSpeed.

    Raises:
        UsageError: it names the command that imports such a checkpoint.
    """
    if tag is None:
        try:
            tag = named_in(folder / LATEST) or ""
        except UsageError:
            return  # the load reports it
    if "\0" in tag:
        return  # a damaged `latest`, which the load reports
    here = folder / tag
    if (here / MANIFEST).exists():
        return
    if (here / "zero").is_dir():
        raise UsageError(
            f"{here} is a universal checkpoint of DeepSpeed, which is not read: import the checkpoint it was "
            f"made from with `xds checkpoint import {folder} NEW_FOLDER --tag ITS_TAG`, and load NEW_FOLDER"
        )
    if is_deepspeed(here):
        name = f" --tag {tag}" if tag else ""
        raise UsageError(
            f"{here} is a checkpoint of DeepSpeed: import it once with `xds checkpoint import {folder} "
            f"NEW_FOLDER{name}`, and load NEW_FOLDER"
        )


__all__ = ["refuse_theirs"]
