"""Moves an engine's states to host memory and back, to free device memory in between.

    device storage [bytes] --copy--> host copy [bytes], device storage resized to 0      `move_to_host`
    device storage [bytes] <--copy-- host copy                                           `move_back`

Tensors stay the same objects, so all references to them stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor

from ...offload.pinned import host_memory


@final
class HostCopies:
    """Host copies of device storages."""

    def __init__(self, *, pin_memory: bool) -> None:
        self._pin = pin_memory
        self._moved: list[tuple[torch.UntypedStorage, Tensor]] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(host.numel() for _, host in self._moved)

    def holds(self, tensor: Tensor) -> bool:
        """The values of `tensor` are here."""
        storage_id = tensor.untyped_storage()._cdata
        return any(storage._cdata == storage_id for storage, _ in self._moved)

    def move_to_host(self, tensors: Iterable[Tensor]) -> None:
        """Copy the storages of `tensors` to the host (each once, completely) and resize them to 0."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        for storage in storages.values():
            if storage.nbytes():
                host = host_memory(storage.nbytes(), pin=self._pin)  # exactly as much
                host.copy_(_bytes_of(storage))
                self._moved.append((storage, host))
                storage.resize_(0)

    def move_back(self) -> None:
        """Restore all storages from their host copies."""
        for storage, host in self._moved:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host)
        self._moved = []


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))


__all__ = ["HostCopies"]
