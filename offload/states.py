"""Where a master and its optimizer states are between two updates: in memory, or in a file.

in memory    nothing moves
on a disk    begin ──> read ──> run: tensors point to memory ──> write ──> tensors read as NaN
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

from ..ops.optim.shard_optimizer import states_of

# (start, stop) -> the elements [start, stop) of a flattened tensor, in blocks; a block is valid until the next
Blocks = Callable[[int, int], Iterator[Tensor]]


@final
class OptimizerStates:
    """The states that an optimizer has of one master."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, tensors: Iterable[tuple[Tensor, int]]
    ) -> None:
        """tensors: those of `optimizer` in the master, and the first element of each."""
        self._optimizer, self._tensors = optimizer, list(tensors)

    def __iter__(self) -> Iterator[tuple[int, Tensor, dict[str, Any]]]:
        """The first element of each tensor, the tensor, and its states of now."""
        states = states_of(self._optimizer)
        return ((start, tensor, states.get(tensor, {})) for tensor, start in self._tensors)


class Residence(ABC):
    """The place of one master and of its states. All tensors stay the same objects."""

    is_on_disk: bool

    @abstractmethod
    def add_view(self, view: Tensor, start: int) -> None:
        """`view` is a contiguous view of the master that begins at its element `start`."""

    @abstractmethod
    def bind(self, states: OptimizerStates) -> None:
        """The master has these states, from the first step on."""

    @abstractmethod
    def bring(self) -> None:
        """The tensors have their values in memory on return. Not while an update runs.

        They may be written to. Later calls for other masters move them away again.
        Raises XdsError: the disk failed.
        """

    @abstractmethod
    def release(self) -> None:
        """The tensors keep the memory that `bring` has given them, and never move again."""

    @abstractmethod
    def begin(self) -> None:
        """An update will `run`: start to read. Not while an earlier update runs."""

    @abstractmethod
    def run(self, update: Callable[[], None]) -> bool:
        """Call `update`, in its thread, after `begin`. What it writes is kept, and new states as well.

        Returns:
            False: the disk failed, so it was not called; `StateHome.failure` says why.
        """

    @abstractmethod
    def blocks_of(self, tensor: Tensor) -> Blocks | None:
        """How the values of the master or of a state are read while they are on a disk; None: in memory."""

    @property
    @abstractmethod
    def disk_bytes(self) -> int:
        """Bytes of the master and the states that are stored on a disk."""

    @abstractmethod
    def is_stored(self, tensor: Tensor) -> bool:
        """The values of this master or state are in the file between updates."""


class InMemory(Residence):
    """Memory that the master and its states keep."""

    is_on_disk = False
    disk_bytes = 0

    def add_view(self, view: Tensor, start: int) -> None:
        return

    def bind(self, states: OptimizerStates) -> None:
        return

    def bring(self) -> None:
        return

    def release(self) -> None:
        return

    def begin(self) -> None:
        return

    def run(self, update: Callable[[], None]) -> bool:
        update()
        return True

    def blocks_of(self, tensor: Tensor) -> Blocks | None:
        return None

    def is_stored(self, tensor: Tensor) -> bool:
        return False


class StateHome(ABC):
    """Gives each master of a rank its residence."""

    is_on_disk: bool

    @abstractmethod
    def plan(self, index: int, numel: int, itemsize: int) -> None:
        """The master of flat buffer `index` will have `numel` elements of `itemsize` bytes."""

    @abstractmethod
    def open(self) -> None:
        """Reserve the space for all that is planned.

        Raises:
            UsageError: there is too little space, or no right to write there.
        """

    @abstractmethod
    def residence(self, index: int, master: Tensor, *, holds_master: bool) -> Residence:
        """The residence of `master` [n], which has its first values.

        holds_master: False: the master has memory of its own, and only its states need a place.
        """

    @abstractmethod
    def hold(self) -> AbstractContextManager[None]:
        """Inside, everything that is brought stays in memory; on exit all of it starts to be written."""

    @abstractmethod
    def failure(self) -> str:
        """What has failed so far, for a message; "" if nothing has. After a failure no update runs."""

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Bytes of host memory through which states travel."""

    @abstractmethod
    def close(self) -> None:
        """End threads and give up the space."""


@final
class StatesInMemory(StateHome):
    """Nothing moves."""

    is_on_disk = False
    host_bytes = 0

    def plan(self, index: int, numel: int, itemsize: int) -> None:
        return

    def open(self) -> None:
        return

    def residence(self, index: int, master: Tensor, *, holds_master: bool) -> Residence:
        return InMemory()

    def hold(self) -> AbstractContextManager[None]:
        return nullcontext()

    def failure(self) -> str:
        return ""

    def close(self) -> None:
        return


__all__ = ["Blocks", "InMemory", "OptimizerStates", "Residence", "StateHome", "StatesInMemory"]
