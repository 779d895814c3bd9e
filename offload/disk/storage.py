"""A master and its states in one extent of the file: read before an update, written back after it.

extent   | master | state 0 | state 1 | ...      regions of equal size, each aligned
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import final

from torch import Tensor

from ...ops.coded import has_elements, is_coded, place_of
from ...ops.flat import flattened, is_channels_last, shaped
from ...utils.errors import XdsError
from ..interfaces import Blocks, JobHandle, OptimizerStates, StateStorage
from ..pinned import host_memory
from .blocks import read_blocks
from .extents import Extent
from .file import PendingRequest
from .lru_cache import Evictable, LruCache
from .transfers import Transfers, wait_quietly

log = logging.getLogger("xds")
MAIN = 0  # the region of the master; states are in the regions after it


@final
class _Fetch:
    """A read on its way to a slot of the pool."""

    def __init__(
        self, transfers: Transfers, storage: DiskStorage, after: JobHandle | None = None
    ) -> None:
        """after: it reads when this is done."""
        self._transfers = transfers
        self._after = after
        self._storage = storage
        self._slot: Tensor | None = None
        self._read: PendingRequest | None = None
        self._started: JobHandle = transfers.fetches.run(self._start)

    def _start(self) -> None:
        if self._after is not None:
            self._after.wait()
        pool = self._transfers.slots
        slot = pool.take()
        pool.hand_over(slot)
        try:
            self._read = self._storage.start_read(slot)
        except BaseException:
            pool.give(slot)
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
            self._transfers.slots.give(self._slot)
            raise
        return self._slot


@final
class DiskStorage(StateStorage, Evictable):
    """One extent of the file, divided into regions of equal size: the master, and one for each state.

    Between uses the tensors read as NaN: they are a single element in memory.
    """

    is_on_disk = True

    def __init__(
        self,
        transfers: Transfers,
        cache: LruCache,
        extent: Extent,
        master: Tensor,
        *,
        region_bytes: int,
        holds_master: bool,
    ) -> None:
        """region_bytes: of the master, and of each state."""
        self.extent = extent
        self._transfers = transfers
        self._cache = cache
        self._numel, self._dtype = master.numel(), master.dtype
        self._region_bytes = region_bytes
        self._first = MAIN + 1 if holds_master else MAIN
        self._num_regions = extent.padded_bytes // region_bytes
        self._num_used = self._first
        self._views: list[tuple[Tensor, int, bool]] = []  # and whether it is channels_last
        self._states: OptimizerStates | None = None
        # where each state is: (first element of the optimizer's tensor, key) -> region
        self._regions: dict[tuple[int, str], int] = {}
        # states, their regions, first elements, and whether they are channels_last
        self._stored: list[tuple[Tensor, int, int, bool]] = []
        self._memory: Tensor | None = None
        self._has_warned = False
        self._is_slot = False  # the memory is a slot of the pool
        self._fetch: _Fetch | None = None
        self._written: PendingRequest | None = None
        if holds_master:
            self._memory = self._new_memory()
            self._view_of(MAIN, 0, master, False).copy_(master)
            self.add_view(master, 0)
            cache.touch(self)

    def add_view(self, view: Tensor, start: int) -> None:
        if self._first == MAIN or not view.numel():
            return
        self._views.append((view, start, is_channels_last(view)))
        if self._memory is None:
            view.data = self._placeholder(view)
        else:
            view.data = self._view_of(MAIN, start, view, is_channels_last(view))

    def bind(self, states: OptimizerStates) -> None:
        self._states = states

    # -- in the thread of user code --------------------------------------------------------------------

    def load(self) -> None:
        self._transfers.raise_failure()
        if self._memory is None:
            memory = self._new_memory()
            read = self.start_read(memory)
            if read is not None:
                self._transfers.noting_failure(read.wait)
            self._use_memory(memory)
        self._cache.touch(self)

    def release(self) -> None:
        self._cache.remove(self)
        self._memory, self._views, self._stored = None, [], []
        self._states = None

    def evict(self) -> PendingRequest:
        """End `load`: start to write what is in memory."""
        return self._write_back()

    @property
    def is_in_memory(self) -> bool:
        """The tensors have their values."""
        return self._memory is not None

    def fetch(self, after: JobHandle | None) -> _Fetch:
        """Start to read into a slot of the pool, when `after` is done. The caller gives the slot back."""
        return _Fetch(self._transfers, self, after)

    def discard(self) -> None:
        """End `load` without writing: new values will be written."""
        if self._memory is not None:
            self._cache.remove(self)
            self._unload(None)

    def write(self, memory: Tensor) -> PendingRequest:
        """Start to write new values, at the start of `memory`, which must not change until it is done."""
        num_bytes = self._num_used * self._region_bytes
        self._written = self._transfers.file.write(self.extent, memory[:num_bytes])
        return self._written

    def start_load(self) -> None:
        self._cache.remove(self)
        if self._memory is None:
            self._fetch = _Fetch(self._transfers, self)

    # -- in the thread of the update --------------------------------------------------------------------

    def run_update(self, update: Callable[[], None]) -> bool:
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            try:
                slot = self._transfers.noting_failure(fetch.wait)
            except XdsError:
                return False
            self._is_slot = True
            self._use_memory(slot)
        if self._transfers.has_failed:
            self._unload(None)
            return False
        try:
            update()
        except BaseException as error:
            self._transfers.fail(error)
            self._unload(None)
            raise
        self._write_back()
        return True

    # -- both -------------------------------------------------------------------------------------------

    def start_read(self, memory: Tensor) -> PendingRequest | None:
        """Read what the extent holds into `memory`; None: it holds nothing yet."""
        if self._written is not None:
            self._transfers.noting_failure(self._written.wait)  # the read would wait for it as well
        num_bytes = self._num_used * self._region_bytes
        if not num_bytes:
            return None
        return self._transfers.file.read(self.extent, memory[:num_bytes])

    def check_written(self) -> None:
        """Raises XdsError: the last write is done and has failed."""
        if self._written is not None and self._written.is_done():
            self._transfers.noting_failure(self._written.wait)

    def _write_back(self) -> PendingRequest:
        """Keep new states, write everything back, and let the tensors read as NaN."""
        assert self._memory is not None
        try:
            self._assign_regions()
            pending = self.write(self._memory)
        except BaseException as error:
            self._transfers.fail(error)
            self._unload(None)
            raise
        self._unload(pending)
        return pending

    def _unload(self, pending: PendingRequest | None) -> None:
        """The tensors read as NaN; a slot is free when `pending` is done."""
        memory, self._memory = self._memory, None
        for tensor, _, _ in self._views:
            tensor.data = self._placeholder(tensor)
        for tensor, _, _, _ in self._stored:
            tensor.data = self._placeholder(tensor)
        if self._is_slot:
            assert memory is not None
            self._is_slot = False
            self._transfers.slots.give(
                memory, None if pending is None else partial(wait_quietly, pending)
            )

    def _assign_regions(self) -> None:
        """Give every state of the optimizer a region, as far as there are some, and copy new ones there."""
        assert self._memory is not None
        stored = []
        for start, owner, state in self._states or ():
            taken = {self._regions[start, key] for key in state if (start, key) in self._regions}
            for key, value in state.items():
                if not self._fits(value, owner):
                    continue
                if (start, key) not in self._regions:
                    free = set(range(self._first, self._num_regions)) - taken
                    if not free:
                        self._warn_kept(key)
                        continue
                    self._regions[start, key] = min(free)
                    taken.add(min(free))
                region = self._regions[start, key]
                last = is_channels_last(value)
                view = self._view_of(region, start, value, last)
                if value.data_ptr() != view.data_ptr():
                    view.copy_(value)
                    value.data = view
                self._num_used = max(self._num_used, region + 1)
                stored.append((value, region, start, last))
        stored_ids = {id(tensor) for tensor, _, _, _ in stored}
        for tensor, _, _, _ in self._stored:
            if id(tensor) not in stored_ids:  # the optimizer has replaced it
                tensor.data = self._placeholder(tensor)
        self._stored = stored

    def _warn_kept(self, key: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "xds: the optimizer has more states than the %d for which there is space on the disk: %s and "
                "further ones stay in host memory",
                self._num_regions - self._first,
                key,
            )

    def _fits(self, value: object, owner: Tensor) -> bool:
        return (
            isinstance(value, Tensor)
            and value.dim() > 0
            and has_elements(value, owner.numel())
            and (value.dtype.is_floating_point or is_coded(value))
            and place_of(value, self._numel) * value.dtype.itemsize <= self._region_bytes
            and value.device.type == "cpu"
            and (value.is_contiguous() or is_channels_last(value))
        )

    def _use_memory(self, memory: Tensor) -> None:
        self._transfers.check_placeholders()
        self._memory = memory
        for tensor, start, last in self._views:
            tensor.data = self._view_of(MAIN, start, tensor, last)
        for tensor, region, start, last in self._stored:
            tensor.data = self._view_of(region, start, tensor, last)

    def _placeholder(self, like: Tensor) -> Tensor:
        return self._transfers.placeholder(like.dtype).expand(like.shape)

    def _view_of(self, region: int, start: int, like: Tensor, channels_last: bool) -> Tensor:
        """The place in memory of elements of a region: a tensor of the shape and dtype of `like`."""
        assert self._memory is not None
        first, size = region * self._region_bytes, like.dtype.itemsize
        flat = self._memory[first : first + place_of(like, self._numel) * size].view(like.dtype)
        begin = place_of(like, start)
        return shaped(flat[begin : begin + like.numel()], like.shape, channels_last)

    def _new_memory(self) -> Tensor:
        return host_memory(self._num_regions * self._region_bytes, pin=False)

    # -- reading without memory -------------------------------------------------------------------------

    def is_stored(self, tensor: Tensor) -> bool:
        return self._region_of(tensor) is not None

    def blocks_of(self, tensor: Tensor) -> Blocks | None:
        place = self._region_of(tensor)
        if place is None or self._memory is not None:
            return None
        region, first = place

        def blocks(start: int, stop: int) -> Iterator[Tensor]:
            if self._memory is not None:  # it was loaded since
                yield flattened(tensor, is_channels_last(tensor))[start:stop]
                return
            self._transfers.raise_failure()
            if self._written is not None:
                self._transfers.noting_failure(self._written.wait)
            size = tensor.dtype.itemsize
            begin = region * self._region_bytes + place_of(tensor, first) * size
            extent = self.extent
            for block in read_blocks(
                self._transfers.file, extent, begin + start * size, begin + stop * size
            ):
                yield block.view(tensor.dtype)

        return blocks

    def _region_of(self, tensor: Tensor) -> tuple[int, int] | None:
        for view, start, _ in self._views:
            if view is tensor:
                return MAIN, start
        for state, region, start, _ in self._stored:
            if state is tensor:
                return region, start
        return None

    @property
    def disk_bytes(self) -> int:
        stored = sum(tensor.nbytes for tensor, _, _, _ in self._stored)
        return self._first * self._numel * self._dtype.itemsize + stored

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory in use, without slots of the pool."""
        return 0 if self._memory is None or self._is_slot else self._memory.numel()


__all__ = ["DiskStorage"]
