"""Writing a file: the same bytes and sums whatever the length, the pieces, and the system's mood."""

from __future__ import annotations

import errno
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from xds.engine.checkpoint.io import storage
from xds.engine.checkpoint.io import tensor_file as writer

BLOCK = writer.BLOCK_BYTES
LENGTHS = (0, 4096, storage.MIN_DIRECT_BYTES - 1, 3 * BLOCK + 5)


def pieces_of(content: bytes, seed: int) -> Iterator[memoryview]:
    """Each is overwritten once the next is asked for, as a reused buffer would be."""
    rng, at = random.Random(seed), 0
    while at < len(content):
        size = rng.choice([1, 100, 5000, 1 << 20, BLOCK + 1])
        piece = bytearray(content[at : at + size])
        yield memoryview(piece)
        piece[:] = b"x" * len(piece)
        at += size


def write(path: Path, size_bytes: int, pieces: Iterable[memoryview]) -> writer.Sums:
    with ThreadPoolExecutor(writer.DEPTH) as pool:
        return writer.write_blocks(path, size_bytes, writer.packed(pieces, size_bytes), pool)


def check(path: Path, content: bytes) -> None:
    crcs = write(path, len(content), pieces_of(content, len(content))).crc32
    assert path.read_bytes() == content
    chunk_bytes = writer.chunk_bytes_of(len(content))
    starts = range(0, len(content), chunk_bytes)
    assert list(crcs) == [zlib.crc32(content[at : at + chunk_bytes]) for at in starts]


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_is_written_and_summed(tmp_path: Path, length: int) -> None:
    check(tmp_path / "file", os.urandom(length))


def patched(
    monkeypatch: pytest.MonkeyPatch, pwrite: Callable[..., int]
) -> Callable[[int, Any, int], int]:
    original = os.pwrite
    monkeypatch.setattr(storage.os, "pwrite", pwrite)
    return original


@pytest.mark.parametrize("most_bytes", [1 << 20, 1001])
def test_writes_that_are_cut_short_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    rng = random.Random(0)

    def short(fd: int, part: Any, at: int) -> int:
        rest = most_bytes if most_bytes > 4096 or rng.random() < 0.9 else len(part)
        return original(fd, part[: max(rest, len(part) // 50)], at)

    original = patched(monkeypatch, short)
    check(tmp_path / "file", os.urandom(2 * BLOCK + 4097))


def test_a_file_system_without_direct_writes_is_written_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, open_file = [], os.open

    def refuse_to_open(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            opened.append(path)
            os.close(open_file(path, flags & ~os.O_DIRECT, mode))
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, mode)

    def refuse_to_write(fd: int, part: Any, at: int) -> int:
        direct = getattr(os, "O_DIRECT", 0)
        if storage.fcntl.fcntl(fd, storage.fcntl.F_GETFL) & direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(fd, part, at)

    original = patched(monkeypatch, refuse_to_write)
    check(tmp_path / "when it writes", os.urandom(BLOCK + 5))
    monkeypatch.setattr(storage.os, "open", refuse_to_open)
    check(tmp_path / "when it opens", os.urandom(BLOCK + 5))
    assert opened == [tmp_path / "when it opens"] or not hasattr(os, "O_DIRECT")


def test_a_file_that_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    for length in (10, BLOCK):
        with pytest.raises(FileExistsError):
            write(path, length, [memoryview(bytes(length))])
    assert path.read_bytes() == b"old"
