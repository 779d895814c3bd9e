"""Verifies a whole checkpoint, by the same rules as a load.

The reader has checked the manifest when it parsed it. This module checks the checksums of all bytes, the
tensors of each file, and the values that are stored in tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ....utils.errors import DamagedError, UsageError
from ..hyperparameters import check_state_values
from ..io.folders import MANIFEST
from ..io.reader import CheckpointReader
from ..manifest import FileRecord, some_of
from ..packing import unpack
from ..random_state import check_random_state


def size_bytes(reader: CheckpointReader) -> int:
    """The bytes of all files in the folder except the manifest."""
    return sum(record.size_bytes for record in reader.manifest.files)


def damage(reader: CheckpointReader, on_read: Callable[[int], None]) -> Iterator[str]:
    """A message for each damaged file, and one for elements that are in no file.

    Memory: one chunk. `on_read` is called with the bytes of each chunk.
    """
    for number, record in enumerate(reader.manifest.files):
        path = reader.folder / record.path
        try:
            _check_sums(path, record, on_read)
            file = reader.file(number)
            if random := record.own.get("random"):
                check_random_state(unpack(random, file.tensor), str(path))
        except (UsageError, OSError) as error:
            yield str(error)
    manifest = reader.folder / MANIFEST
    if names := reader.lacking():
        yield f"{manifest} contradicts itself: elements of {some_of(names)} are in no file"
    try:
        check_state_values(reader.state())
    except ValueError as error:
        yield f"{manifest} contradicts itself: {error}"
    except (UsageError, OSError):
        pass  # its file was named above


def _check_sums(path: Path, record: FileRecord, on_read: Callable[[int], None]) -> None:
    if not path.exists():
        raise DamagedError(f"{path} is missing")
    size = path.stat().st_size
    if size != record.size_bytes:
        raise DamagedError(f"{path} has {size} bytes and should have {record.size_bytes}")
    wrong = []
    with open(path, "rb") as file:
        for number, expected in enumerate(record.crc32):
            chunk = file.read(record.chunk_bytes)
            if zlib.crc32(chunk) != expected:
                wrong.append(number)
            on_read(len(chunk))
    if wrong:
        start = wrong[0] * record.chunk_bytes
        stop = min(start + record.chunk_bytes, record.size_bytes)
        others = f", and of {len(wrong) - 1} more chunks" if len(wrong) > 1 else ""
        raise DamagedError(
            f"{path} is damaged: the checksum of bytes {start} to {stop}{others} does not match"
        )
