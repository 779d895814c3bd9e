"""The memory of masters and optimizer states on one rank: bytes, tensors, and the way to the device."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from ...ops.flat import is_channels_last, shaped
from ...ops.optim.shard_optimizer import tensors_of
from ...ops.torch_internals import set_values
from ..core.grad_bucket import GradBucket
from ..core.master import Master
from .sharded_model import ShardedModel
from .update import Updater


@final
class StateMemory:
    """The masters and states of `updater`."""

    def __init__(self, updater: Updater) -> None:
        self._updater = updater

    def master_tensors(self) -> list[Tensor]:
        """The masters that are separate copies of the parameters. Those on a disk have no values."""
        self._updater.wait()
        return [master.memory for master in self._updater.masters if master.has_compute_copy]

    def state_tensors(self) -> list[Tensor]:
        """The optimizer's state tensors, without scalars. Those on a disk have no values."""
        self._updater.wait()
        optimizer = self._updater.optimizer
        states = [] if optimizer is None else optimizer.state.values()
        return [value for state in states for value in tensors_of(state) if value.dim() > 0]

    def _states(self, master: Master) -> list[Tensor]:
        """All its state tensors, scalars as well."""
        return [
            value for _, _, state in self._updater.states_in(master) for value in tensors_of(state)
        ]

    def bytes_on_device(self, master: Master) -> int:
        """Bytes that `master`, its states and the sum of its gradients would take on the device."""
        states = sum(value.nbytes for value in self._states(master))
        return master.copy_bytes + states + _most_bytes_of_sums(master.grads)

    @torch.no_grad()
    def move_to_device(self, master: Master) -> None:
        """Continue with `master` and its states on the device: between two steps, without gradients."""
        updater, optimizer = self._updater, self._updater.optimizer
        assert optimizer is not None
        device = updater.world.collectives.device
        states = updater.states_in(master)
        master.move(updater.stores.device, device)
        for begin, tensor, state in states:
            values = master.raw[begin : begin + tensor.numel()]
            set_values(tensor, shaped(values, tensor.shape, is_channels_last(tensor)))
            for value in tensors_of(state):
                if value.dim() or optimizer.has_scalars_beside(tensor):
                    set_values(value, value.to(device, copy=True))

    def state_bytes(self) -> dict[str, int]:
        """Bytes of masters that are separate copies, of optimizer state tensors, on the host and on a disk.

        "host" has masters, states, gradients and buffers of flat buffers whose store is there. "disk" has
        masters and states that are in a file between updates.
        """
        self._updater.wait()
        num_bytes = {"master": 0, "optimizer": 0, "host": 0, "disk": 0}
        for master in self._updater.masters:
            stored = master.state_storage.is_stored
            master_bytes = (
                master.memory.nbytes if master.has_compute_copy and not stored(master.raw) else 0
            )
            states = sum(value.nbytes for value in self._states(master) if not stored(value))
            num_bytes["disk"] += master.state_storage.disk_bytes
            if master.store.is_on_host:
                num_bytes["host"] += master_bytes + states + master.grads.total.store.host_bytes
            else:
                num_bytes["master"] += master_bytes
                num_bytes["optimizer"] += states
        host = self._updater.stores.host
        num_bytes["host"] += 0 if host is None else host.buffer_bytes
        return num_bytes


def memory_plan(sharded: ShardedModel, updater: Updater) -> dict[str, int]:
    """Bytes of model states on this rank, by kind: see `Memory.state_bytes` and `StateMemory.state_bytes`."""
    memory = sharded.memory
    plan = {**memory.state_bytes(), **StateMemory(updater).state_bytes()}
    plan["host"] += memory.host_bytes() + sharded.stores.shards.host_bytes
    plan["disk"] += memory.disk_bytes()
    return plan


def _most_bytes_of_sums(grads: GradBucket) -> int:
    """The most bytes that sums of a step take if they stay on the device."""
    policy, layout = grads.group.policy, grads.layout
    numel = layout.numel if grads.is_single_rank or not policy.shards_grads else 0
    numel += 0 if grads.is_single_rank else layout.shard_numel
    return numel * policy.sum_dtype(grads.params[0].dtype).itemsize


__all__ = ["StateMemory", "memory_plan"]
