"""Publishes a file or folder atomically: it is written under another name, fsynced, and renamed.

    write     .<name>.part-1a2b3c4d        removed when writing fails; after a kill the next export removes it
    publish   .<name>.part-1a2b3c4d -> <name>
    or, if the folder exists:  its old entry file is removed, new files are moved in, the entry file last
    or, if the export is one file:  it replaces the old one at once

Readers look for the entry file first: an index, the only file, or dcp's .metadata. Without it they find no
model, so they never see a mixture of two exports. A lock keeps the folder of an export that is being written,
so several processes may export to one place; the last one stays.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ....utils.errors import UsageError
from ....utils.file_lock import try_lock

# files of one kind of export, and those of them that are entry files
FAMILIES = (
    (r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", "model.safetensors"),
    (r"pytorch_model(-\d{5}-of-\d{5})?\.bin(\.index\.json)?", "pytorch_model.bin"),
    (r"__\d+_\d+\.distcp|\.metadata", ".metadata"),
)


@contextmanager
def published(out: Path, *, is_folder: bool, overwrite: bool) -> Iterator[Path]:
    """A new path beside `out` to write to. At the end it is fsynced and renamed to `out`.

    With `overwrite` a file is replaced; in a folder an older export is replaced, and other files stay.
    Raises:
        UsageError: `out` exists and may not be replaced; nothing was changed.
    """
    out = Path(os.path.abspath(out))
    _check(out, is_folder=is_folder, overwrite=overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    for old in out.parent.glob(f".{out.name}.part-????????"):
        _remove_leftover(old)
    part, lock = _claim(out) if is_folder else (_new_part(out), None)
    try:
        yield part
        _sync(part)
        if is_folder:
            _publish_folder(part, out)
        else:
            os.replace(part, out)
        _sync_one(out.parent)
    finally:
        _remove(part)
        if lock is not None:
            os.close(lock)


def _new_part(out: Path) -> Path:
    return out.parent / f".{out.name}.part-{secrets.token_hex(4)}"


def _claim(out: Path) -> tuple[Path, int]:
    """A new folder, and the open file whose lock says that it is in use."""
    while True:
        part = _new_part(out)
        part.mkdir()
        with suppress(FileNotFoundError):  # another process took it for a leftover
            lock = os.open(part, os.O_RDONLY)
            if try_lock(lock) is not False:
                return part, lock
            os.close(lock)


def _remove_leftover(path: Path) -> None:
    """Remove what a killed export left; a folder in use stays."""
    if not path.is_dir():
        _remove(path)
        return
    with suppress(FileNotFoundError):
        lock = os.open(path, os.O_RDONLY)
        try:
            if try_lock(lock) is not False:
                _remove(path)
        finally:
            os.close(lock)


def _publish_folder(part: Path, out: Path) -> None:
    if not out.exists():
        with suppress(OSError):  # another process has made it by now
            os.replace(part, out)
            return
    _move_into(part, out)


def _check(out: Path, *, is_folder: bool, overwrite: bool) -> None:
    if not os.path.lexists(out):
        return
    if out.is_dir() != is_folder:
        kinds = ("a folder", "a file") if out.is_dir() else ("a file", "a folder")
        raise UsageError(
            f"{out} is {kinds[0]}, but {kinds[1]} must be written; choose another name"
        )
    is_empty = is_folder and not any(out.iterdir())
    if not (overwrite or is_empty):
        raise UsageError(f"{out} exists; choose another name, or replace it with --overwrite")


def _move_into(part: Path, out: Path) -> None:
    new = {path.name for path in part.iterdir()}
    pattern, entry = next(
        family for family in FAMILIES if any(re.fullmatch(family[0], name) for name in new)
    )
    entries = {entry, f"{entry}.index.json"}
    for name in entries if new - entries else ():
        (out / name).unlink(missing_ok=True)
    _sync_one(out)
    for name in new - entries:
        os.replace(part / name, out / name)
    _sync_one(out)
    for name in new & entries:
        os.replace(part / name, out / name)
    _sync_one(out)
    for path in out.iterdir():
        if re.fullmatch(pattern, path.name) and path.name not in new:
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            _sync_one(inner)
    _sync_one(path)


def _sync_one(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
