"""Reads all of a checkpoint and says what is wrong with it: sums, lengths, ranges, elements that nobody has."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...ops.errors import DamagedError, UsageError
from ...ops.flat import numel_of
from .folders import MANIFEST
from .format import FileRecord, unpack
from .reader import CheckpointReader
from .tensor_file import TORCH_DTYPES

MAX_NAMES = 20  # of a sentence


def size_bytes(reader: CheckpointReader) -> int:
    """Of all files but the manifest."""
    return sum(record.size_bytes for record in reader.manifest.files)


def damage(reader: CheckpointReader, on_read: Callable[[int], None]) -> Iterator[str]:
    """A sentence for each file that is not as it was written, and for elements that are in none.

    Memory: one chunk. `on_read` is told the bytes of each.
    """
    for number, record in enumerate(reader.manifest.files):
        path = reader.folder / record.path
        try:
            _check_sums(path, record, on_read)
            table = _read_table(path)
            for one in record.ranges:
                _check_tensor(path, table, one.tensor, one.stop - one.start, one.dtype)
            _check_values(path, table, record.own)
            if number == 0:
                _check_values(path, table, reader.manifest.state)
        except (UsageError, OSError) as error:
            yield str(error)
    names = reader.uncovered()
    if names:
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        yield (
            f"{reader.folder / MANIFEST} contradicts itself: elements of {', '.join(names[:MAX_NAMES])}{more} "
            "are in no file"
        )


def _check_sums(path: Path, record: FileRecord, on_read: Callable[[int], None]) -> None:
    if not path.exists():
        raise DamagedError(f"{path} is missing")
    size = path.stat().st_size
    if size != record.size_bytes:
        raise DamagedError(f"{path} has {size} bytes and should have {record.size_bytes}")
    wrong = []
    with open(path, "rb", buffering=0) as file:
        for number, expected in enumerate(record.crc32):
            chunk = _read(file, record.chunk_bytes)
            if zlib.crc32(chunk) != expected:
                wrong.append(number)
            on_read(len(chunk))
    if wrong:
        start = wrong[0] * record.chunk_bytes
        stop = min(start + record.chunk_bytes, record.size_bytes)
        others = f", and of {len(wrong) - 1} more chunks" if len(wrong) > 1 else ""
        raise DamagedError(
            f"{path} is damaged: the sum of bytes {start} to {stop}{others} is another"
        )


def _read(file: Any, size: int) -> bytes:
    parts = []
    while size:
        part = file.read(size)
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _read_table(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        table: dict[str, Any] = json.loads(file.read(length))
        return table


def _check_tensor(path: Path, table: dict[str, Any], name: str, numel: int, dtype: str) -> None:
    entry = table.get(name)
    if entry is None:
        raise DamagedError(f"{path} has no tensor {name!r}: the checkpoint contradicts itself")
    there = str(TORCH_DTYPES[entry["dtype"]]).removeprefix("torch.")
    if numel_of(tuple(entry["shape"])) != numel or there != dtype:
        raise DamagedError(
            f"{path}: {name!r} is {entry['shape']} {there} and should be [{numel}] {dtype}: the checkpoint "
            "contradicts itself"
        )


def _check_values(path: Path, table: dict[str, Any], packed: Any) -> None:
    """Every tensor that a JSON value names is in the file."""

    def get(name: str) -> Tensor:
        if name not in table:
            raise DamagedError(f"{path} has no tensor {name!r}: the checkpoint contradicts itself")
        return torch.empty(0)

    unpack(packed, get)
