"""One file of a rank, without a name, whose extents are read and written while the caller continues.

In use:

    extents = Extents()
    moments = extents.add("exp_avg", num_bytes)
    disk = DiskFile(folder, extents.total_bytes, DiskOptions(), rank)
    disk.write(moments, source).wait()
"""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ...utils.errors import XdsError
from .creation import create_file
from .extents import Extent
from .options import ALIGN_BYTES, DiskOptions
from .requests import DiskRequest
from .workers import DiskThreads


@final
class PendingRequest:
    """A request under way. It keeps the file open while it exists."""

    def __init__(self, request: DiskRequest, file: DiskFile) -> None:
        self._request, self._file = request, file

    def wait(self) -> None:
        """Return when the request is finished. May be called more than once, from any thread.

        Raises:
            XdsError: the disk failed. The bytes of the range are undefined then.
        """
        self._file.join(self._request)
        if self._request.error is not None:
            raise self._request.error

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._request.is_finished


@final
class DiskFile:
    """A new file of zeros in `folder`. It disappears with the process or with `close`.

    A request is cut into blocks; `options.queue_depth` blocks are in flight. Requests whose ranges
    overlap, one of which writes, are served in the order of submission. All others have no order.
    Threads may share a file.
    Args:
        folder: the setting `nvme_path`; created where it is missing.
        total_bytes: `Extents.total_bytes`, a multiple of 4096. The space is reserved at once.
    Raises:
        UsageError: the folder cannot be written to, or has too little space.
    """

    def __init__(self, folder: Path, total_bytes: int, options: DiskOptions, rank: int) -> None:
        _check(total_bytes % ALIGN_BYTES == 0, f"a file of {total_bytes} bytes")
        new = create_file(folder, total_bytes, rank)
        self.label = f"the file of rank {rank} in {folder}"  # in messages; it has no name
        self.total_bytes = total_bytes
        self.is_direct = new.is_direct  # False: reads and writes go through the page cache
        self._slow_seconds = options.slow_seconds
        self._submitting = threading.Lock()
        self._is_closed = False
        self._workers = DiskThreads(new.fd, self.label, options)
        self._end = weakref.finalize(self, self._workers.stop)

    def read(self, extent: Extent, into: Tensor, start: int = 0) -> PendingRequest:
        """Read the bytes `start` to `start + into.numel()` of `extent`.

        Args:
            into: uint8 of shape [multiple of 4096], on the host, aligned to 4096, such as a slot of
                a `SlotPool`. Undefined until the request is finished, which keeps the memory until then.
            start: in bytes, a multiple of 4096. The end may lie in the padding of the extent.
        """
        return self._submit(extent, into, start, is_write=False)

    def write(self, extent: Extent, source: Tensor, start: int = 0) -> PendingRequest:
        """Write `source` to the bytes `start` to `start + source.numel()` of `extent`.

        Args:
            source: like `into` of `read`. Must not change until the request is finished.
            start: like that of `read`.
        """
        return self._submit(extent, source, start, is_write=True)

    def close(self) -> None:
        """Wait for all requests, end the threads and close the file. Later calls do nothing.

        Errors of requests are raised by `PendingRequest.wait` only.
        """
        with self._submitting:
            self._is_closed = True
        for request in self._workers.active():
            self.join(request)
        if self._end.detach() is not None:
            self._workers.stop(join_seconds=None)

    def _submit(
        self, extent: Extent, memory: Tensor, start: int, *, is_write: bool
    ) -> PendingRequest:
        self._check_request(extent, memory, start)
        request = DiskRequest(memory, extent.offset + start, is_write=is_write)
        with self._submitting:
            if self._is_closed:
                raise XdsError(
                    f"internal error: a {request.operation} of {self.label}, which is closed"
                )
            self._workers.submit(request)
        return PendingRequest(request, self)

    def join(self, request: DiskRequest) -> None:
        """Wait until `request` is finished; a slow one is logged."""
        request.join(self._slow_seconds, self._workers.warn_if_slow)

    def _check_request(self, extent: Extent, memory: Tensor, start: int) -> None:
        """Direct I/O needs aligned memory, offset and length; a range outside would damage other states."""
        num_bytes = memory.numel()
        what = f"{num_bytes} bytes at byte {start} of the extent {extent} ({extent.padded_bytes} bytes)"
        is_flat = memory.dtype == torch.uint8 and memory.dim() == 1 and memory.is_contiguous()
        _check(
            is_flat and memory.device.type == "cpu",
            f"{what}: needs a flat uint8 tensor of the host",
        )
        _check(memory.data_ptr() % ALIGN_BYTES == 0, f"{what}: the memory is not aligned")
        _check(num_bytes % ALIGN_BYTES == 0 and start % ALIGN_BYTES == 0, f"{what}: not aligned")
        is_inside = 0 <= start and start + num_bytes <= extent.padded_bytes
        is_in_file = extent.offset + extent.padded_bytes <= self.total_bytes
        _check(is_inside and is_in_file, f"{what}: outside of the extent or the file")


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise XdsError(
            f"internal error: {what}; sizes and addresses are multiples of {ALIGN_BYTES}"
        )
