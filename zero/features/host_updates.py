"""Runs updates on the host, in a thread, while the device computes.

step()       gradient sums are on the host, the norm is known
updates      | adam unit 0 | adam unit 1 | adam unit 2 |
to_device                  | copy unit 0 | copy unit 1 | copy unit 2 |
forward                                    unit 0 ...    stage 3: a unit waits for its own copy
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from ...offload.interfaces import FinishedJob, JobHandle
from ...ops.optim.scale import Scale
from ...ops.optim.shard_optimizer import Old, ShardOptimizer, World
from ..core.master import Master
from ..core.optimizer_tensors import FrozenValues, OptimizerTensors, Range, copies_of

Olds = Sequence[Old] | None


@final
@dataclass(frozen=True)
class HostUpdate:
    """An update of `master` on the host, whose inputs but the gradient are fixed.

    groups: the hyperparameters of the step. scale: the factor on gradients.
    frozen: elements that the update must not change. tensors: those of the optimizer that hold some of them.
    takes_edits: user code has written to forward's values, so they are compared with the master.
    """

    master: Master
    groups: Sequence[dict[str, Any]]
    scale: float
    frozen: Sequence[Range]
    tensors: Sequence[tuple[Tensor, int]]
    takes_edits: bool
    optimizer: ShardOptimizer
    world: World

    def is_same_as(self, other: HostUpdate) -> bool:
        """The other one would write the same values if its gradient is the same."""
        same = (self.scale, self.frozen) == (other.scale, other.frozen)
        same = same and self.takes_edits == other.takes_edits
        used = {item.group for item in self.master.items}
        return same and all(
            _is_same_group(self.groups[number], other.groups[number]) for number in used
        )

    def write_in_place(self, grad: Tensor, values: Tensor | None, old: Olds = None) -> None:
        """Update the master, and where there is a cast `values` as well. In the thread.

        values: have the old ones where `takes_edits`, or where some are frozen.
        """
        frozen = self._keep(values)
        self._run(grad, values, old)
        frozen.restore()

    def write_across(self, grad: Tensor, values: Tensor, old: Olds = None) -> None:
        """Update the master, and write what the device is to have to `values` [n]. In the thread."""
        tensor, casts = self.master.raw, self.master.casts
        frozen = self._keep(None)
        self._run(grad, values if casts else None, old)
        frozen.restore()
        if not casts:
            values.copy_(tensor)
        for low, high in self.frozen if casts else ():
            values[low:high].copy_(tensor[low:high])

    def _run(self, grad: Tensor, values: Tensor | None, old: Olds) -> None:
        """
        Args:
            grad: [n].
            values: the place of the values in the compute dtype, if there is a cast.
            old: for each item of the master the values before, where they are in other memory.
        """
        updates = self.master.updates(self.groups, grad, values, has_old=self.takes_edits, old=old)
        self.optimizer.update(updates, Scale(self.scale), self.world)

    def _keep(self, values: Tensor | None) -> FrozenValues:
        """Save what is frozen."""
        frozen = FrozenValues()
        frozen.keep(self.master.raw, self.frozen)
        if values is not None:
            frozen.keep(values, self.frozen)
        frozen.keep_states(self.optimizer, self.master, self.tensors, self.frozen)
        return frozen


def _is_same_group(group: dict[str, Any], other: dict[str, Any]) -> bool:
    names = group.keys() - {"params"}
    return names == other.keys() - {"params"} and all(
        group[name] is other[name] or bool(group[name] == other[name]) for name in names
    )


@final
class HostUpdates:
    """Prepares updates of one optimizer."""

    def __init__(self, optimizer: ShardOptimizer, world: World, tensors: OptimizerTensors) -> None:
        self.optimizer = optimizer
        self._world, self._tensors = world, tensors

    def prepare(self, master: Master, scale: float) -> HostUpdate:
        """The update of `master`, with the rates and flags of now: user code may change them while it runs."""
        optimizer, frozen = self.optimizer, master.frozen_ranges()
        groups = copies_of(optimizer.param_groups)
        tensors = list(self._tensors.tensors_in(master, optimizer)) if frozen else []
        takes_edits = master.params.is_written and not master.crosses_device
        return HostUpdate(
            master, groups, scale, frozen, tensors, takes_edits, optimizer, self._world
        )

    def start(self, updates: Sequence[HostUpdate]) -> list[JobHandle]:
        """Start them in this order."""
        return [start(update) for update in updates]


@final
class UpdateAndCopy(JobHandle):
    """An update on the host, and then the copy of its values to the device."""

    def __init__(self) -> None:
        self._update: JobHandle | None = None
        self._copy: JobHandle | None = None

    def begin(self, update: JobHandle) -> None:
        """The update has been submitted."""
        self._update = update

    def sent(self, copy: JobHandle) -> None:
        """Its values are on their way."""
        self._copy = copy

    def wait(self) -> None:
        self._wait_sent().wait()

    def wait_on_device(self) -> None:
        self._wait_sent().wait_on_device()

    @property
    def is_done(self) -> bool:
        assert self._update is not None
        return self._update.is_done and (self._copy is None or self._copy.is_done)

    def _wait_sent(self) -> JobHandle:
        assert self._update is not None
        self._update.wait()
        assert self._copy is not None
        return self._copy


def start(update: HostUpdate) -> JobHandle:
    """Start `update`; the result completes when forward can read the new values."""
    return _start_across(update) if update.master.crosses_device else _start_in_place(update)


@torch.no_grad()
def _start_in_place(update: HostUpdate) -> JobHandle:
    master = update.master
    (grad, arrives) = master.grads.total.store.pending_total()
    compute = master.compute if master.casts else None
    master.wait()
    master.state_storage.start_load()
    write = partial(update.write_in_place, grad, compute)

    def work() -> None:
        arrives.wait()
        master.state_storage.run_update(write)

    handle = master.host.queues.updates.run(work)
    master.begin_update(handle)
    return handle


@torch.no_grad()
def _start_across(update: HostUpdate) -> UpdateAndCopy:
    master = update.master
    (grad, arrives), host, dtype = (
        master.grads.total.store.pending_total(),
        master.host,
        master.params.dtype,
    )
    mark = host.queues.to_device.mark()
    master.wait()
    master.state_storage.start_load()
    compute, arrival = master.begin_send(), UpdateAndCopy()

    def work() -> None:
        arrives.wait()
        values = host.copier.buffer(grad.numel(), dtype)
        is_done = master.state_storage.run_update(partial(update.write_across, grad, values))
        arrival.sent(master.send(values, compute, mark) if is_done else FinishedJob())

    handle = host.queues.updates.run(work)
    arrival.begin(handle)
    master.begin_update(handle)
    return arrival


__all__ = ["HostUpdate", "HostUpdates", "UpdateAndCopy", "start"]
