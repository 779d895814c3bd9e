"""Writes a file that torch.load opens, without holding any tensor whole.

    torch.save without the tensors' bytes  ->  a zip archive with space for them  ->  each record is filled in

torch maps the file to show where it will read each tensor. The records' CRC-32 are written too, so `unzip`
accepts the file.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....utils.errors import XdsError

LOCAL_BYTES, CENTRAL_BYTES = 30, 46  # of the fixed part of a zip file's headers
SUM_FOLLOWS = b"PK\x07\x08"


def write_torch_file(
    path: Path, tree: Any, bytes_of_tensor: Callable[[Tensor], Iterable[memoryview]]
) -> None:
    """Write `tree` (dicts, lists, tuples, plain values, contiguous CPU tensors) to a new file.

    The tensors' own memory is not read: `bytes_of_tensor` gives the bytes for the file.
    """
    with open(path, "xb") as file, torch.serialization.skip_data():
        torch.save(tree, file)
    mapped = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    pairs = zip(_tensors(tree), _tensors(mapped), strict=True)
    pointers = [(tensor, there.data_ptr()) for tensor, there in pairs if there.numel()]
    with open(path, "r+b", buffering=0) as file:
        records, done = _records(path, file.fileno()), set()
        # where the file begins in memory: the first tensor is the first record
        begin = min((pointer for _, pointer in pointers), default=0) - min(records, default=0)
        for tensor, pointer in pointers:
            offset = pointer - begin
            size_bytes, sums_at = records.get(offset, (-1, []))
            if size_bytes != tensor.nbytes:
                raise XdsError(
                    f"torch {torch.__version__} uses a file layout that this xds does not know; export to "
                    "safetensors instead"
                )
            if offset not in done:  # tied tensors have one place
                done.add(offset)
                crc = struct.pack("<I", _fill(file.fileno(), offset, bytes_of_tensor(tensor)))
                for place in sums_at:
                    os.pwrite(file.fileno(), crc, place)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(value)


def _records(path: Path, fd: int) -> dict[int, tuple[int, list[int]]]:
    """The size of each tensor's record in the archive, by its place, and the places of its CRC-32."""
    with zipfile.ZipFile(path) as archive:
        entry_offset, entries = archive.start_dir, archive.infolist()
    sizes = {}
    for entry in entries:
        lengths = struct.unpack("<HH", os.pread(fd, LOCAL_BYTES, entry.header_offset)[26:])
        start = entry.header_offset + LOCAL_BYTES + sum(lengths)
        behind = start + entry.file_size
        has_sum = os.pread(fd, len(SUM_FOLLOWS), behind) == SUM_FOLLOWS
        if "/data/" in entry.filename and entry.file_size:
            sizes[start] = (
                entry.file_size,
                [entry_offset + 16, *([behind + 4] if has_sum else [])],
            )
        entry_offset += CENTRAL_BYTES + sum(
            struct.unpack("<HHH", os.pread(fd, 6, entry_offset + 28))
        )
    return sizes


def _fill(fd: int, offset: int, pieces: Iterable[memoryview]) -> int:
    """Write the pieces from byte `offset`; returns their CRC-32."""
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
        while piece:
            count = os.pwrite(fd, piece, offset)
            piece, offset = piece[count:], offset + count
    return crc
