"""A file or folder that is there whole or not at all: written under another name, fsynced, renamed.

write    .<name>.part-1a2b3c4d        removed when writing fails; left by a kill, the next one removes it
publish  .<name>.part-1a2b3c4d -> <name>
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...ops.errors import UsageError

# what an older export in the same folder is made of; anything else there is kept
WEIGHTS = re.compile(
    r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)"
    r"|(model\.safetensors|pytorch_model\.bin)\.index\.json|.*\.distcp|\.metadata"
)


@contextmanager
def published(out: Path, *, is_folder: bool, overwrite: bool) -> Iterator[Path]:
    """A fresh path beside `out` to write to. In the end it is made durable and becomes `out`.

    With `overwrite` a file is replaced, and the weights in a folder; its other files (config.json) stay.
    Raises:
        UsageError: `out` is there and may not be replaced; nothing was changed.
    """
    out = Path(os.path.abspath(out))
    _check(out, is_folder=is_folder, overwrite=overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    for old in out.parent.glob(f".{out.name}.part-????????"):
        _remove(old)
    part = _hidden(out)
    try:
        if is_folder:
            part.mkdir()
        yield part
        if is_folder and out.exists():
            _carry_over(out, part)
        _sync(part)
        _replace(part, out)
    finally:
        _remove(part)


def _check(out: Path, *, is_folder: bool, overwrite: bool) -> None:
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise UsageError(f"{out} exists; choose another name, or replace it with --overwrite")
    if out.is_dir() != is_folder:
        kinds = ("a folder", "a file") if out.is_dir() else ("a file", "a folder")
        raise UsageError(
            f"{out} is {kinds[0]}, and {kinds[1]} is to be written; choose another name"
        )
    inner = [path.name for path in out.iterdir() if path.is_dir()] if is_folder else []
    if inner:
        raise UsageError(
            f"{out} holds the folder {inner[0]}, so it is more than an export; choose another name"
        )


def _hidden(out: Path) -> Path:
    return out.parent / f".{out.name}.part-{secrets.token_hex(4)}"


def _carry_over(old: Path, new: Path) -> None:
    """Everything in `old` that is not weights is in `new`, too."""
    for path in old.iterdir():
        if WEIGHTS.fullmatch(path.name) or (new / path.name).exists():
            continue
        shutil.copy2(path, new / path.name, follow_symlinks=False)


def _replace(part: Path, out: Path) -> None:
    if part.is_dir() and out.exists():
        old = _hidden(out)  # a folder cannot be renamed over another
        os.rename(out, old)
        os.rename(part, out)
        _remove(old)
    else:
        os.replace(part, out)
    _sync_one(out.parent)


def _sync(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            if not inner.is_symlink():
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
