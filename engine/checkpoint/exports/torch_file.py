"""Writes a file that torch.load opens, without holding any tensor whole.

    torch.save without the tensors' bytes  ->  a zip archive with space for them  ->  each record is filled in

A record's offset and its CRC-32 follow the zip format, so `unzip` also accepts the file.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....utils.errors import XdsError

LOCAL_BYTES, CENTRAL_BYTES = 30, 46  # of the fixed part of a zip file's headers


@dataclass(frozen=True)
class _Record:
    """A tensor's bytes in the archive."""

    name: str
    start: int
    size_bytes: int


def write_torch_file(
    path: Path, tree: Any, bytes_of_tensor: Callable[[Tensor], Iterable[memoryview]]
) -> None:
    """Write `tree` (dicts, lists, tuples, plain values, contiguous CPU tensors) to a new file.

    The tensors' own memory is not read: `bytes_of_tensor` gives the bytes for the file.
    """
    tensors = list({id(tensor): tensor for tensor in _tensors(tree)}.values())
    with open(path, "xb") as file, torch.serialization.skip_data():
        torch.save(tree, file)
    records, directory_at = _records(path, len(tensors))
    _check_places(path, records)
    with open(path, "r+b", buffering=0) as file:
        sums = {}
        for tensor, record in zip(tensors, records, strict=True):
            sums[record.name] = _fill(file.fileno(), record, bytes_of_tensor(tensor))
        _write_sums(file.fileno(), directory_at, records, sums)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in the order in which pickle visits them."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)


def _records(path: Path, count: int) -> tuple[list[_Record], int]:
    """The records of the tensors, in pickle's order, and the offset of the archive's directory."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        root = archive.infolist()[0].filename.partition("/")[0]
        found = []
        for number in range(count):
            entry = archive.getinfo(f"{root}/data/{number}")
            file.seek(entry.header_offset)
            lengths = struct.unpack("<HH", file.read(LOCAL_BYTES)[26:30])
            start = entry.header_offset + LOCAL_BYTES + sum(lengths)
            found.append(_Record(entry.filename, start, entry.file_size))
        return found, archive.start_dir


def _check_places(path: Path, records: list[_Record]) -> None:
    """Check that torch reads every tensor from the offset at which it will be written."""
    mapped = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    loaded = list(
        {tensor.data_ptr(): tensor for tensor in _tensors(mapped) if tensor.numel()}.values()
    )
    full = [record for record in records if record.size_bytes]
    wrong = len(loaded) != len(full) or any(
        tensor.data_ptr() - loaded[0].data_ptr() != record.start - full[0].start
        or tensor.nbytes != record.size_bytes
        for tensor, record in zip(loaded, full, strict=True)
    )
    if wrong:
        raise XdsError(
            f"torch {torch.__version__} uses a file layout that this xds does not know; export to "
            "safetensors instead"
        )


def _fill(fd: int, record: _Record, pieces: Iterable[memoryview]) -> int:
    """Write the pieces of a record; returns their CRC-32."""
    at, crc = record.start, 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
        while piece:
            count = os.pwrite(fd, piece, at)
            piece, at = piece[count:], at + count
    assert at == record.start + record.size_bytes
    return crc


def _write_sums(fd: int, at: int, records: list[_Record], sums: Mapping[str, int]) -> None:
    """Write the checksums after the records, and into the archive's directory, which begins at `at`."""
    for record in records:
        behind = record.start + record.size_bytes
        if os.pread(fd, 4, behind) == b"PK\x07\x08":
            os.pwrite(fd, struct.pack("<I", sums[record.name]), behind + 4)
    while (head := os.pread(fd, CENTRAL_BYTES, at)).startswith(b"PK\x01\x02"):
        lengths = struct.unpack("<HHH", head[28:34])
        name = os.pread(fd, lengths[0], at + CENTRAL_BYTES).decode()
        if name in sums:
            os.pwrite(fd, struct.pack("<I", sums[name]), at + 16)
        at += CENTRAL_BYTES + sum(lengths)
