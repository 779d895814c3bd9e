"""Publishes a file or folder atomically: it is written under another name, fsynced, and renamed.

    write     .<name>.part-1a2b3c4d/       removed when writing fails; after a kill the next export removes it
    publish   .<name>.part-1a2b3c4d -> <name>, or the one file in it
    or, if the folder exists:  its old entry file is removed, new files are moved in, the entry file last

Readers look for the entry file first: an index, the only file, or dcp's .metadata. Without it they find no
model, so they never see a mixture of two exports. A lock keeps the folder of an export that is being written,
so several processes may export to one place; the last one stays.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from ....utils.errors import UsageError
from ....utils.small_files import try_lock
from ..io.folders import discard

# files of one kind of export, and those of them that are entry files
FAMILIES = (
    (r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", "model.safetensors"),
    (r"pytorch_model(-\d{5}-of-\d{5})?\.bin(\.index\.json)?", "pytorch_model.bin"),
    (r"__\d+_\d+\.distcp|\.metadata", ".metadata"),
)


@contextmanager
def published(out: Path, *, is_folder: bool, overwrite: bool) -> Iterator[Path]:
    """A new path to write to. At the end it is fsynced and becomes `out`.

    With `overwrite` a file is replaced; in a folder an older export is replaced, and other files stay.
    Raises:
        UsageError: `out` exists and may not be replaced; nothing was changed.
    """
    out = Path(os.path.abspath(out))
    _check(out, is_folder=is_folder, overwrite=overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _part_folder(out) as part:
        yield part if is_folder else part / out.name
        for path in (*part.iterdir(), part):
            _sync(path)
        if not is_folder:
            os.replace(part / out.name, out)
        else:
            if not out.exists():
                with suppress(OSError):  # another process has made it by now
                    os.replace(part, out)
            if part.exists():
                _move_into(part, out)
        _sync(out.parent)


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


@contextmanager
def _part_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, locked while it is in use. Those of killed exports are removed."""
    for old in out.parent.glob(f".{escape(out.name)}.part-????????"):
        lock = _lock(old)
        if lock is not None:
            discard(old)
            os.close(lock)
    lock = None
    while lock is None:  # another process may take a new folder for that of a killed export
        part = out.parent / f".{out.name}.part-{secrets.token_hex(4)}"
        part.mkdir()
        lock = _lock(part)
    try:
        yield part
    finally:
        discard(part)
        os.close(lock)


def _lock(path: Path) -> int | None:
    """The descriptor that holds the lock; None: another process has it, or removed the folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    if try_lock(descriptor) is not False:  # None: the file system has no locks
        return descriptor
    os.close(descriptor)
    return None


def _move_into(part: Path, out: Path) -> None:
    new = {path.name for path in part.iterdir()}
    pattern, entry = next(
        family for family in FAMILIES if any(re.fullmatch(family[0], name) for name in new)
    )
    entries = {entry, f"{entry}.index.json"}
    for name in entries if new - entries else ():
        (out / name).unlink(missing_ok=True)
    for names in (new - entries, new & entries):
        _sync(out)
        for name in names:
            os.replace(part / name, out / name)
    _sync(out)
    for path in out.iterdir():
        if re.fullmatch(pattern, path.name) and path.name not in new:
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
