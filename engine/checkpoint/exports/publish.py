"""Publishes exports: at any instant a reader of the place finds the former files or the new ones, whole.

    write     .<name>.part-1a2b3c4d/            in the folder that will hold the files; fsynced
    shards    moved in, under names that no former file had
    commit    the entry file is renamed to its name; entries that readers prefer to it are removed, the
              preferred one last
    remove    what the commit has made stale

An entry is the file that a reader looks for first: an index, an only file, dcp's .metadata. The commit is one
rename or one unlink, whatever was there: a new entry is hidden by the one that readers prefer until that goes.

transformers reads config.json before the entry. Where that file changes too, it names the new entry, by a name
of its own, until both are in place. A kill leaves files that the next export removes.
"""

from __future__ import annotations

import fcntl
import filecmp
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ....ops.weights.files import CONFIG, ENTRIES, EXPLICIT, INDEX, explicit_entry, hindrance
from ....utils.errors import UsageError
from ..io.folders import MANIFEST
from ..io.storage import Claim, Disk
from ..manifest import OWN_FILE


@dataclass(frozen=True)
class _Family:
    """Files of one kind of export.

    entries: those that a reader takes the first of. others: a pattern of what the entries name.
    """

    entries: tuple[str, ...]
    others: str

    def has(self, name: str) -> bool:
        return name in self.entries or re.fullmatch(self.others, name) is not None


_FAMILIES = (
    _Family(
        ENTRIES,
        r"model-([0-9a-f]{8}-)?\d{5}-of-\d{5}\.safetensors"
        r"|pytorch_model-([0-9a-f]{8}-)?\d{5}-of-\d{5}\.bin"
        r"|model-[0-9a-f]{8}\.safetensors(\.index\.json)?",  # an entry's second name
    ),
    _Family((".metadata",), r"__([0-9a-f]{8}|\d+)_\d+\.distcp"),
    _Family((MANIFEST,), OWN_FILE),
)

_PART = re.compile(r"\..+\.part-[0-9a-f]{8}")
_DISK = Disk()  # an export is for other programs: it is in a file system


@contextmanager
def published(out: Path, *, is_folder: bool, overwrite: bool) -> Iterator[Path]:
    """A new path to write to, which becomes `out` at the end. See `Publication`."""
    publication = Publication(out, is_folder=is_folder, overwrite=overwrite)
    try:
        yield publication.path
        publication.commit()
    finally:
        publication.close()


@final
class Publication:
    """New files for `out`, which no reader sees before `commit`. One process writes them.

    Several processes may publish to one place at a time: the last one stays.
    """

    def __init__(self, out: Path, *, is_folder: bool, overwrite: bool) -> None:
        """Make the folder for the new files.

        With `overwrite` a file is replaced. In a folder former weights are replaced, and other files stay.
        Raises:
            UsageError: `out` exists and may not be replaced, or readers would find something else there;
                nothing was changed.
        """
        self._out = Path(os.path.abspath(out))
        self._is_folder = is_folder
        _check(self._out, is_folder=is_folder, overwrite=overwrite)
        is_inside = is_folder and self._out.exists()  # it may be on another disk than its parent
        home = self._out if is_inside else self._out.parent
        home.mkdir(parents=True, exist_ok=True)
        self._part, self._claim = _part_folder(home, self._out.name)

    @property
    def path(self) -> Path:
        """Where to write: a folder, or a file that does not exist yet."""
        return self._part if self._is_folder else self._part / self._out.name

    def commit(self) -> list[str]:
        """Make the files durable, and let readers find them. Returns their names in the folder."""
        out, part = self._out, self._part
        names = sorted(path.name for path in part.iterdir())
        for path in (*(part / name for name in names), part):
            _DISK.sync(path)
        if self._is_folder and not out.exists():
            with suppress(OSError):  # another process has made it by now
                os.replace(part, out)
        if part.exists():
            folder = out if self._is_folder else out.parent
            with _alone_in(folder):
                names = _replace(part, folder)
        _DISK.sync(out.parent)
        return names

    def close(self) -> None:
        """Remove what was not committed."""
        try:
            _DISK.remove(self._part)
        finally:
            self._claim.release()


def _check(out: Path, *, is_folder: bool, overwrite: bool) -> None:
    folder = out if is_folder else out.parent
    if os.path.lexists(out):
        if out.is_dir() != is_folder:
            kinds = ("a folder", "a file") if out.is_dir() else ("a file", "a folder")
            raise UsageError(
                f"{out} is {kinds[0]}, but {kinds[1]} must be written; choose another name"
            )
        is_empty = is_folder and not any(out.iterdir())
        if not (overwrite or is_empty):
            raise UsageError(f"{out} exists; choose another name, or replace it with --overwrite")
    if (is_folder or out.name in ENTRIES) and (reason := hindrance(folder)):
        raise UsageError(f"{folder} {reason}; write to another folder, or remove it first")


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait for other publications in the folder: one must not remove the shards of another as stale."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _part_folder(home: Path, name: str) -> tuple[Path, Claim]:
    """A new folder in `home`, locked while it is in use. Those of killed exports are removed."""
    for old in home.glob(".*.part-????????"):
        claim = _claim(old) if _PART.fullmatch(old.name) else None
        if claim is not None:
            _DISK.remove(old)
            claim.release()
    while True:  # another process may take a new folder for that of a killed export
        part = home / f".{name}.part-{secrets.token_hex(4)}"
        part.mkdir()
        claim = _claim(part)
        if claim is not None:
            return part, claim


def _claim(path: Path) -> Claim | None:
    """The lock; None: another process has it, or removed the folder."""
    try:
        claim = _DISK.claim(path)
    except FileNotFoundError:
        return None
    if not claim.is_taken:
        return claim
    claim.release()
    return None


# -- into a folder that may hold other files ----------------------------------------------------------------


def _replace(part: Path, folder: Path) -> list[str]:
    """Move the files of `part` to `folder` in the order that the head of this file gives; their names."""
    names = sorted(path.name for path in part.iterdir())
    family = next((f for f in _FAMILIES if set(names) & set(f.entries)), _Family((), ""))
    entry = next((name for name in family.entries if name in names), "")
    shards = [name for name in names if re.fullmatch(family.others, name)]
    rest = [name for name in names if name not in (entry, *shards)]
    token = secrets.token_hex(4)
    # a reader may have the former index, and open the shards now
    if entry.endswith(INDEX) and any(map(family.has, os.listdir(folder))):
        shards = _rename_shards(part, entry, shards, token)
    _move(part, folder, shards)
    is_bridged = entry in ENTRIES and _bridge(part, folder, entry, token)
    if not is_bridged:
        _move(part, folder, rest)
    if entry:
        _move(part, folder, [entry])
        # from the least preferred on: the last one that goes is what readers took
        for name in reversed(family.entries[: family.entries.index(entry)]):
            (folder / name).unlink(missing_ok=True)
            _DISK.sync(folder)
    if is_bridged:
        _move(part, folder, rest)
    with suppress(OSError):  # the next export removes them
        for path in folder.iterdir() if entry else ():
            if family.has(path.name) and path.name not in (entry, *shards):
                path.unlink(missing_ok=True)
    return [*shards, *rest, *([entry] if entry else [])]


def _bridge(part: Path, folder: Path, entry: str, token: str) -> bool:
    """Where config.json changes, put a new one in place that names the new entry, by a second name.

    Raises UsageError: config.json stays, and names an entry itself.
    """
    old, new = folder / CONFIG, part / CONFIG
    if not old.exists():
        return False
    if not new.exists():
        if names := explicit_entry(folder):
            raise UsageError(
                f"{old} names {names!r} as {EXPLICIT}, which transformers would read instead: remove this "
                "key, or write to another folder"
            )
        return False
    if entry not in ENTRIES[:2] or filecmp.cmp(old, new, shallow=False):
        return False
    second = entry.replace("model", f"model-{token}", 1)
    _link(part / entry, folder / second)
    told = json.loads(new.read_bytes()) | {EXPLICIT: second}
    _DISK.write(part / f"{token}.json", json.dumps(told).encode())
    os.replace(part / f"{token}.json", old)
    _DISK.sync(folder)
    return True


def _move(part: Path, folder: Path, names: list[str]) -> None:
    for name in names:
        os.replace(part / name, folder / name)
    _DISK.sync(folder)


def _rename_shards(part: Path, entry: str, shards: list[str], token: str) -> list[str]:
    """Put `token` into the names of the shards, also in their index."""
    fresh = {name: re.sub(r"(-\d{5}-of-)", rf"-{token}\1", name) for name in shards}
    for name in shards:
        os.replace(part / name, part / fresh[name])
    index = json.loads((part / entry).read_bytes())
    index["weight_map"] = {name: fresh[file] for name, file in index["weight_map"].items()}
    (part / entry).unlink()
    _DISK.write(part / entry, json.dumps(index, indent=2).encode())
    return list(fresh.values())


def _link(old: Path, new: Path) -> None:
    """A second name for a file; a copy where the file system has none."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)
        _DISK.sync(new)
