"""What masters and shards on a disk have in common: extents of one file, planned first and opened then."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from torch import Tensor

from ...utils.errors import XdsError
from .extents import Extents
from .kept import Kept
from .options import DiskOptions
from .residence import OnDisk
from .transfers import Transfers


class InFile(ABC):
    """Owns the file of a rank in `folder`, and the tensors that are in its extents."""

    def __init__(self, folder: Path, options: DiskOptions, rank: int, *, pin: bool = False) -> None:
        """pin: the ring is pinned, because copies to the device start there."""
        self._folder = folder
        self._options = options
        self._rank = rank
        self._pin = pin
        self._extents = Extents()
        self._transfers = Transfers()
        self._kept = Kept()
        self._residences: list[OnDisk] = []

    @abstractmethod
    def plan(self, index: int, numel: int, itemsize: int) -> None:
        """Flat buffer `index` will have `numel` elements of `itemsize` bytes: add its extent."""

    def open(self) -> None:
        """Reserve the space for all that is planned. Raises UsageError: see `StateHome.open`."""
        self._transfers.open(self._folder, self._options, self._rank, self._extents, pin=self._pin)

    def _residence(self, index: int, tensor: Tensor, *, holds_master: bool) -> OnDisk:
        extent = self._extents[str(index)]
        found = OnDisk(self._transfers, self._kept, extent, tensor, holds_master=holds_master)
        self._residences.append(found)
        return found

    def hold(self) -> AbstractContextManager[None]:
        """Inside, everything that is brought stays in memory."""
        return self._kept.hold()

    def failure(self) -> str:
        """What has failed so far, for a message; "" if nothing has."""
        for residence in self._residences:
            with suppress(XdsError):
                residence.check_written()
        return self._transfers.failure()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory through which the tensors travel."""
        return self._transfers.ring_bytes + self._kept.memory_bytes

    @property
    def disk_bytes(self) -> int:
        """The size of the file."""
        return self._extents.total_bytes

    def close(self) -> None:
        """End threads and give up the space."""
        self._transfers.close()


__all__ = ["InFile"]
