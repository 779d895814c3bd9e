"""Updates that run during backward, before the norm of their step is known.

backward     | unit 3 | unit 2 | unit 1 | unit 0 |          step(): the norm is known
updates               | adam unit 3 | adam unit 2 | adam unit 0 | adam unit 1 |
to_device                                         | copy unit 0 | ...

A guess assumes that the step is neither clipped nor skipped. It saves the old master and states in spare
memory and writes new parameters there. If `step()` finds the same inputs, the new parameters are used;
otherwise the old bits are restored, and the update runs again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import final

import torch
from torch import Tensor

from ...offload.lanes import Done, Ticket
from ...offload.spare import MAX_SHARE, Spare
from ...ops.fingerprint import fingerprint
from .host_updates import Arrival, HostUpdate
from .master import Master

ALIGN_BYTES = 64


@final
class _Room:
    """Spare memory of one master: old master and states, a copy of the gradient, new values for forward."""

    def __init__(self, spare: Spare) -> None:
        self._spare = spare
        self._old: Tensor | None = None
        self._values: Tensor | None = None
        self.reader: Ticket = Done()  # of `values`

    def reserve(self, old_bytes: int, values_bytes: int) -> bool:
        """There is memory of at least these sizes."""
        found = (self._grown(self._old, old_bytes), self._grown(self._values, values_bytes, True))
        self._old, self._values = found
        return all(memory is not None for memory in found)

    def _grown(self, had: Tensor | None, num_bytes: int, copied: bool = False) -> Tensor | None:
        if had is not None and had.numel() >= num_bytes:
            return had
        if had is not None:
            self._spare.give_up(had.numel())
        return self._spare.allocate(num_bytes, copied=copied)

    def values(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] for new values."""
        assert self._values is not None
        return self._values[: numel * dtype.itemsize].view(dtype)

    def parts(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """For each tensor memory of its size and dtype, flat."""
        assert self._old is not None
        found, start = [], 0
        for tensor in tensors:
            found.append(self._old[start : start + tensor.nbytes].view(tensor.dtype))
            start += aligned_bytes(tensor)
        return found


def aligned_bytes(tensor: Tensor) -> int:
    """The bytes of `tensor`, rounded up so that the next one is aligned."""
    return -(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES


@final
class _Old:
    """The master and the states before a guess."""

    def __init__(self, master: Master, optimizer: torch.optim.Optimizer) -> None:
        self._keys = [item.master for item in master.items]
        self._optimizer = optimizer
        self._dicts = [dict(optimizer.state.get(key, {})) for key in self._keys]
        self.tensors = [master.raw]
        for state in self._dicts:
            self.tensors += [value for value in state.values() if isinstance(value, Tensor)]
        self._saved: list[Tensor] = []

    def save(self, places: list[Tensor]) -> None:
        """Copy to `places`, one for each of `tensors`."""
        for tensor, place in zip(self.tensors, places, strict=True):
            place.copy_(tensor.view(-1))
        self._saved = places

    def restore(self) -> None:
        """Write the saved values back; states that were not there are removed."""
        for tensor, saved in zip(self.tensors, self._saved, strict=False):
            tensor.view(-1).copy_(saved)
        for key, state in zip(self._keys, self._dicts, strict=True):
            if state:
                self._optimizer.state[key].clear()
                self._optimizer.state[key].update(state)
            else:
                self._optimizer.state.pop(key, None)


@final
class Guess:
    """One update before its norm is known. Its result is used once, or taken back."""

    def __init__(self, update: HostUpdate, optimizer: torch.optim.Optimizer, room: _Room) -> None:
        self._update = update
        self._optimizer = optimizer
        self._room = room
        self._choice = threading.Lock()
        self._has_begun = False
        self._is_cancelled = False
        master = update.master
        self._grad, self._sum_arrives = master.grads.arriving()
        self._compute = None if master.is_far else master.compute  # waits, so not in the thread
        self._old: _Old | None = None
        self._seen: Tensor | None = None  # near: the fingerprint of the values before
        self._ticket = master.host.lanes.updates.run(self._run)

    def _run(self) -> None:
        with self._choice:
            if self._is_cancelled:
                return
            self._has_begun = True
        self._sum_arrives.wait()
        self._room.reader.wait()
        master, room = self._update.master, self._room
        self._old = old = _Old(master, self._optimizer)
        # an update may overwrite its gradient, which the norm or a second try still needs
        *places, grad = room.parts([*old.tensors, self._grad])
        old.save(places)
        grad.copy_(self._grad)
        values = room.values(self._grad.numel(), master.params.dtype)
        if self._compute is None:
            self._update.write_far(grad, values)
        else:
            self._seen = fingerprint(self._compute)
            values.copy_(self._compute)
            self._update.write_near(grad, values)

    def cancel(self) -> bool:
        """False: it has begun already, or is done."""
        with self._choice:
            self._is_cancelled = not self._has_begun
            return self._is_cancelled

    def take_back(self) -> None:
        """Master and states have their old bits on return."""
        if self.cancel():
            return
        try:
            self._ticket.wait()
        finally:
            if self._old is not None:
                self._old.restore()

    def fits(self, update: HostUpdate) -> bool:
        """`update` is what it has computed."""
        return self._update.is_same_as(update)

    def use(self) -> Ticket:
        """Start to publish the new values; the result completes when forward can read them."""
        return self._use_far() if self._compute is None else self._use_near(self._compute)

    def _use_far(self) -> Arrival:
        master, room = self._update.master, self._room
        host, compute = master.host, master.compute
        values = room.values(self._grad.numel(), master.params.dtype)
        mark, arrival = host.lanes.to_device.mark(), Arrival()

        def work() -> None:
            self._ticket.wait()  # done, for the thread is the same; raises what it raised
            room.reader = master.send_kept(values, compute, mark)
            arrival.sent(room.reader)

        ticket = host.lanes.updates.run(work)
        arrival.begin(ticket)
        master.begin_update(ticket)
        return arrival

    def _use_near(self, compute: Tensor) -> Ticket:
        master = self._update.master

        def work() -> None:
            self._ticket.wait()
            assert self._old is not None and self._seen is not None
            if int(
                fingerprint(compute) - self._seen
            ):  # a script has written to the parameters since
                self._old.restore()
                self._update.write_near(self._grad, compute)
            else:
                compute.copy_(self._room.values(self._grad.numel(), master.params.dtype))

        ticket = master.host.lanes.updates.run(work)
        master.begin_update(ticket)
        return ticket


@final
class Guesses:
    """Starts guesses when sums have left for the host, and gives them to the step. Counts both outcomes."""

    def __init__(
        self,
        masters: Iterable[Master],
        optimizer: torch.optim.Optimizer,
        spare: Spare,
        prepare: Callable[[Master, float], HostUpdate],
    ) -> None:
        """prepare: the update of a master with a factor on gradients, and the hyperparameters of now."""
        self.num_used = 0
        self.num_taken_back = 0
        self._optimizer = optimizer
        self._spare = spare
        self._prepare = prepare
        self._scale: float | None = None
        self._rooms: dict[int, _Room] = {}  # by id of the master, like the next one
        self._running: dict[int, Guess] = {}
        # without a copy the parameters themselves are the master: a script would read new values
        found = [m for m in masters if m.home.is_on_host and m.is_apart]
        self._numel = int(MAX_SHARE * sum(master.raw.numel() for master in found))
        self._has_stepped = False
        for master in found:
            master.grads.watch(partial(self._begin, master), partial(self.take_back, master))
            master.watch(partial(self.take_back, master))

    def expect(self, scale: float | None) -> None:
        """The step of the backward that begins is expected to multiply gradients by `scale`. None: unknown."""
        self._scale = scale

    def _begin(self, master: Master) -> None:
        """The last sum of `master` is on its way to the host."""
        if self._scale is None or not self._has_stepped:
            return
        room = self._room(master)
        if room is not None:
            update = self._prepare(master, self._scale)
            self._running[id(master)] = Guess(update, self._optimizer, room)

    def _room(self, master: Master) -> _Room | None:
        room = self._rooms.get(id(master))
        numel = master.raw.numel()
        if room is None and numel > self._numel:
            return None
        if room is None:
            self._numel -= numel
            room = self._rooms[id(master)] = _Room(self._spare)
        sums, _ = master.grads.arriving()
        old = sum(map(aligned_bytes, [*_Old(master, self._optimizer).tensors, sums]))
        return room if room.reserve(old, numel * master.params.dtype.itemsize) else None

    def take_back(self, master: Master) -> None:
        """Undo a guess: somebody reads the states of `master`, or its gradients change."""
        guess = self._running.pop(id(master), None)
        if guess is not None:
            self.num_taken_back += 1
            guess.take_back()

    def end(self, updates: Iterable[HostUpdate]) -> dict[int, Guess]:
        """The guesses that fit the `updates` of a step, by id of the master. The others are taken back."""
        self._scale, self._has_stepped = None, True
        # first, so that the thread does not begin them meanwhile: it runs jobs in the order of backward
        self._running = {at: guess for at, guess in self._running.items() if not guess.cancel()}
        found = {}
        for update in updates:
            guess = self._running.get(id(update.master))
            if guess is not None and guess.fits(update):
                found[id(update.master)] = self._running.pop(id(update.master))
            else:
                self.take_back(update.master)
        self.num_used += len(found)
        return found


__all__ = ["Guess", "Guesses"]
