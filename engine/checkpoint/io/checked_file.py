"""Reads the parts of a checkpoint file that a rank needs, and verifies their checksums.

    chunks     |--------|--------|--------|--------|      each has its checksum in the manifest
    wanted         |~~~~~~~~~~~~~~~~~~~~|                  every chunk with a wanted byte is read, whole
    read       [   buffer   |   direct  | buffer]         directly to the receiver where all of it is wanted

New tensors are filled while they are checked. Live tensors are checked first, and filled after every rank has
verified its part: the second read comes from the page cache.
"""

from __future__ import annotations

import resource
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ....ops.device import current_streams, use_streams
from ....ops.weights.tensor_table import Located, read_header, shown
from ....utils.errors import DamagedError
from ....zero.checkpoint.ranges import Copy
from ....zero.layout.slices import StridedRuns, clipped
from ..manifest import FileRecord, Manifest, check_tensors
from .storage import OldFile, storage_of
from .tensor_file import bytes_of

SEGMENT_BYTES = 1 << 20  # read at a time, or one chunk
CHECK_BYTES = 16 << 20  # whole chunks, for all threads
SumOf = Callable[[memoryview], int]
READERS = 2  # threads: one reads while another sums
# files; the least recently used one is closed. An open file stays when another process removes the checkpoint
MAX_OPEN = max(64, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 4096))


@dataclass(frozen=True, eq=False)
class _Span:
    """Bytes [start, stop) of the file, elements of `dtype`, for `target`; None: they are only checked.

    runs: the elements that are wanted, from element 0 of the span, and their places in `target`; None: all.
    """

    start: int
    stop: int
    dtype: torch.dtype
    target: Tensor | None
    runs: StridedRuns | None = None

    def memory(self, low: int, high: int) -> Tensor | None:
        """The target's memory for bytes [low, high) of the file; None: they need a copy or a cast."""
        target = self.target
        if target is None or self.runs is not None or not self.start <= low < high <= self.stop:
            return None
        if target.device.type != "cpu" or target.dtype != self.dtype:
            return None
        return target.view(torch.uint8)[low - self.start : high - self.start]

    @torch.inference_mode()  # of this thread; the receiver may be made in this mode
    def deliver(self, data: Tensor, begin: int) -> None:
        """Copy the wanted elements in `data`, bytes of the file from `begin` on, to the target."""
        low, high = max(begin, self.start), min(begin + len(data), self.stop)
        if self.target is None or low >= high:
            return
        size = self.dtype.itemsize
        first, last = (low - self.start) // size, (high - self.start) // size
        values = data[low - begin : high - begin].view(self.dtype)
        if self.runs is None:
            self.target[first:last].copy_(values)
            return
        for part in clipped(self.runs, first, last):
            shape, offset = (part.count, part.numel), int(self.target.storage_offset())
            out = self.target.as_strided(shape, (part.there_step, 1), offset + part.there)
            source = int(values.storage_offset()) + part.here - first
            out.copy_(values.as_strided(shape, (part.here_step, 1), source))


@final
class CheckedFile:
    """One file of a checkpoint. `table`: its tensors; `read_bytes`: the bytes read from it.

    Raises:
        DamagedError: the file is missing, its length or a checksum differs from the manifest, or the disk
            cannot read it.
    """

    def __init__(
        self, folder: Path, record: FileRecord, pool: Executor, sum_of: SumOf = zlib.crc32
    ) -> None:
        """`pool` reads and sums; many files can share it. sum_of: the checksum of a chunk."""
        self.path = folder / record.path
        self.read_bytes = 0
        self._record = record
        self._pool, self._sum_of = pool, sum_of
        self._file: OldFile | None = None
        self._buffers = threading.local()
        self._kept: tuple[int, Tensor | None] = (-1, None)
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _open(self) -> OldFile:
        """The open file."""
        if self._file is None:
            try:
                self._file = storage_of(self.path).open(self.path)
            except FileNotFoundError:
                raise DamagedError(f"{self.path} is missing: the checkpoint is damaged") from None
            except OSError as error:  # such as a link to itself, or a socket
                raise DamagedError(
                    f"{self.path} cannot be opened ({error.strerror}): the checkpoint is damaged"
                ) from None
        return self._file

    def free_buffers(self) -> None:
        """Free the memory of what was read last."""
        self._buffers = threading.local()
        self._kept = (-1, None)

    def close(self) -> None:
        """Close the file until it is read again; does nothing if it is closed."""
        self.free_buffers()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read_header(self) -> None:
        size, expected = self._open().size_bytes, self._record.size_bytes
        if size != expected:
            raise DamagedError(
                f"{self.path} has {size} bytes and should have {expected}: the checkpoint is damaged"
            )
        try:
            self.table, self._data_at = read_header(self._bytes, size)
        except ValueError as error:
            raise DamagedError(f"{self.path} contradicts itself: {error}") from None
        for name, there in self.table.items():
            if there.numel and (self._data_at + there.start) % there.dtype.itemsize:
                raise DamagedError(
                    f"{self.path} contradicts itself: {shown(name)} begins at an unaligned byte"
                )

    # -- what is wanted ---------------------------------------------------------------------------------

    def read(self, copies: Iterable[tuple[Copy, Tensor | None]], *, sums: bool = True) -> None:
        """Check everything that the copies read, and perform those with a receiver.

        Elements are cast to the receiver's dtype. sums: False if the same was checked before.
        """
        self._read_spans([self._span(copy, receiver) for copy, receiver in copies], sums)

    def check(self, on_read: Callable[[int], None]) -> None:
        """Check every byte. `on_read` is called with the bytes of each piece."""
        size_bytes = self._record.size_bytes
        for start in range(0, size_bytes, CHECK_BYTES):
            stop = min(start + CHECK_BYTES, size_bytes)
            self._read_spans([_Span(start, stop, torch.uint8, None)], sums=True)
            on_read(stop - start)

    def tensor(self, name: str) -> Tensor:
        """One whole tensor, checked, on the CPU."""
        there = self._entry(name)
        out = torch.empty(there.shape, dtype=there.dtype)
        self.read([(Copy(0, name, "", 0, 0, out.numel()), out.view(-1))])
        return out

    def _bytes(self, start: int, size: int) -> bytes:
        """`size` bytes from `start`, checked."""
        out = torch.empty(size, dtype=torch.uint8)
        self._read_spans([_Span(start, start + size, torch.uint8, out)], sums=True)
        return bytes(bytes_of(out))

    def _entry(self, name: str) -> Located:
        if name not in self.table:
            raise DamagedError(
                f"{self.path} has no tensor {shown(name)}: the checkpoint contradicts itself"
            )
        return self.table[name]

    def _span(self, copy: Copy, receiver: Tensor | None) -> _Span:
        there = self._entry(copy.tensor)
        dtype = there.dtype
        start = self._data_at + there.start + copy.source * dtype.itemsize
        stop = start + copy.source_numel * dtype.itemsize
        if stop > self._data_at + there.stop:
            raise DamagedError(
                f"{self.path}: {shown(copy.tensor)} is shorter than the manifest says: the checkpoint "
                "contradicts itself"
            )
        if copy.count > 1:
            return _Span(start, stop, dtype, receiver, replace(copy.runs, here=0))
        target = None if receiver is None else receiver[copy.target : copy.target + copy.numel]
        return _Span(start, stop, dtype, target)

    # -- reading and summing ----------------------------------------------------------------------------

    def _read_spans(self, spans: list[_Span], sums: bool) -> None:
        """Read in the pool. The last chunk is kept: the next small tensor is often in it, too."""
        opened, size = self._open(), self._record.chunk_bytes
        number, kept = self._kept
        futures: list[Future[int]] = []
        targets = [span.target for span in spans if span.target is not None]
        streams = current_streams(target.device for target in targets)
        try:
            for first, last, wanted in self._segments(spans):
                if kept is not None and (first, last) == (number, number + 1):
                    for span in wanted:
                        span.deliver(kept, first * size)
                else:
                    job = (opened, first, last, wanted, sums, streams)
                    futures.append(self._pool.submit(self._read_chunks, *job))
            for future in futures:
                self.read_bytes += future.result()
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # they use the file and the receivers

    def _segments(self, spans: list[_Span]) -> Iterator[tuple[int, int, list[_Span]]]:
        """Chunks [first, last) that are read at once, and the spans with bytes in them."""
        size = self._record.chunk_bytes
        by_chunk: dict[int, list[_Span]] = {}
        for span in spans:
            for chunk in range(span.start // size, -(-span.stop // size)):
                by_chunk.setdefault(chunk, []).append(span)
        most = max(SEGMENT_BYTES // size, 1)
        chunks = sorted(by_chunk)
        position = 0
        while position < len(chunks):
            end = position + 1
            while (
                end < len(chunks) and end - position < most and chunks[end] == chunks[end - 1] + 1
            ):
                end += 1
            here = dict.fromkeys(span for chunk in chunks[position:end] for span in by_chunk[chunk])
            yield chunks[position], chunks[end - 1] + 1, list(here)
            position = end

    def _read_chunks(
        self,
        opened: OldFile,
        first: int,
        last: int,
        spans: list[_Span],
        sums: bool,
        streams: list[torch.Stream],
    ) -> int:
        """Read chunks [first, last), check them, and deliver them to `spans`; the number of bytes."""
        use_streams(streams)
        size = self._record.chunk_bytes
        low, high = first * size, min(last * size, self._record.size_bytes)
        memory = spans[0].memory(low, high) if len(spans) == 1 else None
        data = self._buffer(high - low) if memory is None else memory
        view = bytes_of(data)
        try:
            count = opened.fill(view, low)
        except OSError as error:  # a bad sector
            raise DamagedError(f"{self.path} cannot be read: {error}") from error
        if count < len(view):
            raise DamagedError(f"{self.path} ends too early: the checkpoint is damaged")
        for number in range(first, last) if sums else ():
            begin = (number - first) * size
            if self._sum_of(view[begin : begin + size]) != self._record.crc32[number]:
                stop = min(low + begin + size, high)
                raise DamagedError(
                    f"{self.path} is damaged: bytes {low + begin} to {stop} do not match their checksum; load "
                    "another checkpoint"
                )
        if memory is None:
            for span in spans:
                span.deliver(data, low)
            if sums and max(span.stop for span in spans) <= high:
                self._kept = last - 1, data[(last - 1 - first) * size :].clone()
        return high - low

    def _buffer(self, size_bytes: int) -> Tensor:
        """Memory of this thread: fresh memory for each segment would cost more than the reading."""
        held = vars(self._buffers).get("held")
        if held is None or len(held) < size_bytes:
            held = self._buffers.held = torch.empty(size_bytes, dtype=torch.uint8)
        return held[:size_bytes]


@final
class CheckedFiles:
    """The files of one checkpoint, opened when they are first used, and a pool of threads for them."""

    def __init__(self, folder: Path, manifest: Manifest, sum_of: SumOf = zlib.crc32) -> None:
        """sum_of: the checksum of a chunk."""
        self._folder, self._manifest, self._sum_of = folder, manifest, sum_of
        self._pool = ThreadPoolExecutor(READERS)
        self._files: dict[int, CheckedFile] = {}  # open files, the least recently used first

    def __getitem__(self, number: int) -> CheckedFile:
        """The file of rank `number`. Raises DamagedError: it is damaged, or does not match the manifest."""
        file = self._files.pop(number, None)
        if file is None:
            if len(self._files) >= MAX_OPEN:
                self._files.pop(next(iter(self._files))).close()
            record = self._manifest.files[number]
            file = CheckedFile(self._folder, record, self._pool, self._sum_of)
            try:
                check_tensors(self._manifest, number, file.table)
            except ValueError as error:
                file.close()
                raise DamagedError(f"{file.path} contradicts its manifest.json: {error}") from None
        self._files[number] = file
        return file

    def close(self) -> None:
        """Close all files and end the threads."""
        while self._files:
            self._files.popitem()[1].close()
        self._pool.shutdown()

    def __enter__(self) -> CheckedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["CheckedFile", "CheckedFiles"]
