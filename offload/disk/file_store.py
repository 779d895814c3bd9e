"""What masters and shards on a disk have in common: extents of one file, planned first and opened then."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from pathlib import Path

from torch import Tensor

from ...utils.errors import XdsError
from .extents import Extents
from .lru_cache import LruCache
from .options import DiskOptions
from .storage import DiskStorage
from .transfers import Transfers


class FileStore:
    """Owns the file of a rank in `folder`, and the tensors that are in its extents."""

    def __init__(self, folder: Path, options: DiskOptions, rank: int, *, pin: bool = False) -> None:
        """pin: the slots are pinned, because copies to the device start there."""
        self._folder = folder
        self._options = options
        self._rank = rank
        self._pin = pin
        self._extents = Extents()
        self._transfers = Transfers()
        self._cache = LruCache()
        self._storages: list[DiskStorage] = []
        self._region_bytes: dict[int, int] = {}

    def _plan(self, index: int, region_bytes: int, num_regions: int) -> None:
        """Flat buffer `index` will have so many regions of so many bytes: add its extent."""
        self._region_bytes[index] = region_bytes
        self._extents.add(str(index), num_regions * region_bytes)

    def open(self) -> None:
        """Reserve the space for all that is planned. Raises UsageError: see `StateStore.open`."""
        self._transfers.open(self._folder, self._options, self._rank, self._extents, pin=self._pin)

    def _state_storage(self, index: int, tensor: Tensor, *, holds_master: bool) -> DiskStorage:
        extent = self._extents[str(index)]
        storage = DiskStorage(
            self._transfers,
            self._cache,
            extent,
            tensor,
            region_bytes=self._region_bytes[index],
            holds_master=holds_master,
        )
        self._storages.append(storage)
        return storage

    def hold(self) -> AbstractContextManager[None]:
        """Inside, everything that is loaded stays in memory."""
        return self._cache.hold()

    def failure(self) -> str:
        """What has failed so far, for a message; "" if nothing has."""
        for storage in self._storages:
            with suppress(XdsError):
                storage.check_written()
        return self._transfers.failure()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory through which the tensors are copied."""
        return self._transfers.slots_bytes + self._cache.memory_bytes

    @property
    def disk_bytes(self) -> int:
        """The size of the file."""
        return self._extents.total_bytes

    def close(self) -> None:
        """End threads and give up the space."""
        self._transfers.close()


__all__ = ["FileStore"]
