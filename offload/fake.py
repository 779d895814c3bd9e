"""Stores on the host, or on a disk, of a rank that does not run: on the meta device, without memory or files.

The real ones copy values to the host, which values of the meta device do not allow. What these hold is counted
where the real ones would hold it; buffers for copies, and sums of gradients, are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from .host import HostStore
from .interfaces import (
    DeviceGradStore,
    FinishedJob,
    GradStore,
    JobHandle,
    OptimizerStates,
    Shard,
    ShardStore,
    StateStorage,
    StateStore,
    ToDevice,
)


@final
class FakeHostStore(HostStore):
    """The host; with `on_disk` masters and their states are in a file between updates."""

    buffer_bytes = 0

    def __init__(self, *, on_disk: bool) -> None:
        self.device = torch.device("meta")
        self.states: StateStore = StateStore()
        self.undo_pool = None
        self._on_disk = on_disk

    def copy_in(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(dtype, copy=True)

    def state_storage(self, index: int, master: Tensor, *, holds_master: bool) -> StateStorage:
        return _Stored(master.nbytes * holds_master) if self._on_disk else StateStorage()

    def sums(self, sum_dtype: torch.dtype) -> GradStore:
        return _Sums()

    def close(self) -> None:
        return


@final
class FakeShardStore(ShardStore):
    """The host, or a disk."""

    is_on_host = True

    def __init__(self, *, on_disk: bool) -> None:
        self._on_disk = on_disk

    def add(self, index: int, values: Tensor, to_device: ToDevice) -> Shard:
        return _Shard(values.clone(), on_disk=self._on_disk)


class _Stored(StateStorage):
    """In a file, as far as bytes are counted."""

    is_on_disk = True

    def __init__(self, master_bytes: int) -> None:
        self._master_bytes = master_bytes
        self._states: OptimizerStates | None = None

    def bind(self, states: OptimizerStates) -> None:
        self._states = states

    @property
    def disk_bytes(self) -> int:
        of_items = (state.values() for _, _, state in self._states or ())
        tensors = (value for values in of_items for value in values if isinstance(value, Tensor))
        return self._master_bytes + sum(tensor.nbytes for tensor in tensors)

    def is_stored(self, tensor: Tensor) -> bool:
        return True


class _Sums(DeviceGradStore):
    """Sums take no memory."""

    is_on_host = True

    def add(self, source: Tensor, give_back: Callable[[], None]) -> None:
        give_back()

    def replace(self, total: Tensor) -> None:
        return


class _Shard(Shard):
    is_on_host = True

    def __init__(self, tensor: Tensor, *, on_disk: bool) -> None:
        super().__init__(tensor)
        self.is_on_disk = on_disk

    def fetch(self, target: Tensor, after: JobHandle | None) -> JobHandle:
        return FinishedJob()

    def write(self, values: Tensor) -> None:
        return


__all__ = ["FakeHostStore", "FakeShardStore"]
