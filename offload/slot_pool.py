"""A fixed number of page-aligned slots of host memory, through which states are copied to and from a disk.

In use:

    slot = pool.take()                       # waits until a slot is free
    slot[:num_bytes].copy_(states)
    pending = disk.write(extent, slot)
    pool.give(slot, after=pending.wait)      # free when the write is done
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable
from typing import final

from torch import Tensor

from ..utils.errors import XdsError
from .pinned import host_memory

NO_THREAD = 0  # no thread has this identifier


@final
class SlotPool:
    """`num_slots` uint8 tensors of shape [num_bytes_of_slot], in one block of host memory.

    Threads may share a pool.
    Args:
        num_bytes_of_slot: rounded up to whole pages.
        pin: page-lock the memory; see `host_memory`.
    Raises:
        UsageError: the system has too little memory.
    """

    def __init__(self, num_bytes_of_slot: int, num_slots: int, *, pin: bool) -> None:
        assert num_bytes_of_slot > 0 and num_slots > 0
        self._slot_bytes = -(-num_bytes_of_slot // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = host_memory(self._slot_bytes * num_slots, pin=pin)
        self._changed = threading.Condition()
        self._free = deque(range(num_slots))
        self._pending: deque[tuple[int, Callable[[], object]]] = deque()  # given, still in use
        self._takers: dict[int, int] = {}  # taken slot -> the thread that took it
        self._num_waited_for = 0  # pending slots that a thread waits for in `take`

    @property
    def allocated_bytes(self) -> int:
        """The size of all slots."""
        return self._memory.numel()

    def take(self) -> Tensor:
        """A free slot of shape [num_bytes_of_slot, rounded up to pages]; waits until there is one.

        Raises:
            XdsError: the calling thread holds all slots, so it would wait for itself.
            Exception: what the `after` of a given slot raised. That slot is free again.
        """
        with self._changed:
            while not self._free and not self._pending:
                self._check_others_hold_slots()
                self._changed.wait()
            if self._free:
                return self._hand_out(self._free.popleft())
            index, after = self._pending.popleft()
            self._num_waited_for += 1
        try:
            after()
        except BaseException as error:
            with self._changed:
                self._num_waited_for -= 1
                if isinstance(error, Exception):
                    self._free.append(index)
                else:  # interrupted: the slot is still in use
                    self._pending.appendleft((index, after))
                self._changed.notify()
            raise
        with self._changed:
            self._num_waited_for -= 1
            return self._hand_out(index)

    def hand_over(self, slot: Tensor) -> None:
        """Another thread will `give` a slot that this thread took, so this thread may wait for it in `take`.

        Raises:
            XdsError: `slot` is not a slot that is taken.
        """
        with self._changed:
            self._takers[self._index_of(slot)] = NO_THREAD

    def give(self, slot: Tensor, after: Callable[[], object] | None = None) -> None:
        """Return a slot that `take` gave out, from any thread.

        Args:
            after: returns when the slot is no longer used, such as `pending.wait` or `event.synchronize`.
                `take` calls it before it gives out the slot again. None: it is free at once.
        Raises:
            XdsError: `slot` is not a slot that is taken.
        """
        with self._changed:
            index = self._index_of(slot)
            del self._takers[index]
            if after is None:
                self._free.append(index)
            else:
                self._pending.append((index, after))
            self._changed.notify()

    def _index_of(self, slot: Tensor) -> int:
        index, rest = divmod(slot.data_ptr() - self._memory.data_ptr(), self._slot_bytes)
        if rest or index not in self._takers:
            raise XdsError(
                "internal error: a tensor was given to a slot pool that did not hand it out"
            )
        return index

    def _hand_out(self, index: int) -> Tensor:
        self._takers[index] = threading.get_ident()
        return self._memory[index * self._slot_bytes : (index + 1) * self._slot_bytes]

    def _check_others_hold_slots(self) -> None:
        if not self._num_waited_for and set(self._takers.values()) == {threading.get_ident()}:
            raise XdsError(
                f"internal error: one thread holds all {len(self._takers)} slots of a pool and takes "
                "another one; give a slot first, or make the pool larger"
            )
