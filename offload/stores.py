"""Chooses where the master and the states of each flat buffer are stored: on the device or on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from .interfaces import (
    DeviceShardStore,
    DeviceStore,
    MasterStore,
    ShardStore,
    StateStore,
)

if TYPE_CHECKING:
    from .host import HostStore


@final
class Stores:
    """Chooses the store of each flat buffer, in the order in which forward uses them.

    The first ones stay on the device until it has its share. Backward reaches the others first, so their
    updates on the host begin early.
    """

    def __init__(
        self,
        host: HostStore | None,
        *,
        ratio: float = 0.0,
        total_numel: int = 0,
        shards: ShardStore | None = None,
        defers: bool = False,
    ) -> None:
        """
        Args:
            host: None keeps everything on the device.
            ratio: the share of all masters and states on the host, to within one buffer.
            total_numel: elements of all trainable parameters.
            shards: where shards of parameters are stored (stage 3); default: on the device.
            defers: a step does not wait for updates on the host.
        """
        self.host = host
        self.states: StateStore = StateStore() if host is None else host.states
        self.defers = defers and host is not None
        self.shards = shards or DeviceShardStore()
        self.device: MasterStore = DeviceStore(None if host is None else host.device)
        self._all_on_device = host is None or not ratio
        self._device_numel = round((1 - ratio) * total_numel)

    def close(self) -> None:
        """End the threads of the host's store, and the files."""
        if self.host is not None:
            self.host.close()
        self.shards.close()

    def release(self) -> None:
        """After `close`: free the host's buffers."""
        if self.host is not None:
            self.host.release()

    @property
    def are_on_disk(self) -> bool:
        """Some values are in a file: what a rank does may fail when the others' does not."""
        return self.states.is_on_disk or self.shards.is_on_disk

    def failure(self) -> str:
        """What has failed so far on this rank's disk, for a message; "" if nothing has."""
        return self.states.failure() or self.shards.failure()

    def next(self, numel: int) -> MasterStore:
        """The store of the next buffer, of `numel` elements."""
        if self.host is None or self._all_on_device:
            return self.device
        if numel <= self._device_numel:
            self._device_numel -= numel
            return self.device
        self._device_numel = 0  # the buffers after it are used later
        return self.host


__all__ = ["Stores"]
