"""Reads files of torch.save without executing anything: unknown classes become stand-ins without code.

torch's weights-only reader builds tensors, numbers, text, lists, dicts, and classes on its allow list. Here
the list has an empty class for each unknown name, such as DeepSpeed's loss scaler, so that an object's fields
are read as data. torch refuses names of modules such as `os`.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from ...utils.errors import UsageError
from ...utils.quoting import printable


class UnpickledObject:
    """An object of a class that was not imported: the arguments it was made with and its fields."""

    name = ""
    arguments: tuple[Any, ...] = ()
    fields: Any = None

    def __new__(cls, *arguments: Any) -> UnpickledObject:
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
        OSError: the file cannot be opened.
    """
    try:
        _check_archive(path)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stand_ins = [(type(name, (UnpickledObject,), {"name": name}), name) for name in names]
        with torch.serialization.safe_globals(stand_ins):  # type: ignore[arg-type]
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (UsageError, FileNotFoundError, PermissionError):
        raise
    except UnpicklingError as error:
        reason = printable(str(error).partition("\n")[0])
        raise UsageError(f"{path} cannot be read without executing it: {reason}") from None
    except (
        Exception
    ) as error:  # what damage makes zipfile and torch raise is no fixed list; OSError too
        reason = printable(f"{type(error).__name__}: {error}".partition("\n")[0])
        raise UsageError(f"{path} is damaged: {reason}") from None


def _check_archive(path: Path) -> None:
    """Check that the file is the archive that torch.save writes, and its checksums. Raises UsageError."""
    if not path.is_file() or not zipfile.is_zipfile(path):  # opening a pipe waits for a writer
        raise UsageError(
            f"{path} is not a file that torch.save wrote (or is cut off, or has the form of torch 1.5 and "
            "before): load it where it was made, and save it again"
        )
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        is_packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        total_bytes = sum(max(entry.file_size, entry.compress_size) for entry in entries)
        if is_packed or total_bytes > path.stat().st_size:
            raise UsageError(
                f"{path} is compressed, or its parts overlap: torch.save does neither, and such a file can "
                "unpack to any size; it is not read. Load it where it was made, and save it again"
            )
        damaged = archive.testzip()
    if damaged is not None:
        raise UsageError(
            f"{path} is damaged: {printable(damaged)} in it does not match its checksum; use another copy, or, "
            "if it was saved without checksums (set_crc32_options), load it and save it again with checksums"
        )
