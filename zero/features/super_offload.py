"""Updates that run during backward, before the norm of their step is known.

backward     | unit 3 | unit 2 | unit 1 | unit 0 |          step(): the norm is known
updates               | adam unit 3 | adam unit 1 | adam unit 0 | adam unit 2 |
to_device                                           copy unit 1 | copy unit 0 | ...

A speculation assumes that the step is neither clipped nor skipped. It writes master, states and parameters to
spare memory; the tensors stay the same objects. If `step()` finds the same inputs, the new values are used, and
the old memory becomes spare. Otherwise the tensors return to the old memory, and the update runs again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from ...offload.places import Done, Ticket
from ...offload.spare import Room, Spare
from ...ops.optim.shard_optimizer import Old, states_of
from ..core.grad_bucket import EarlyUpdate
from ..core.master import Master
from .host_updates import HostUpdate, HostUpdates, UpdateAndCopy, start


@final
class _States:
    """The tensors that an update of `master` changes. `swap` gives them other memory, `restore` the old one."""

    def __init__(self, master: Master, optimizer: torch.optim.Optimizer) -> None:
        self._master = master
        self._optimizer = optimizer
        self._dicts = [dict(states_of(optimizer).get(item.master, {})) for item in master.items]
        self._flat = [
            (at, key, value)
            for at, state in enumerate(self._dicts)
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

    def swap(self, room: Room) -> list[Old]:
        """Move to the memory of `room`, which takes the old memory. Returns the old values of each item."""
        master, new = self._master, room.memory
        self._old = [master.raw.detach(), *(value.detach() for _, _, value in self._flat)]
        states: list[dict[str, Tensor]] = [{} for _ in master.items]
        for (at, key, _), old in zip(self._flat, self._old[1:], strict=True):
            states[at][key] = old
        self._move(new)
        room.memory = [_bytes_of(old) for old in self._old]
        return [
            Old(self._old[0][item.start : item.start + item.master.numel()], state)
            for item, state in zip(master.items, states, strict=True)
        ]

    def restore(self, room: Room) -> None:
        """Move back, with the old values; states that were not there are removed."""
        if self._old:
            new = [self._master.raw.detach(), *(value.detach() for _, _, value in self._flat)]
            self._move(self._old)
            room.memory = [_bytes_of(each) for each in new]
        for value, count in self._counts:
            value.copy_(count)
        for item, state in zip(self._master.items, self._dicts, strict=True):
            if state:
                states_of(self._optimizer)[item.master].clear()
                states_of(self._optimizer)[item.master].update(state)
            else:
                states_of(self._optimizer).pop(item.master, None)

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

    def __init__(self, update: HostUpdate, optimizer: torch.optim.Optimizer) -> None:
        self.master = master = update.master
        self._update = update
        self._optimizer = optimizer
        self._sum, self._sum_arrives = master.grads.home.arriving()
        # `compute` waits, so it is not read in the thread
        self._compute = None if master.crosses_device else master.compute
        self._room: Room | None = None
        self._last_reader: Ticket = Done()
        self._states: _States | None = None
        self._is_done = threading.Event()
        self._error: BaseException | None = None

    # -- in the thread of updates -----------------------------------------------------------------------

    def reserve(self, spare: Spare) -> bool:
        """False: there is too little spare memory, so it cannot run."""
        self._states = _States(self.master, self._optimizer)
        self._room = spare.take(self._states.sizes, _values_bytes(self.master))
        if self._room is None:
            return False
        self._last_reader = self._room.reader  # now: `use` may set its own before `run` looks
        return True

    def release(self, spare: Spare) -> None:
        """Its result was used, or undone."""
        if self._room is not None:
            spare.give(self._room)

    def run(self) -> None:
        """Update, in the memory of the room."""
        try:
            self._run()
        except BaseException as error:  # raised where its result is wanted
            self._error = error
        self._is_done.set()

    def _run(self) -> None:
        assert self._room is not None and self._states is not None
        self._sum_arrives.wait()
        self._last_reader.wait()
        old = self._states.swap(self._room)
        values = self._values()
        if self._compute is None:
            self._update.write_across(self._sum, values, old)
        else:
            self._update.write_in_place(self._sum, values, old)

    def _values(self) -> Tensor:
        assert self._room is not None
        return self._room.values(self.master.params.dtype)

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
        assert self._states is not None and self._room is not None
        self._states.restore(self._room)

    def fits(self, update: HostUpdate) -> bool:
        """`update` is what it has computed."""
        return self._update.is_same_as(update)

    def use(self) -> Ticket:
        """Start to publish the new values; the result completes when forward can read them."""
        return self._use_across() if self._compute is None else self._use_in_place(self._compute)

    def _use_across(self) -> UpdateAndCopy:
        assert self._room is not None
        host, compute = self.master.host, self.master.begin_send()
        mark, arrival = host.lanes.to_device.mark(), UpdateAndCopy()

        def work() -> None:
            self.wait()
            arrival.sent(self.master.send_kept(self._values(), compute, mark))

        ticket = host.lanes.updates.run(work)
        arrival.begin(ticket)
        self.master.begin_update(ticket)
        self._room.reader = arrival
        return arrival

    def _use_in_place(self, compute: Tensor) -> Ticket:
        def work() -> None:
            self.wait()
            compute.copy_(self._values())

        assert self._room is not None
        self._room.reader = ticket = self.master.host.lanes.updates.run(work)
        self.master.begin_update(ticket)
        return ticket


@final
class SuperOffload:
    """Starts speculations when sums have left for the host, and gives them to the step.

    The last sum that has left is the first one to be used for a speculation: its unit comes first in forward.
    """

    def __init__(self, masters: Iterable[Master], updates: HostUpdates, spare: Spare) -> None:
        self.num_used = 0
        self._updates = updates
        self._optimizer = updates.optimizer
        self._spare = spare
        self._scale: float | None = None
        self._has_stepped = False
        self._running: dict[int, Speculation] = {}  # by id of the master
        self._waiting: list[Speculation] = []  # those that have not begun
        self._has_rooms = False
        self._choosing = threading.Lock()  # which ones begin
        # without a copy the parameters themselves are the master: user code would read new values
        found = [
            m
            for m in masters
            if m.home.is_on_host
            and m.has_compute_copy
            and not (m.residence.is_on_disk or m.params.is_on_disk)
        ]
        self._masters = found
        for master in found:
            master.grads.early_update = _EarlyUpdate(self, master)

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
        speculation = Speculation(update, self._optimizer)
        with self._choosing:
            self._running[id(master)] = speculation
            self._waiting.append(speculation)
        master.host.lanes.updates.run(self._run_latest)

    def _run_latest(self) -> None:
        with self._choosing:
            if not self._waiting:
                return
            if not self._has_rooms:
                self._make_rooms()
            speculation = self._waiting.pop()
            if not speculation.reserve(self._spare):
                del self._running[id(speculation.master)]
                return
        speculation.run()

    def _make_rooms(self) -> None:
        """Allocate for all masters at the first one: how many a step begins depends on timing.

        Locking pages later would stall the device in the middle of training.
        """
        self._has_rooms = True
        rooms = [
            self._spare.take(_States(each, self._optimizer).sizes, _values_bytes(each))
            for each in self._masters
        ]
        for room in rooms:
            if room is not None:
                self._spare.give(room)

    def undo(self, master: Master) -> None:
        """Undo a speculation: somebody reads the states of `master`, or its gradients change."""
        with self._choosing:
            speculation = self._running.pop(id(master), None)
            if speculation in self._waiting:
                self._waiting.remove(speculation)
                return
        if speculation is not None:
            speculation.undo()
            speculation.release(self._spare)

    def start_rest(self, updates: Sequence[HostUpdate]) -> list[Ticket]:
        """Use the speculations that fit the `updates` of a step, undo the others, and start the rest.

        Returns:
            for each update a ticket that completes when forward can read the new values.
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

    def _use(self, update: HostUpdate) -> Ticket | None:
        speculation = self._running.pop(id(update.master), None)
        if speculation is None:
            return None
        self.num_used += 1
        ticket = speculation.use()
        speculation.release(self._spare)
        return ticket


@final
class _EarlyUpdate(EarlyUpdate):
    """The speculation of one master."""

    def __init__(self, owner: SuperOffload, master: Master) -> None:
        self._owner, self._master = owner, master

    def sum_left(self) -> None:
        self._owner.begin(self._master)

    def take_back(self) -> None:
        self._owner.undo(self._master)


__all__ = ["SuperOffload"]
