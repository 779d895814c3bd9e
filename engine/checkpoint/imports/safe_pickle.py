"""Reads files of torch.save without executing anything: unknown classes become stand-ins without code.

torch's weights-only reader builds tensors, numbers, text, lists, dicts, and classes on its allow list. Here
the list has an empty class for each unknown name, such as DeepSpeed's loss scaler, so that an object's fields
are read as data. torch refuses names of modules such as `os`.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from ....utils.errors import UsageError


class StandIn:
    """An object of a class that was not imported: the arguments it was made with and its fields."""

    name = ""
    arguments: tuple[Any, ...] = ()
    fields: Any = None

    def __new__(cls, *arguments: Any) -> StandIn:
        made = object.__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *_: Any) -> None:
        return

    def __setstate__(self, state: Any) -> None:
        self.fields = state


def read_pickle(path: Path) -> Any:
    """The object that torch.save wrote to `path`, on the CPU, its tensors mapped from the file.

    Memory:  only the structure; elements are read when they are used.
    Raises:
        UsageError: the file is of another kind or damaged, or names something that can be executed.
    """
    try:
        if not path.is_file() or not zipfile.is_zipfile(path):  # opening a pipe waits for a writer
            raise UsageError(
                f"{path} is not a file that torch.save wrote (or is cut off, or has the form of torch 1.5 and "
                "before): load it where it was made, and save it again"
            )
        with zipfile.ZipFile(path) as archive:
            _refuse_bomb(path, archive)
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    if damaged is not None:
        raise UsageError(
            f"{path} is damaged: {damaged} in it does not match its checksum; use another copy, or, if it "
            "was saved without checksums (set_crc32_options), load it and save it again with checksums"
        )
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stand_ins = [(type(name, (StandIn,), {"name": name}), name) for name in names]
        with torch.serialization.safe_globals(stand_ins):  # type: ignore[arg-type]
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{path} cannot be read without executing it: {reason}") from None
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, EOFError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{path} is damaged: {type(error).__name__}: {reason}") from None


def _refuse_bomb(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse compressed archives: torch.save compresses nothing, so content never exceeds the file size."""
    entries = archive.infolist()
    is_packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    size_bytes = path.stat().st_size
    if (
        is_packed
        or sum(max(entry.file_size, entry.compress_size) for entry in entries) > size_bytes
    ):
        raise UsageError(
            f"{path} is compressed, or its parts overlap: torch.save does neither, and such a file can unpack "
            "to any size; it is not read. Load it where it was made, and save it again"
        )
