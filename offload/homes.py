"""Where the master weights and optimizer states of one flat buffer are stored: on the device or on the host.

An optimizer makes its states beside the master, so the master's home is also theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from .host_sums import OnDevice, OnHost, SumHome
from .lanes import Lanes, Outbox
from .rotation import Rotation
from .sender import Sender
from .shards import ShardHome, ShardsOnDevice
from .spare import Spare
from .states import InMemory, Residence, StateHome, StatesInMemory

# so many units the host may be behind the device in adding before backward waits for it
NUM_STAGES = 4


class Home(ABC):
    """The place of a master. `is_on_host`: forward's parameters are a copy on the device."""

    is_on_host: bool

    @abstractmethod
    def store(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of `values` [n] at home, in `dtype`."""

    @abstractmethod
    def residence(self, index: int, master: Tensor, *, holds_master: bool) -> Residence:
        """Where the result of `store` and its states are between updates; see `StateHome.residence`."""

    @abstractmethod
    def sums(self, sum_dtype: torch.dtype) -> SumHome:
        """A home for the sum of gradients."""


@final
class DeviceHome(Home):
    """The device."""

    is_on_host = False

    def __init__(self, device: torch.device | None = None) -> None:
        """device: None where all values are on the device already; with `offload_param` they are not."""
        self._device = device

    def store(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(self._device or values.device, dtype, copy=True)

    def residence(self, index: int, master: Tensor, *, holds_master: bool) -> Residence:
        return InMemory()

    def sums(self, sum_dtype: torch.dtype) -> SumHome:
        return OnDevice()


class HostHome(Home):
    """Host memory, with what its users share: lanes, the outbox of gradients and the sender of parameters."""

    is_on_host = True

    def __init__(
        self,
        device: torch.device,
        *,
        pin: bool,
        adds: bool,
        guesses: bool = False,
        states: StateHome | None = None,
    ) -> None:
        """
        Args:
            states: where masters and states are between updates; default: in host memory.
            pin: use pinned memory for copies; without effect where the device is a CPU.
            adds: a step has several reductions.
            guesses: updates run before it is known that their step will not be clipped or skipped.
        """
        self.device = device
        self.pin = pin and device.type == "cuda"
        self.lanes = Lanes.of(device)
        self.sender = Sender(self.lanes, pin=self.pin)
        self._outbox = Outbox()
        self._stages = Rotation(NUM_STAGES, pin=self.pin)
        self._adds = adds
        self.spare = Spare(pin=self.pin) if guesses else None
        self.states = states or StatesInMemory()

    def store(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to("cpu", dtype, copy=True)

    def residence(self, index: int, master: Tensor, *, holds_master: bool) -> Residence:
        return self.states.residence(index, master, holds_master=holds_master)

    def sums(self, sum_dtype: torch.dtype) -> SumHome:
        shared = (self.lanes, self._outbox, self._stages)
        return OnHost(*shared, sum_dtype, adds=self._adds, pin=self.pin)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory for copies, for states on a disk, and for updates that may be undone."""
        spare = 0 if self.spare is None else self.spare.allocated_bytes
        copies = self.sender.allocated_bytes + self._stages.allocated_bytes
        return copies + spare + self.states.host_bytes

    def drain(self) -> None:
        """Give back all device buffers whose copies are in flight."""
        self._outbox.drain()

    def close(self) -> None:
        """End the threads."""
        self.lanes.close()
        self.states.close()

    def release(self) -> None:
        """After `close`: free the buffers for copies."""
        self.drain()
        self.sender.release()
        self._stages.release()
        if self.spare is not None:
            self.spare.release()


@final
class Homes:
    """Chooses the home of each flat buffer, in the order in which forward uses them.

    The first ones stay on the device until it has its share. Backward reaches the others first, so their
    updates on the host begin early.
    """

    def __init__(
        self,
        host: HostHome | None,
        *,
        ratio: float = 0.0,
        total_numel: int = 0,
        shards: ShardHome | None = None,
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
        self.states: StateHome = StatesInMemory() if host is None else host.states
        self.defers = defers and host is not None
        self.shards = shards or ShardsOnDevice()
        self.device: Home = DeviceHome(None if host is None else host.device)
        self._all_on_device = host is None or not ratio
        self._device_numel = round((1 - ratio) * total_numel)

    def close(self) -> None:
        """End the threads of the host's home, and the files."""
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

    def next(self, numel: int) -> Home:
        """The home of the next buffer, of `numel` elements."""
        if self.host is None or self._all_on_device:
            return self.device
        if numel <= self._device_numel:
            self._device_numel -= numel
            return self.device
        self._device_numel = 0  # the buffers after it are used later
        return self.host


__all__ = ["DeviceHome", "Home", "Homes", "HostHome"]
