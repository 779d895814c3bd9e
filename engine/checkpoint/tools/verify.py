"""Verifies a whole checkpoint, by the same rules as a load.

The reader has checked the manifest when it parsed it. This module checks the checksums of all bytes, the
tensors of each file, and the values that are stored in tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ....utils.errors import UsageError
from ..hyperparameters import check_state_values
from ..io.folders import MANIFEST
from ..io.reader import CheckpointReader
from ..manifest import some_of
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
            file = reader.file(number)
            file.check(on_read)
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
