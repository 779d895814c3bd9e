"""Masters and optimizer states in the file of a rank: read before their update, written back after it.

file     | master 0 | states 0 | master 1 | states 1 | ...       one extent for each master
ring     | slot: update 1 | slot: reads 2 | slot: writes 0 |     a slot holds the largest extent
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar, final

import torch
from torch import Tensor

from ...utils.errors import UsageError, XdsError
from ..lanes import Lane, ThreadLane
from ..lanes import Ticket as LaneTicket
from ..pinned import host_memory
from ..ring import Ring
from ..states import Blocks, OptimizerStates, Residence, StateHome
from .blocks import read_blocks
from .extents import Extent, Extents
from .file import DiskFile
from .options import DiskOptions, aligned
from .requests import Ticket

log = logging.getLogger("xds")
NUM_SLOTS = 3  # one is updated, one is read, one is written
KEPT = 4  # masters that stay in memory after the script has read them
WRITES_IN_FLIGHT = 2  # of masters that are moved away, not of updates
Value = TypeVar("Value")
MAIN = 0  # the region of the master; states are in the regions after it

_LOST_WRITE = (
    "an optimizer state or a master weight was written while it was on the disk: the value is lost; use "
    "xds.zero.set_full_optimizer_state or xds.zero.set_full_param"
)


@final
class _Fetch:
    """A read on its way to a slot of the ring."""

    def __init__(self, states: StatesOnDisk, residence: OnDisk) -> None:
        self._states = states
        self._residence = residence
        self._slot: Tensor | None = None
        self._read: Ticket | None = None
        self._started: LaneTicket = states.fetches.run(self._start)

    def _start(self) -> None:
        ring = self._states.ring
        slot = ring.take()
        ring.hand_over(slot)
        try:
            self._read = self._residence.start_read(slot)
        except BaseException:
            ring.give(slot)
            raise
        self._slot = slot

    def wait(self) -> Tensor:
        """The slot, with its values. Raises XdsError: the disk failed; the slot is free again."""
        self._started.wait()
        assert self._slot is not None
        try:
            if self._read is not None:
                self._read.wait()
        except BaseException:
            self._states.ring.give(self._slot)
            raise
        return self._slot


@final
class OnDisk(Residence):
    """One extent of the file, divided into regions of equal size: the master, and one for each state.

    Between uses the tensors read as NaN: they are a single element in memory.
    """

    is_on_disk = True

    def __init__(
        self, states: StatesOnDisk, extent: Extent, master: Tensor, *, holds_master: bool
    ) -> None:
        self.extent = extent
        self._states = states
        self._numel, self._dtype = master.numel(), master.dtype
        self._placeholder = states.placeholder(master.dtype)
        self._region_bytes = aligned(master.nbytes)
        self._first = MAIN + 1 if holds_master else MAIN
        self._num_regions = extent.num_bytes // self._region_bytes
        self._num_used = self._first
        self._views: list[tuple[Tensor, int]] = []
        self._find_states: OptimizerStates = lambda: ()
        # where each state is: (first element of the optimizer's tensor, key) -> region
        self._regions: dict[tuple[int, str], int] = {}
        self._stored: list[tuple[Tensor, int, int]] = []  # states, their regions, first elements
        self._memory: Tensor | None = None
        self._is_slot = False  # the memory is a slot of the ring
        self._fetch: _Fetch | None = None
        self._written: Ticket | None = None
        states.add(self)
        if holds_master:
            self._memory = self._new_memory()
            self._place(MAIN, 0, master).copy_(master)
            self.add_view(master, 0)
            states.note_memory(self)

    def add_view(self, view: Tensor, start: int) -> None:
        if self._first == MAIN or not view.numel():
            return
        self._views.append((view, start))
        if self._memory is None:
            view.data = self._placeholder.expand(view.shape)
        else:
            view.data = self._place(MAIN, start, view)

    def bind(self, states: OptimizerStates) -> None:
        self._find_states = states

    # -- in the thread of the script --------------------------------------------------------------------

    def bring(self) -> None:
        self._states.raise_failure()
        if self._memory is None:
            memory = self._new_memory()
            read = self.start_read(memory)
            if read is not None:
                self._states.checking(read.wait)
            self._point_to(memory)
        self._states.note_memory(self)

    def move_away(self) -> Ticket:
        """End `bring`: start to write what is in memory."""
        return self._leave()

    def begin(self) -> None:
        self._states.forget_memory(self)
        if self._memory is None:
            self._fetch = _Fetch(self._states, self)

    # -- in the thread of the update --------------------------------------------------------------------

    def run(self, update: Callable[[], None]) -> bool:
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            try:
                slot = self._states.checking(fetch.wait)
            except XdsError:
                return False
            self._is_slot = True
            self._point_to(slot)
        if self._states.has_failed:
            self._drop(None)
            return False
        try:
            update()
        except BaseException as error:
            self._states.fail(error)
            self._drop(None)
            raise
        self._leave()
        return True

    # -- both -------------------------------------------------------------------------------------------

    def start_read(self, memory: Tensor) -> Ticket | None:
        """Read what the extent holds into `memory`; None: it holds nothing yet."""
        if self._written is not None:
            self._states.checking(self._written.wait)  # the read would wait for it as well
        num_bytes = self._num_used * self._region_bytes
        if not num_bytes:
            return None
        return self._states.file.read(self.extent, memory[:num_bytes])

    def check_written(self) -> None:
        """Raises XdsError: the last write is done and has failed."""
        if self._written is not None and self._written.is_done():
            self._states.checking(self._written.wait)

    def _leave(self) -> Ticket:
        """Keep new states, write everything back, and let the tensors read as NaN."""
        assert self._memory is not None
        try:
            self._adopt_states()
            ticket = self._states.file.write(
                self.extent, self._memory[: self._num_used * self._region_bytes]
            )
        except BaseException as error:
            self._states.fail(error)
            self._drop(None)
            raise
        self._written = ticket
        self._drop(ticket)
        return ticket

    def _drop(self, ticket: Ticket | None) -> None:
        """The tensors read as NaN; a slot is free when `ticket` is done."""
        memory, self._memory = self._memory, None
        for tensor, _ in self._views:
            tensor.data = self._placeholder.expand(tensor.shape)
        for tensor, _, _ in self._stored:
            tensor.data = self._placeholder.expand(tensor.shape)
        if self._is_slot:
            assert memory is not None
            self._is_slot = False
            self._states.ring.give(memory, None if ticket is None else partial(_wait, ticket))

    def _adopt_states(self) -> None:
        """Give every state of the optimizer a region, as far as there are some, and copy new ones there."""
        assert self._memory is not None
        stored = []
        for start, owner, state in self._find_states():
            taken = {self._regions[start, key] for key in state if (start, key) in self._regions}
            for key, value in state.items():
                if not self._fits(value, owner):
                    continue
                if (start, key) not in self._regions:
                    free = set(range(self._first, self._num_regions)) - taken
                    if not free:
                        self._states.warn_kept(key)
                        continue
                    self._regions[start, key] = min(free)
                    taken.add(min(free))
                region = self._regions[start, key]
                place = self._place(region, start, value)
                if value.data_ptr() != place.data_ptr():
                    place.copy_(value)
                    value.data = place
                self._num_used = max(self._num_used, region + 1)
                stored.append((value, region, start))
        kept = {id(tensor) for tensor, _, _ in stored}
        for tensor, _, _ in self._stored:
            if id(tensor) not in kept:  # the optimizer has replaced it
                tensor.data = self._placeholder.expand(tensor.shape)
        self._stored = stored

    def _fits(self, value: object, owner: Tensor) -> bool:
        return (
            isinstance(value, Tensor)
            and value.dim() > 0
            and value.numel() == owner.numel()
            and value.dtype == self._dtype
            and value.device.type == "cpu"
            and value.is_contiguous()
        )

    def _point_to(self, memory: Tensor) -> None:
        self._states.check_placeholders()
        self._memory = memory
        for tensor, start in self._views:
            tensor.data = self._place(MAIN, start, tensor)
        for tensor, region, start in self._stored:
            tensor.data = self._place(region, start, tensor)

    def _place(self, region: int, start: int, like: Tensor) -> Tensor:
        """The place in memory of elements of a region: a tensor of the shape and dtype of `like`."""
        assert self._memory is not None
        first = region * self._region_bytes
        flat = self._memory[first : first + self._numel * self._dtype.itemsize].view(self._dtype)
        return flat[start : start + like.numel()].view(like.shape)

    def _new_memory(self) -> Tensor:
        return host_memory(self._num_regions * self._region_bytes, pin=False)

    # -- reading without memory -------------------------------------------------------------------------

    def is_stored(self, tensor: Tensor) -> bool:
        return self._region_of(tensor) is not None

    def blocks_of(self, tensor: Tensor) -> Blocks | None:
        found = self._region_of(tensor)
        if found is None or self._memory is not None:
            return None
        region, first = found

        def blocks(start: int, stop: int) -> Iterator[Tensor]:
            if self._memory is not None:  # it was brought since
                yield tensor.view(-1)[start:stop]
                return
            self._states.raise_failure()
            if self._written is not None:
                self._states.checking(self._written.wait)
            size = self._dtype.itemsize
            at = region * self._region_bytes + first * size
            extent = self.extent
            for block in read_blocks(
                self._states.file, extent, at + start * size, at + stop * size
            ):
                yield block.view(self._dtype)

        return blocks

    def _region_of(self, tensor: Tensor) -> tuple[int, int] | None:
        for view, start in self._views:
            if view is tensor:
                return MAIN, start
        for state, region, start in self._stored:
            if state is tensor:
                return region, start
        return None

    @property
    def disk_bytes(self) -> int:
        stored = [tensor.numel() for tensor, _, _ in self._stored]
        return (self._first * self._numel + sum(stored)) * self._dtype.itemsize

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory in use, without slots of the ring."""
        return 0 if self._memory is None or self._is_slot else self._memory.numel()


@final
class StatesOnDisk(StateHome):
    """Owns the file, the ring and the thread that starts reads. Everything fails after the first failure."""

    is_on_disk = True

    def __init__(
        self,
        folder: Path,
        options: DiskOptions,
        rank: int,
        *,
        num_states: int,
        fetches: Lane | None = None,
    ) -> None:
        """
        Args:
            folder: `offload_optimizer.nvme_path`.
            num_states: state tensors of the optimizer of a parameter's size. More stay in memory.
        """
        self.fetches = fetches or ThreadLane("xds-fetch")
        self._placeholders: dict[torch.dtype, Tensor] = {}
        self._folder = folder
        self._options = options
        self._rank = rank
        self._num_states = num_states
        self._extents = Extents()
        self._file: DiskFile | None = None
        self._ring: Ring | None = None
        self._all: list[OnDisk] = []
        self._in_memory: dict[int, OnDisk] = {}  # by id, the last one used is last
        self._writes: deque[Ticket] = deque()
        self._holds = 0
        self._failure: BaseException | None = None
        self._has_warned = False

    def plan(self, index: int, numel: int, itemsize: int) -> None:
        region_bytes = aligned(numel * itemsize)
        self._extents.add(str(index), (1 + self._num_states) * region_bytes)

    def open(self) -> None:
        self._file = DiskFile(self._folder, self._extents.total_bytes, self._options, self._rank)
        largest = max((extent.padded_bytes for extent in self._extents), default=0)
        if largest:
            self._ring = Ring(largest, min(NUM_SLOTS, len(self._extents)), pin=False)

    @property
    def file(self) -> DiskFile:
        assert self._file is not None, "open() comes first"
        return self._file

    @property
    def ring(self) -> Ring:
        assert self._ring is not None, "open() comes first"
        return self._ring

    def residence(self, index: int, master: Tensor, *, holds_master: bool) -> Residence:
        return OnDisk(self, self._extents[str(index)], master, holds_master=holds_master)

    def add(self, residence: OnDisk) -> None:
        """It uses the file."""
        self._all.append(residence)

    # -- what is in memory ------------------------------------------------------------------------------

    def note_memory(self, residence: OnDisk) -> None:
        """It is in memory, and used now; others that were not used for long are moved away."""
        self._in_memory.pop(id(residence), None)
        self._in_memory[id(residence)] = residence
        while len(self._in_memory) > KEPT and not self._holds:
            self._move_away(next(iter(self._in_memory.values())))

    def forget_memory(self, residence: OnDisk) -> None:
        """An update moves it away."""
        self._in_memory.pop(id(residence), None)

    def _move_away(self, residence: OnDisk) -> None:
        """Errors of the disk are kept for `failure`."""
        del self._in_memory[id(residence)]
        self._writes.append(residence.move_away())
        while len(self._writes) > WRITES_IN_FLIGHT:
            with suppress(XdsError):
                self.checking(self._writes.popleft().wait)

    @contextmanager
    def hold(self) -> Iterator[None]:
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            while self._in_memory and not self._holds:
                self._move_away(next(iter(self._in_memory.values())))

    # -- failures ---------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """From now on no update runs, and every read raises the first error: some states are lost."""
        self._failure = self._failure or error

    @property
    def has_failed(self) -> bool:
        """Some states are lost."""
        return self._failure is not None

    def failure(self) -> str:
        for residence in self._all:
            with suppress(XdsError):
                residence.check_written()
        if self._failure is None:
            return ""
        return (
            f"{self._failure}; some optimizer states are lost: start again from the last checkpoint"
        )

    def raise_failure(self) -> None:
        """Raises XdsError: something has failed before."""
        if self._failure is not None:
            raise XdsError(self.failure()) from self._failure

    def checking(self, wait: Callable[[], Value]) -> Value:
        """`wait()`; remembers its error."""
        try:
            return wait()
        except XdsError as error:
            self.fail(error)
            raise

    def placeholder(self, dtype: torch.dtype) -> Tensor:
        """What tensors read as while they are on the disk: NaN, of shape []."""
        return self._placeholders.setdefault(dtype, torch.full((), torch.nan, dtype=dtype))

    def check_placeholders(self) -> None:
        """Raises UsageError: the script wrote to a tensor that was on the disk."""
        for placeholder in self._placeholders.values():
            if not bool(placeholder.isnan()):
                placeholder.fill_(torch.nan)
                raise UsageError(_LOST_WRITE)

    def warn_kept(self, key: str) -> None:
        """Log, once, that a state has no place in the file."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "xds: the optimizer has more states than the %d for which there is space on the disk: %s and "
                "further ones stay in host memory",
                self._num_states,
                key,
            )

    @property
    def host_bytes(self) -> int:
        ring = 0 if self._ring is None else self._ring.allocated_bytes
        return ring + sum(residence.memory_bytes for residence in self._in_memory.values())

    def close(self) -> None:
        self.fetches.close()
        if self._file is not None:
            self._file.close()


def _wait(ticket: Ticket) -> None:
    """Return when the slot is free. An error is raised where the values are wanted."""
    with suppress(XdsError):
        ticket.wait()


__all__ = ["OnDisk", "StatesOnDisk"]
