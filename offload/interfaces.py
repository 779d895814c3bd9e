"""The stores of masters, optimizer states, shards of parameters and sums of gradients, and the defaults.

    MasterStore     masters and states of one flat buffer      device: DeviceStore        host.py
    StateStorage    where these are between two updates        memory: the default        disk/
    Shard           this rank's shard of parameters, stage 3   device: the default        host.py, disk/
    GradStore       the sum of a buffer's gradients            device: DeviceGradStore    host.py

The defaults keep everything where it is and do nothing. An optimizer makes its states beside the master, so the
master's store is also theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

from ..ops.comm.handles import Handle
from ..ops.device import device_of
from ..ops.optim.shard_optimizer import ShardOptimizer

Mark = torch.Event


class JobHandle(ABC):
    """A job of a queue."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the job is done. Raises what the job raised."""

    @abstractmethod
    def wait_on_device(self) -> None:
        """Let work that is started on the device from now on run after the job."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """`wait_on_device` would not block the host."""


@final
class FinishedJob(JobHandle):
    """A job that was done at once."""

    is_done = True

    def wait(self) -> None:
        return

    def wait_on_device(self) -> None:
        return


@final
class DeviceToHostCopy(JobHandle):
    """Copies to the host that the current stream has started.

    `wait_on_device` waits on the host as well, because the host reads them.
    """

    is_done = False

    def __init__(self, device: torch.device) -> None:
        self._event = device_of(device).event()

    def wait(self) -> None:
        self._event.synchronize()

    def wait_on_device(self) -> None:
        self.wait()


# -- masters and optimizer states between two updates ----------------------------------------------------


# (start, stop) -> the elements [start, stop) of a flattened tensor, in blocks; a block is valid until the next
Blocks = Callable[[int, int], Iterator[Tensor]]


@final
class OptimizerStates:
    """The states that an optimizer has of one master."""

    def __init__(self, optimizer: ShardOptimizer, tensors: Iterable[tuple[Tensor, int]]) -> None:
        """tensors: those of `optimizer` in the master, and the first element of each."""
        self._optimizer, self._tensors = optimizer, list(tensors)

    def __iter__(self) -> Iterator[tuple[int, Tensor, dict[str, Any]]]:
        """The first element of each tensor, the tensor, and its states of now."""
        states = self._optimizer.states
        return ((start, tensor, states.get(tensor, {})) for tensor, start in self._tensors)


class StateStorage:
    """Where one master and its states are between two updates: by default in memory that they keep.

    All tensors stay the same objects.
    """

    is_on_disk = False

    def add_view(self, view: Tensor, start: int) -> None:
        """`view` is a contiguous view of the master that begins at its element `start`."""
        return

    def bind(self, states: OptimizerStates) -> None:
        """The master has these states, from the first step on."""
        return

    def load(self) -> None:
        """The tensors have their values in memory on return. Not while an update runs.

        They may be written to. Later calls for other masters move them away again.
        Raises XdsError: the disk failed.
        """
        return

    def release(self) -> None:
        """The tensors keep the memory that `load` has given them, and never move again."""
        return

    def start_load(self) -> None:
        """An update will run: start to read. Not while an earlier update runs."""
        return

    def run_update(self, update: Callable[[], None]) -> bool:
        """Call `update`, in its thread, after `start_load`. What it writes is kept, and new states as well.

        Returns:
            False: the disk failed, so it was not called; `StateStore.failure` says why.
        """
        update()
        return True

    def blocks_of(self, tensor: Tensor) -> Blocks | None:
        """How the values of the master or of a state are read while they are on a disk; None: in memory."""
        return None

    @property
    def disk_bytes(self) -> int:
        """Bytes of the master and the states that are stored on a disk."""
        return 0

    def is_stored(self, tensor: Tensor) -> bool:
        """The values of this master or state are in the file between updates."""
        return False


class StateStore:
    """Gives each master of a rank its `StateStorage`: by default memory."""

    is_on_disk = False

    def plan(self, index: int, numel: int, itemsize: int) -> None:
        """Flat buffer `index`: its master and states will have `numel` elements of at most `itemsize` bytes."""
        return

    def open(self) -> None:
        """Reserve the space for all that is planned.

        Raises:
            UsageError: there is too little space, or no right to write there.
        """
        return

    def state_storage(self, index: int, master: Tensor, *, holds_master: bool) -> StateStorage:
        """The storage of `master` [n], which has its first values.

        holds_master: False: the master has memory of its own, and only its states need a place.
        """
        return StateStorage()

    def hold(self) -> AbstractContextManager[None]:
        """Inside, everything that is loaded stays in memory; on exit all of it starts to be written."""
        return nullcontext()

    def failure(self) -> str:
        """What has failed so far, for a message; "" if nothing has. After a failure no update runs."""
        return ""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory through which states are copied."""
        return 0

    def close(self) -> None:
        """End threads and give up the space."""
        return


# -- shards of parameters --------------------------------------------------------------------------------


ToDevice = Callable[[Tensor], Tensor]  # values [n] -> a copy of them on the device


class Shard:
    """The shard of one flat buffer: by default memory of the device.

    `tensor` [n] stays the same object; on a disk it may read as NaN.
    is_on_host: it is not on the device. is_on_disk: its values are in memory only while they are used.
    """

    is_on_host = False
    is_on_disk = False

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def load(self) -> None:
        """`tensor` has its values on return, and may be written to. Raises XdsError: the disk failed."""
        return

    def fetch(self, target: Tensor, after: JobHandle | None) -> JobHandle:
        """On the host: start to copy the values to `target` [n], on the device, when `after` is done."""
        raise AssertionError("the shard is on the device")

    def discard(self) -> None:
        """New values will be written: drop those in memory."""
        return

    def write(self, values: Tensor) -> None:
        """On a disk: start to write `values` [n], which may change on return. In the thread of updates."""
        raise AssertionError("the shard is in memory")

    def blocks(self) -> Blocks | None:
        """How the values are read while they are on a disk; None: in memory."""
        return None


class ShardStore(ABC):
    """The place of shards."""

    is_on_host: bool
    is_on_disk = False

    @abstractmethod
    def add(self, index: int, values: Tensor, to_device: ToDevice) -> Shard:
        """A copy of `values` [n], those of flat buffer `index`, in the store.

        to_device: makes the copy, if the store is on the device.
        """

    def coded(self, values: Tensor, exact: Sequence[tuple[int, int]]) -> Shard:
        """A copy of `values` [n], those of a shard, in 8 bits in host memory, but for the ranges `exact`."""
        raise AssertionError("shards are on the device")

    def plan(self, index: int, numel: int, itemsize: int) -> None:
        """The shard of flat buffer `index` will have `numel` elements of `itemsize` bytes."""
        return

    def open(self) -> None:
        """Reserve the space for all that is planned.

        Raises:
            UsageError: there is too little space, or no right to write there.
        """
        return

    def hold(self) -> AbstractContextManager[None]:
        """Inside, everything that is loaded stays in memory."""
        return nullcontext()

    def failure(self) -> str:
        """What has failed so far, for a message; "" if nothing has."""
        return ""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory through which shards are copied."""
        return 0

    def close(self) -> None:
        """End threads and give up the space."""
        return


@final
class DeviceShardStore(ShardStore):
    """The device."""

    is_on_host = False

    def add(self, index: int, values: Tensor, to_device: ToDevice) -> Shard:
        return Shard(to_device(values))


@final
class ShardCopy(Handle):
    """A gather of one rank: the copy of its shard."""

    def __init__(self, handle: JobHandle) -> None:
        self._handle: JobHandle | None = handle

    def wait(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.wait_on_device()


# -- sums of gradients -----------------------------------------------------------------------------------


class GradStore(ABC):
    """Stores the sum over ranks of one flat buffer's gradients since the last step."""

    is_on_host: bool

    @abstractmethod
    def add(self, source: Tensor, give_back: Callable[[], None]) -> None:
        """Start to add `source` [n], on the device; `give_back` is called when it may be overwritten."""

    @abstractmethod
    def put(self, total: Tensor) -> None:
        """Replace the sum by `total` [n] of any device; returns when it is copied."""

    @abstractmethod
    def replace(self, total: Tensor) -> None:
        """Start to replace the sum by `total` [n] of the device. Write to it after `wait_on_device`."""

    @abstractmethod
    def wait_on_device(self) -> None:
        """Let work that is started on the device from now on come after the copy of `replace`."""

    @abstractmethod
    def total(self) -> Tensor | None:
        """The sum [n] in host memory; None if nothing was added since `reset`."""

    @abstractmethod
    def pending_total(self) -> tuple[Tensor, JobHandle]:
        """The sum [n], and when it will have its values. `total` still waits for them as well."""

    @abstractmethod
    def widened(self) -> Tensor:
        """The sum [n] in the dtype of sums. User code may write to it."""

    @abstractmethod
    def set_reader(self, handle: JobHandle) -> None:
        """The sum is read until `handle` is done: its memory is not written before."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the sum."""

    @abstractmethod
    def release(self) -> None:
        """Free the memory; nothing is added any more."""

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Bytes of host memory in use."""


class DeviceGradStore(GradStore):
    """The sum stays in the buffers of the reduction."""

    is_on_host = False

    def add(self, source: Tensor, give_back: Callable[[], None]) -> None:
        raise AssertionError("the sum stays on the device")

    def put(self, total: Tensor) -> None:
        raise AssertionError("the sum stays on the device")

    def replace(self, total: Tensor) -> None:
        raise AssertionError("the sum stays on the device")

    def wait_on_device(self) -> None:
        return

    def total(self) -> Tensor | None:
        return None

    def pending_total(self) -> tuple[Tensor, JobHandle]:
        raise AssertionError("the sum stays on the device")

    def widened(self) -> Tensor:
        raise AssertionError("the sum stays on the device")

    def set_reader(self, handle: JobHandle) -> None:
        raise AssertionError("the sum stays on the device")

    def reset(self) -> None:
        return

    def release(self) -> None:
        return

    @property
    def host_bytes(self) -> int:
        return 0


# -- stores -----------------------------------------------------------------------------------------------


class MasterStore(ABC):
    """The place of a master. `is_on_host`: forward's parameters are a copy on the device."""

    is_on_host: bool

    @abstractmethod
    def copy_in(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of `values` [n] in the store, in `dtype`."""

    @abstractmethod
    def state_storage(self, index: int, master: Tensor, *, holds_master: bool) -> StateStorage:
        """Where the result of `copy_in` and its states are between updates; see `StateStore.state_storage`."""

    @abstractmethod
    def sums(self, sum_dtype: torch.dtype) -> GradStore:
        """A store for the sum of gradients."""


@final
class DeviceStore(MasterStore):
    """The device."""

    is_on_host = False

    def __init__(self, device: torch.device | None = None) -> None:
        """device: None where all values are on the device already; with `offload_param` they are not."""
        self._device = device

    def copy_in(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(self._device or values.device, dtype, copy=True)

    def state_storage(self, index: int, master: Tensor, *, holds_master: bool) -> StateStorage:
        return StateStorage()

    def sums(self, sum_dtype: torch.dtype) -> GradStore:
        return DeviceGradStore()


__all__ = [
    "Blocks",
    "DeviceStore",
    "FinishedJob",
    "ShardCopy",
    "MasterStore",
    "DeviceToHostCopy",
    "Mark",
    "ToDevice",
    "DeviceGradStore",
    "OptimizerStates",
    "StateStorage",
    "Shard",
    "ShardStore",
    "DeviceShardStore",
    "StateStore",
    "GradStore",
    "JobHandle",
]
