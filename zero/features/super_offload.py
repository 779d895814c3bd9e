"""Updates that run during backward, before the norm of their step is known.

backward     | unit 3 | unit 2 | unit 1 | unit 0 |          step(): the norm is known
updates               | adam unit 3 | adam unit 1 | adam unit 0 | adam unit 2 |
to_device                                           copy unit 1 | copy unit 0 | ...

A speculation assumes that the step is neither clipped nor skipped. It writes master, states and parameters to
undo buffers; the tensors stay the same objects. If `step()` finds the same inputs, the new values are used, and
the old memory becomes the undo buffers. Otherwise the old memory is used again, and the update runs again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from ...offload.interfaces import FinishedJob, JobHandle
from ...offload.undo_pool import UndoBuffers, UndoPool
from ...ops.optim.shard_optimizer import Old, ShardOptimizer
from ..core.master import Master
from ..core.reduced_sum import EarlyUpdate
from .host_updates import HostUpdate, HostUpdates, UpdateAndCopy, start


@final
class _States:
    """The tensors that an update of `master` changes. `swap` gives them other memory, `restore` the old one."""

    def __init__(self, master: Master, optimizer: ShardOptimizer) -> None:
        self._master = master
        self._optimizer = optimizer
        self._dicts = [dict(optimizer.states.get(item.master, {})) for item in master.items]
        self._flat = [
            (number, key, value)
            for number, state in enumerate(self._dicts)
            for key, value in state.items()
            if isinstance(value, Tensor) and value.dim()
        ]
        self._counts = [
            (value, value.clone())
            for state in self._dicts
            for value in state.values()
            if isinstance(value, Tensor) and not value.dim()
        ]
        self._old: list[Tensor] = []

    @property
    def sizes(self) -> list[int]:
        """The bytes of each tensor: the master and the states."""
        return [self._master.raw.nbytes, *(value.nbytes for _, _, value in self._flat)]

    def swap(self, buffers: UndoBuffers) -> list[Old]:
        """Move to the memory of `buffers`, which takes the old memory. Returns the old values of each item."""
        master, new = self._master, buffers.memory
        self._old = [master.raw.detach(), *(value.detach() for _, _, value in self._flat)]
        states: list[dict[str, Tensor]] = [{} for _ in master.items]
        for (number, key, _), old in zip(self._flat, self._old[1:], strict=True):
            states[number][key] = old
        self._move(new)
        buffers.memory = [_bytes_of(old) for old in self._old]
        return [
            Old(self._old[0][item.start : item.start + item.master.numel()], state)
            for item, state in zip(master.items, states, strict=True)
        ]

    def restore(self, buffers: UndoBuffers) -> None:
        """Move back, with the old values; states that were not there are removed."""
        if self._old:
            new = [self._master.raw.detach(), *(value.detach() for _, _, value in self._flat)]
            self._move(self._old)
            buffers.memory = [_bytes_of(each) for each in new]
        for value, count in self._counts:
            value.copy_(count)
        for item, state in zip(self._master.items, self._dicts, strict=True):
            if state:
                self._optimizer.states[item.master].clear()
                self._optimizer.states[item.master].update(state)
            else:
                self._optimizer.states.pop(item.master, None)

    def _move(self, memory: Sequence[Tensor]) -> None:
        self._master.use_memory(memory[0].view(self._master.raw.dtype))
        for (_, _, value), new in zip(self._flat, memory[1:], strict=True):
            start = int(new.storage_offset()) * new.element_size() // value.element_size()
            value.set_(new.untyped_storage(), start, value.shape, value.stride())


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _values_bytes(master: Master) -> int:
    """The bytes of the new values of parameters."""
    return master.raw.numel() * master.params.dtype.itemsize


@final
class Speculation:
    """One update before its norm is known. Its result is used once, or taken back."""

    def __init__(self, update: HostUpdate, optimizer: ShardOptimizer, number: int) -> None:
        """number: of this speculation among all of an engine."""
        self.number = number
        self.master = master = update.master
        self._update = update
        self._optimizer = optimizer
        self._sum, self._sum_arrives = master.grads.total.store.pending_total()
        # `compute` waits, so it is not read in the thread
        self._compute = None if master.crosses_device else master.compute
        self._buffers: UndoBuffers | None = None
        self._last_reader: JobHandle = FinishedJob()
        self._states: _States | None = None
        self._is_done = threading.Event()
        self._error: BaseException | None = None

    # -- in the thread of updates -----------------------------------------------------------------------

    def can_run_as(self, number: int) -> bool:
        """In the job of speculation `number`. The thread may still have to add to sums that were sent later."""
        return self.number <= number or self._sum_arrives.is_done

    def reserve(self, undo_pool: UndoPool) -> bool:
        """False: there is too little memory, so it cannot run."""
        self._states = _States(self.master, self._optimizer)
        self._buffers = undo_pool.take(self._states.sizes, _values_bytes(self.master))
        if self._buffers is None:
            return False
        self._last_reader = self._buffers.reader  # now: `use` may set its own before `run` looks
        return True

    def release(self, undo_pool: UndoPool) -> None:
        """Its result was used, or undone."""
        if self._buffers is not None:
            undo_pool.give(self._buffers)

    def run(self) -> None:
        """Update, in the memory of the buffers."""
        try:
            self._run()
        except BaseException as error:  # raised where its result is wanted
            self._error = error
        self._is_done.set()

    def _run(self) -> None:
        assert self._buffers is not None and self._states is not None
        self._sum_arrives.wait()
        self._last_reader.wait()
        old = self._states.swap(self._buffers)
        values = self._values()
        if self._compute is None:
            self._update.write_across(self._sum, values, old)
        else:
            self._update.write_in_place(self._sum, values, old)

    def _values(self) -> Tensor:
        assert self._buffers is not None
        return self._buffers.values(self.master.params.dtype)

    # -- the result -------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Return when it has run. Raises what it raised."""
        self._is_done.wait()
        if self._error is not None:
            raise self._error

    def undo(self) -> None:
        """Master and states have their old bits on return."""
        try:
            self.wait()
        finally:
            self._restore()

    def _restore(self) -> None:
        assert self._states is not None and self._buffers is not None
        self._states.restore(self._buffers)

    def fits(self, update: HostUpdate) -> bool:
        """`update` is what it has computed."""
        return self._update.is_same_as(update)

    def use(self) -> JobHandle:
        """Start to publish the new values; the result completes when forward can read them."""
        return self._use_across() if self._compute is None else self._use_in_place(self._compute)

    def _use_across(self) -> UpdateAndCopy:
        assert self._buffers is not None
        host, compute = self.master.host, self.master.begin_send()
        mark, arrival = host.queues.to_device.mark(), UpdateAndCopy()

        def work() -> None:
            self.wait()
            arrival.sent(host.copier.copy(self._values(), compute, mark))

        handle = host.queues.updates.run(work)
        arrival.begin(handle)
        self.master.begin_update(handle)
        self._buffers.reader = arrival
        return arrival

    def _use_in_place(self, compute: Tensor) -> JobHandle:
        def work() -> None:
            self.wait()
            compute.copy_(self._values())

        assert self._buffers is not None
        self._buffers.reader = handle = self.master.host.queues.updates.run(work)
        self.master.begin_update(handle)
        return handle


@final
class SuperOffload:
    """Starts speculations when sums are sent to the host, and gives their results to the step.

    The sum that was sent last is used first: its unit is the first one in forward.
    """

    def __init__(
        self, masters: Iterable[Master], updates: HostUpdates, undo_pool: UndoPool
    ) -> None:
        self.num_used = 0
        self._updates = updates
        self._optimizer = updates.optimizer
        self._undo_pool = undo_pool
        self._scale: float | None = None
        self._has_stepped = False
        self._running: dict[int, Speculation] = {}  # by id of the master
        self._waiting: list[Speculation] = []  # those that have not begun
        self._num_begun = 0
        self._has_buffers = False
        self._choosing = threading.Lock()  # which ones begin
        # without a copy the parameters themselves are the master: user code would read new values
        offloaded = [
            master
            for master in masters
            if master.store.is_on_host
            and master.has_compute_copy
            and not (master.state_storage.is_on_disk or master.params.is_on_disk)
        ]
        self._masters = offloaded
        for master in offloaded:
            master.grads.total.early_update = _EarlyUpdate(self, master)

    def expect(self, scale: float | None) -> None:
        """The step of the backward that begins is expected to multiply gradients by `scale`. None: unknown."""
        self._scale = scale

    def begin(self, master: Master) -> None:
        """The last sum of `master` is on its way to the host."""
        if self._scale is None or not self._has_stepped:
            return
        update = self._updates.prepare(master, self._scale)
        if update.frozen or update.takes_edits:  # the new memory would need the old values
            return
        self._num_begun = number = self._num_begun + 1
        speculation = Speculation(update, self._optimizer, number)
        with self._choosing:
            self._running[id(master)] = speculation
            self._waiting.append(speculation)
        master.host.queues.updates.run(partial(self._run_latest, number))

    def _run_latest(self, number: int) -> None:
        """The job of speculation `number` runs the latest one that it can run."""
        with self._choosing:
            found = [each for each in self._waiting if each.can_run_as(number)]
            if not found:
                return
            if not self._has_buffers:
                self._make_buffers()
            speculation = found[-1]
            self._waiting.remove(speculation)
            if not speculation.reserve(self._undo_pool):
                del self._running[id(speculation.master)]
                return
        speculation.run()

    def _make_buffers(self) -> None:
        """Allocate for all masters at the first one: how many a step begins depends on timing.

        Locking pages later would stall the device in the middle of training.
        """
        self._has_buffers = True
        buffers = [
            self._undo_pool.take(_States(each, self._optimizer).sizes, _values_bytes(each))
            for each in self._masters
        ]
        for each in buffers:
            if each is not None:
                self._undo_pool.give(each)

    def undo(self, master: Master) -> None:
        """Undo a speculation: somebody reads the states of `master`, or its gradients change."""
        with self._choosing:
            speculation = self._running.pop(id(master), None)
            if speculation in self._waiting:
                self._waiting.remove(speculation)
                return
        if speculation is not None:
            speculation.undo()
            speculation.release(self._undo_pool)

    def start_rest(self, updates: Sequence[HostUpdate]) -> list[JobHandle]:
        """Use the speculations that fit the `updates` of a step, undo the others, and start the rest.

        Returns:
            for each update a handle that completes when forward can read the new values.
        """
        self._scale, self._has_stepped = None, True
        with self._choosing:  # what has not begun runs in the order of forward instead
            for speculation in self._waiting:
                del self._running[id(speculation.master)]
            self._waiting = []
        for update in updates:
            begun = self._running.get(id(update.master))
            if begun is not None and not begun.fits(update):
                self.undo(update.master)
        return [self._use(update) or start(update) for update in updates]

    def _use(self, update: HostUpdate) -> JobHandle | None:
        speculation = self._running.pop(id(update.master), None)
        if speculation is None:
            return None
        self.num_used += 1
        handle = speculation.use()
        speculation.release(self._undo_pool)
        return handle


@final
class _EarlyUpdate(EarlyUpdate):
    """The speculation of one master."""

    def __init__(self, owner: SuperOffload, master: Master) -> None:
        self._owner, self._master = owner, master

    def sum_sent(self) -> None:
        self._owner.begin(self._master)

    def undo(self) -> None:
        self._owner.undo(self._master)


__all__ = ["SuperOffload"]
