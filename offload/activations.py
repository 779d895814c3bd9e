"""Keeps the inputs of recomputed blocks in host memory between forward and backward.

    forward     block 0 -> input 1 --to_host--> host     block 1 -> input 2 --to_host--> host ...
    backward    block 2 <- input 2 <--to_device--        input 1 <--to_device--, while block 2 runs

torch's checkpoint saves the inputs of a block as autograd saves tensors, so hooks on saved tensors see them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import final

import torch
from torch import Tensor

from ..ops.device import device_of
from .host_pool import HostBlock, HostPool
from .interfaces import FinishedJob, JobHandle
from .job_queues import JobQueues, PendingCopies

MIN_BYTES = 1 << 16  # a smaller tensor costs more to copy than to keep


@final
class _OffloadedTensor:
    """One tensor on the host, and on the device again once it is fetched. Its block is free at its end."""

    def __init__(
        self,
        shape: torch.Size,
        host: Tensor,
        copied: JobHandle,
        buffer: _HostBuffer,
        pool: HostPool,
    ) -> None:
        self.shape = shape
        self.host = host
        self.copied = copied
        # offloaded before it: backward needs it next
        self.previous: weakref.ref[_OffloadedTensor] | None = None
        self.buffer = buffer
        end = weakref.finalize(self, _free, buffer, pool)
        end.atexit = False


@final
class _HostBuffer:
    """What outlives an offloaded tensor: its block, and a copy on the device that is not used yet."""

    def __init__(self, block: HostBlock) -> None:
        self.block = block
        self.fetched: tuple[Tensor, JobHandle] | None = None


def _free(buffer: _HostBuffer, pool: HostPool) -> None:
    fetched, buffer.fetched = buffer.fetched, None
    if fetched is not None and fetched[0].device.type != "cpu":
        fetched[1].wait_on_device()  # its memory may be used again after the copy
    pool.give(buffer.block)


@final
class ActivationOffload:
    """Moves tensors of one model to the host and back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queues = JobQueues.of_copies(device)
        self._pool = HostPool(pin=device_of(device).pins_memory)
        self._pending_copies = PendingCopies()
        self._last: weakref.ref[_OffloadedTensor] | None = None

    def offloading(self, inputs: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Inside, tensors that autograd saves go to the host if they are among `inputs` and not small.

        Tensors that need no gradient stay, because several blocks share them (masks, positions); leaves stay,
        because user code holds them.
        """
        wanted = {
            tensor.data_ptr()
            for tensor in inputs
            if tensor.requires_grad and not tensor.is_leaf and tensor.nbytes >= MIN_BYTES
        }

        def pack(tensor: Tensor) -> Tensor | _OffloadedTensor:
            if tensor.data_ptr() not in wanted or not tensor.is_contiguous():
                return tensor
            return self.offload(tensor)

        return torch.autograd.graph.saved_tensors_hooks(pack, self.restore)

    def offload(self, tensor: Tensor) -> Tensor | _OffloadedTensor:
        """Copy a contiguous `tensor` to the host; a small one stays. The last one is the first to `restore`."""
        return self._offload(tensor) if tensor.nbytes >= MIN_BYTES else tensor

    def _offload(self, tensor: Tensor) -> _OffloadedTensor:
        block, source = self._pool.take(tensor.nbytes), tensor.detach().view(-1)
        host = block.memory[: tensor.nbytes].view(tensor.dtype)
        reader = block.reader

        def copy() -> None:
            reader.wait_on_device()
            host.copy_(source, non_blocking=True)

        copied = self._queues.to_host.run(copy)
        # a reference until it is copied: its memory must not be used again before
        self._pending_copies.add(copied, partial(_forget, source))
        offloaded = _OffloadedTensor(tensor.shape, host, copied, _HostBuffer(block), self._pool)
        offloaded.previous, self._last = self._last, weakref.ref(offloaded)
        return offloaded

    def restore(self, saved: Tensor | _OffloadedTensor) -> Tensor:
        """The tensor on the device, of what `offload` returned."""
        if isinstance(saved, Tensor):
            return saved
        self._pending_copies.drain()
        tensor, handle = saved.buffer.fetched or self._fetch(saved)
        saved.buffer.fetched = None
        following = None if saved.previous is None else saved.previous()
        if following is not None and following.buffer.fetched is None:
            following.buffer.fetched = self._fetch(following)
        handle.wait_on_device()
        return tensor.view(saved.shape)

    def _fetch(self, offloaded: _OffloadedTensor) -> tuple[Tensor, JobHandle]:
        tensor = torch.empty_like(offloaded.host, device=self._device)
        if offloaded.host.numel() == 0:
            return tensor, FinishedJob()

        def copy() -> None:
            offloaded.copied.wait_on_device()
            tensor.copy_(offloaded.host, non_blocking=True)

        handle = offloaded.buffer.block.reader = self._queues.to_device.run(copy)
        return tensor, handle

    def close(self) -> None:
        """End the threads."""
        self._pending_copies.drain()
        self._queues.close()


def _forget(tensor: Tensor) -> None:
    """The end of a reference."""


__all__ = ["ActivationOffload"]
