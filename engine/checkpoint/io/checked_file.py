"""Reads the parts of a checkpoint file that a rank needs, and verifies their checksums.

    chunks     |--------|--------|--------|--------|      each has its checksum in the manifest
    wanted         |~~~~~~~~~~~~~~~~~~~~|
                   edge | direct        | edge            the chunk of an edge is read whole, its part is copied

New tensors are filled while they are checked. Live tensors are checked first, and filled after every rank has
verified its part: the second read comes from the page cache.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ....utils.errors import DamagedError
from ....zero.checkpoint.ranges import Copy
from ....zero.core.boxes import Runs, clipped
from ..manifest import FileRecord
from .tensor_file import bytes_of
from .tensor_table import Located, read_header, shown

SEGMENT_BYTES = 1 << 20  # read at a time; the next one is read while this one is summed
MAX_PENDING = 16  # segments that wait to be summed
AHEAD_BYTES = 16 << 20  # how far ahead reads are requested
ADVISE_BYTES = 4 << 20  # in pieces of this size


@dataclass(frozen=True, eq=False)
class _Span:
    """Bytes [start, stop) of the file, elements of `dtype`, for `target`; None: they are only checked.

    runs: the elements that are wanted, from element 0 of the span, and their places in `target`; None: all.
    """

    start: int
    stop: int
    dtype: torch.dtype
    target: Tensor | None
    runs: Runs | None = None

    def deliver(self, found: Tensor, low: int, high: int) -> None:
        """Copy `found` [high - low], bytes [low, high) of the file, to the target."""
        if self.target is None:
            return
        size = self.dtype.itemsize
        first, last = (low - self.start) // size, (high - self.start) // size
        values = found.view(self.dtype)
        if self.runs is None:
            self.target[first:last].copy_(values)
            return
        for part in clipped(self.runs, first, last):
            shape = (part.count, part.numel)
            out = self.target.as_strided(
                shape, (part.there_step, 1), int(self.target.storage_offset()) + part.there
            )
            at = int(values.storage_offset()) + part.here - first
            out.copy_(values.as_strided(shape, (part.here_step, 1), at))


@final
class CheckedFile:
    """One file of a checkpoint. `table`: its tensors; `read_bytes`: the bytes read from it.

    Raises:
        DamagedError: the file is missing, its length or a checksum differs from the manifest, or the disk
            cannot read it.
    """

    def __init__(self, folder: Path, record: FileRecord, pool: Executor) -> None:
        """`pool` computes checksums; many files can share it."""
        self.path = folder / record.path
        self.read_bytes = 0
        self._record = record
        self._chunk_bytes = record.chunk_bytes
        self._pool = pool
        self._fd = -1
        self._edge: tuple[int, Tensor | None] = (-1, None)  # the last chunk that was read whole
        self._ring: deque[Tensor] = deque()
        self._advised = self._wanted = (
            0  # ends of the requested read-ahead, and of the wanted bytes
        )
        self._pending: deque[Future[int | None]] = deque()
        self._open()
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        try:
            # without O_NONBLOCK opening a pipe waits for a writer; its length is 0
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            raise DamagedError(f"{self.path} is missing: the checkpoint is damaged") from None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the closed file inside the context. A load opens few files at a time."""
        self._open()
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """Close the file and free all memory; does nothing if it is closed."""
        for future in self._pending:
            future.result()  # it reads memory that may be freed after this
        self._pending.clear()
        self._ring.clear()
        self._edge = (-1, None)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read_header(self) -> None:
        size, expected = os.fstat(self._fd).st_size, self._record.size_bytes
        if size != expected:
            raise DamagedError(
                f"{self.path} has {size} bytes and should have {expected}: the checkpoint is damaged"
            )
        try:
            self.table, self._data_at = read_header(self._checked, size)
        except ValueError as error:
            raise DamagedError(f"{self.path} contradicts itself: {error}") from None
        for name, there in self.table.items():
            if there.numel and (self._data_at + there.start) % there.dtype.itemsize:
                raise DamagedError(
                    f"{self.path} contradicts itself: {shown(name)} begins at an unaligned byte"
                )

    # -- reading for a load -----------------------------------------------------------------------------

    def check(self, copies: Iterable[tuple[Copy, Tensor | None]]) -> None:
        """Check everything that the copies read; copies with a receiver are also performed."""
        spans = sorted(
            (self._span(copy, receiver) for copy, receiver in copies), key=lambda span: span.start
        )
        for number, span in enumerate(spans):
            if span.start >= self._wanted:
                self._advised = span.start
                self._wanted = self._end_of_run(spans, number)
            self._take(span)
        self._settle()

    def fill(self, receiver: Tensor, copy: Copy) -> None:
        """Perform a checked `copy`; elements are cast to the receiver's dtype."""
        span = self._span(copy, receiver)
        memory = _memory_of(span)
        if memory is not None:
            self._read(span.start, bytes_of(memory))
            return
        buffer = torch.empty(SEGMENT_BYTES, dtype=torch.uint8)
        for at in range(span.start, span.stop, SEGMENT_BYTES):
            stop = min(at + SEGMENT_BYTES, span.stop)
            here = buffer[: stop - at]
            self._read(at, bytes_of(here))
            span.deliver(here, at, stop)

    def tensor(self, name: str) -> Tensor:
        """One whole tensor, checked, on the CPU."""
        there = self._entry(name)
        out = torch.empty(there.shape, dtype=there.dtype)
        self.check([(Copy(0, name, "", 0, 0, out.numel()), out.view(-1))])
        return out

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

    def _read(self, start: int, view: memoryview) -> None:
        """Fill `view` with the file's bytes from `start`."""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], start + done)
            except OSError as error:  # a bad sector
                raise DamagedError(f"{self.path} cannot be read: {error}") from error
            if count == 0:
                raise DamagedError(f"{self.path} ends too early: the checkpoint is damaged")
            done += count
        self.read_bytes += done

    def _end_of_run(self, spans: list[_Span], number: int) -> int:
        """The position of the first gap of a chunk or more after span `number`."""
        stop = spans[number].stop
        for span in spans[number + 1 :]:
            if span.start > stop + self._chunk_bytes:
                break
            stop = max(stop, span.stop)
        return stop

    def _advise_ahead(self, at: int) -> None:
        """Request read-ahead from the system: the disk then works while checksums are computed."""
        stop = min(at + AHEAD_BYTES, self._wanted)
        if stop - self._advised >= ADVISE_BYTES or (stop == self._wanted > self._advised):
            os.posix_fadvise(self._fd, self._advised, stop - self._advised, os.POSIX_FADV_WILLNEED)
            self._advised = stop

    def _checked(self, start: int, size: int) -> bytes:
        """`size` bytes from `start`, checked: for the header."""
        out = torch.empty(size, dtype=torch.uint8)
        self._take(_Span(start, start + size, torch.uint8, out))
        self._settle()
        return bytes(bytes_of(out))

    def _take(self, span: _Span) -> None:
        size = self._chunk_bytes
        if span.start == span.stop:
            return
        inner = -(-span.start // size) * size
        outer = span.stop if span.stop == self._record.size_bytes else span.stop // size * size
        if outer <= inner:  # the span is within one chunk, or two
            inner = outer = min(inner, span.stop)
        at = span.start
        if at < inner:
            self._take_edge(span, at, inner)
        self._take_chunks(span, inner, outer)
        if outer < span.stop:
            self._take_edge(span, outer, span.stop)

    def _take_edge(self, span: _Span, low: int, high: int) -> None:
        """Read bytes [low, high) of one chunk; the chunk is kept for the next span."""
        number = low // self._chunk_bytes
        first = number * self._chunk_bytes
        kept, here = self._edge
        if here is None or kept != number:
            length = min(self._chunk_bytes, self._record.size_bytes - first)
            here = torch.empty(length, dtype=torch.uint8)
            self._read(first, bytes_of(here))
            self._refuse(_wrong(here, self._record.crc32, number, self._chunk_bytes))
            self._edge = (number, here)
        span.deliver(here[low - first : high - first], low, high)

    def _take_chunks(self, span: _Span, low: int, high: int) -> None:
        """Read whole chunks, bytes [low, high) of the file, directly into the target's memory if possible."""
        step = max(SEGMENT_BYTES // self._chunk_bytes, 1) * self._chunk_bytes
        memory = _memory_of(span)
        for at in range(low, high, step):
            stop = min(at + step, high)
            if memory is not None:
                self._fetch(at, memory[at - span.start : stop - span.start])
            else:
                here = self._next_buffer(step)[: stop - at]
                self._fetch(at, here)
                span.deliver(here, at, stop)

    def _next_buffer(self, size: int) -> Tensor:
        """The least recently used buffer: no checksum of its content is pending."""
        while len(self._ring) <= MAX_PENDING:
            self._ring.append(torch.empty(size, dtype=torch.uint8))
        self._ring.rotate(-1)
        return self._ring[-1]

    def _fetch(self, at: int, memory: Tensor) -> None:
        self._advise_ahead(at)
        self._read(at, bytes_of(memory))
        while len(self._pending) >= MAX_PENDING:
            self._refuse(self._pending.popleft().result())
        first = at // self._chunk_bytes
        self._pending.append(
            self._pool.submit(_wrong, memory, self._record.crc32, first, self._chunk_bytes)
        )

    def _settle(self) -> None:
        """Wait for all pending checksums."""
        while self._pending:
            self._refuse(self._pending.popleft().result())

    def _refuse(self, number: int | None) -> None:
        if number is not None:
            start = number * self._chunk_bytes
            stop = min(start + self._chunk_bytes, self._record.size_bytes)
            raise DamagedError(
                f"{self.path} is damaged: bytes {start} to {stop} do not match their checksum; load another "
                "checkpoint"
            )


def _wrong(memory: Tensor, sums: tuple[int, ...], first: int, chunk_bytes: int) -> int | None:
    """The first chunk of `memory`, which begins with chunk `first`, whose checksum is wrong."""
    view = bytes_of(memory)
    for number, at in enumerate(range(0, len(view), chunk_bytes), start=first):
        if zlib.crc32(view[at : at + chunk_bytes]) != sums[number]:
            return number
    return None


def _memory_of(span: _Span) -> Tensor | None:
    """The target's memory as bytes [stop - start], if no copy or cast is needed."""
    target = span.target
    is_direct = span.runs is None and target is not None and target.device.type == "cpu"
    if target is None or not is_direct or target.dtype != span.dtype:
        return None
    return target.view(torch.uint8)


__all__ = ["CheckedFile"]
