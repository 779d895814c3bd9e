"""The folder of one node, where nodes have folders of their own: committed on all nodes together, or on none.

    place   .<tag>.tmp-1a2b3c4d/manifest.json        every node: its files and the manifest are durable
            <tag>/manifest-1a2b3c4d.json             an existing tag: beside the old files, which stay
            -- all nodes have the new checkpoint; an older one of this tag may go from here on --
    show    .<tag>.tmp-1a2b3c4d -> <tag>             a new tag: the folder is renamed
            <tag>/manifest-1a2b3c4d.json -> <tag>/manifest.json      an existing tag
    latest  latest                                   on each node, after all have shown it

A checkpoint counts where all nodes have it, under either name of its manifest. So a kill at any instant leaves
the one before, or this one.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from ....utils.errors import UsageError
from ..manifest import Manifest
from ..nodes import present_files
from .folders import (
    MANIFEST,
    discard,
    discard_others,
    parse_file,
    sync_folder,
    write_durably,
)

log = logging.getLogger("xds")
_EITHER = re.compile(r"manifest(-[0-9a-f]{8})?\.json")


@final
class Placement:
    """The new checkpoint in the folder of this node. Only on the first rank of the node."""

    def __init__(
        self, folder: Path, save_dir: Path, manifest: Manifest, ranks: Sequence[int]
    ) -> None:
        """folder: the hidden one, with the files of `ranks`, which are durable."""
        self._folder = folder
        self._save_dir = save_dir
        self._final = save_dir / manifest.tag
        self._paths = [manifest.files[rank].path for rank in ranks]
        self._beside = self._final / f"manifest-{save_id(manifest)}.json"
        self._is_beside = False

    def place(self, text: bytes) -> None:
        """Make the manifest durable; beside the old checkpoint, where the tag has one."""
        write_durably(self._folder / MANIFEST, text)
        sync_folder(self._folder)
        if not self._final.exists():
            return
        self._is_beside = True
        for path in self._paths:
            os.rename(self._folder / path, self._final / path)
        os.rename(self._folder / MANIFEST, self._beside)
        sync_folder(self._final)

    def withdraw(self) -> None:
        """Undo `place`, after it failed on some node. On an error the next save removes what is left."""
        if self._is_beside:
            discard(self._beside)
            for path in self._paths:
                discard(self._final / path)

    def show(self) -> None:
        """Make it the checkpoint of its tag, and remove the old one. All nodes have placed it."""
        if not self._is_beside:
            os.rename(self._folder, self._final)
            sync_folder(self._save_dir)
            return
        os.replace(self._beside, self._final / MANIFEST)
        sync_folder(self._final)
        discard(self._folder)
        with suppress(OSError):
            for path in self._final.iterdir():
                if _EITHER.fullmatch(path.name) and path.name != MANIFEST:
                    discard(path)
        discard_others(self._final, self._paths)


@dataclass(frozen=True)
class Candidate:
    """A checkpoint in the folder of a node, as far as it is there. present: the numbers of the files."""

    manifest: Manifest
    present: frozenset[int]

    @property
    def key(self) -> tuple[str, str]:
        """The tag, and which save of it."""
        return self.manifest.tag, save_id(self.manifest)


def save_id(manifest: Manifest) -> str:
    """8 digits that differ for each save; "" of an import that has no files."""
    return manifest.files[0].path.partition("-")[2][:8] if manifest.files else ""


def candidates(load_dir: Path, tag: str = "*") -> list[Candidate]:
    """The checkpoints of `tag` in a folder; of all tags. Unreadable manifests are left out, with a warning."""
    return list(_candidates(load_dir, tag))


def _candidates(load_dir: Path, tag: str) -> Iterator[Candidate]:
    folders = sorted(load_dir.glob("[!.]*/")) if tag == "*" else [load_dir / tag]
    for folder in folders:
        try:
            paths = [path for path in sorted(folder.iterdir()) if _EITHER.fullmatch(path.name)]
        except OSError:
            continue
        for path in paths:
            try:
                manifest = replace(parse_file(path), tag=folder.name)
            except (UsageError, OSError) as error:
                log.warning("%s is left out: %s", path, error)
                continue
            yield Candidate(manifest, present_files(folder, manifest))


__all__ = ["Candidate", "Placement", "candidates", "save_id"]
