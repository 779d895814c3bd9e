"""The file of a rank, the slots that its states are copied through, and the first failure of either."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, final

import torch
from torch import Tensor

from ...utils.errors import UsageError, XdsError
from ..job_queues import JobQueue, ThreadQueue
from ..slot_pool import SlotPool
from .extents import Extents
from .file import DiskFile, PendingRequest
from .options import DiskOptions

Value = TypeVar("Value")

_LOST_WRITE = (
    "an optimizer state or a master weight was written while it was on the disk: the value is lost; use "
    "xds.zero.set_full_optimizer_state or xds.zero.set_full_param"
)


@final
class Transfers:
    """Owns the file, the slots and the thread that starts reads. After a failure all states count as lost."""

    def __init__(self, fetches: JobQueue | None = None) -> None:
        self.fetches = fetches or ThreadQueue("xds-fetch")
        self._placeholders: dict[torch.dtype, Tensor] = {}
        self._file: DiskFile | None = None
        self._slots: SlotPool | None = None
        self._failure: BaseException | None = None

    def open(
        self,
        folder: Path,
        options: DiskOptions,
        rank: int,
        extents: Extents,
        *,
        pin: bool = False,
    ) -> None:
        """Create the file, and a pool whose slots hold the largest extent, pinned if `pin`.

        Raises:
            UsageError: there is too little space, or no right to write there.
        """
        self._file = DiskFile(folder, extents.total_bytes, options, rank)
        largest = max((extent.padded_bytes for extent in extents), default=0)
        if largest:
            self._slots = SlotPool(largest, min(options.num_slots, len(extents)), pin=pin)

    @property
    def file(self) -> DiskFile:
        """The file of this rank."""
        assert self._file is not None, "open() comes first"
        return self._file

    @property
    def slots(self) -> SlotPool:
        """Memory for what is read, used and written."""
        assert self._slots is not None, "open() comes first"
        return self._slots

    @property
    def slots_bytes(self) -> int:
        """Bytes of the slots."""
        return 0 if self._slots is None else self._slots.allocated_bytes

    def placeholder(self, dtype: torch.dtype) -> Tensor:
        """What tensors read as while they are on the disk, of shape []: NaN; the least value of integers."""
        if dtype not in self._placeholders:
            self._placeholders[dtype] = torch.full((), _absent(dtype), dtype=dtype)
        return self._placeholders[dtype]

    def check_placeholders(self) -> None:
        """Raises UsageError: user code wrote to a tensor that was on the disk."""
        for placeholder in self._placeholders.values():
            absent = _absent(placeholder.dtype)
            is_kept = placeholder.isnan() if math.isnan(absent) else placeholder == absent
            if not bool(is_kept):
                placeholder.fill_(absent)
                raise UsageError(_LOST_WRITE)

    def fail(self, error: BaseException) -> None:
        """From now on no update runs, and every read raises the first error: some states are lost."""
        self._failure = self._failure or error

    @property
    def has_failed(self) -> bool:
        """Some states are lost."""
        return self._failure is not None

    def failure(self) -> str:
        """The first failure, for a message; "" if there is none."""
        if self._failure is None:
            return ""
        return (
            f"{self._failure}; some optimizer states are lost: start again from the last checkpoint"
        )

    def raise_failure(self) -> None:
        """Raises XdsError: something has failed before."""
        if self._failure is not None:
            raise XdsError(self.failure()) from self._failure

    def noting_failure(self, wait: Callable[[], Value]) -> Value:
        """`wait()`; remembers its error."""
        try:
            return wait()
        except XdsError as error:
            self.fail(error)
            raise

    def close(self) -> None:
        """End the threads and close the file, which disappears."""
        self.fetches.close()
        if self._file is not None:
            self._file.close()


def _absent(dtype: torch.dtype) -> float:
    """The value of elements that are on the disk."""
    if dtype.is_floating_point:
        return math.nan
    return 1 if dtype == torch.bool else torch.iinfo(dtype).min


def wait_quietly(pending: PendingRequest) -> None:
    """Return when `pending` is done. Its error is raised where the values are wanted."""
    with suppress(XdsError):
        pending.wait()


__all__ = ["Transfers", "wait_quietly"]
