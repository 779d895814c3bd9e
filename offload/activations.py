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

from .lanes import Lanes, Outbox
from .places import Done, Ticket
from .reused import HostBlock, HostPool

MIN_BYTES = 1 << 16  # a smaller tensor costs more to copy than to keep


@final
class _Moved:
    """One tensor on the host, and on the device again once it is fetched. Its block is free at its end."""

    def __init__(
        self, shape: torch.Size, host: Tensor, copied: Ticket, place: _Place, pool: HostPool
    ) -> None:
        self.shape = shape
        self.host = host
        self.copied = copied
        self.previous: weakref.ref[_Moved] | None = None  # moved before it: backward needs it next
        self.place = place
        end = weakref.finalize(self, _free, place, pool)
        end.atexit = False


@final
class _Place:
    """What outlives a moved tensor: its block, and a copy on the device that nobody has asked for yet."""

    def __init__(self, block: HostBlock) -> None:
        self.block = block
        self.fetched: tuple[Tensor, Ticket] | None = None


def _free(place: _Place, pool: HostPool) -> None:
    fetched, place.fetched = place.fetched, None
    if fetched is not None and fetched[0].is_cuda:
        fetched[1].order()  # its memory may be used again after the copy
    pool.give(place.block)


@final
class Activations:
    """Moves tensors of one model to the host and back."""

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self._device = device
        self._lanes = Lanes.of_copies(device)
        self._pool = HostPool(pin=pin and device.type == "cuda")
        self._outbox = Outbox()
        self._last: weakref.ref[_Moved] | None = None

    def moving(self, inputs: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Inside, tensors that autograd saves go to the host if they are among `inputs` and not small.

        Tensors that need no gradient stay, because several blocks share them (masks, positions); leaves stay,
        because user code holds them.
        """
        wanted = {
            tensor.data_ptr()
            for tensor in inputs
            if tensor.requires_grad and not tensor.is_leaf and tensor.nbytes >= MIN_BYTES
        }

        def pack(tensor: Tensor) -> Tensor | _Moved:
            if tensor.data_ptr() not in wanted or not tensor.is_contiguous():
                return tensor
            return self.move(tensor)

        return torch.autograd.graph.saved_tensors_hooks(pack, self.bring)

    def move(self, tensor: Tensor) -> Tensor | _Moved:
        """Copy a contiguous `tensor` to the host; a small one stays. The last one is the first to `bring`."""
        return self._move(tensor) if tensor.nbytes >= MIN_BYTES else tensor

    def _move(self, tensor: Tensor) -> _Moved:
        block, source = self._pool.take(tensor.nbytes), tensor.detach().view(-1)
        host = block.memory[: tensor.nbytes].view(tensor.dtype)
        reader = block.reader

        def copy() -> None:
            reader.order()
            host.copy_(source, non_blocking=True)

        copied = self._lanes.to_host.run(copy)
        # a reference until it is copied: its memory must not be used again before
        self._outbox.add(copied, partial(_forget, source))
        moved = _Moved(tensor.shape, host, copied, _Place(block), self._pool)
        moved.previous, self._last = self._last, weakref.ref(moved)
        return moved

    def bring(self, saved: Tensor | _Moved) -> Tensor:
        """The tensor on the device, of what `move` returned."""
        if isinstance(saved, Tensor):
            return saved
        self._outbox.drain()
        tensor, ticket = saved.place.fetched or self._fetch(saved)
        saved.place.fetched = None
        following = None if saved.previous is None else saved.previous()
        if following is not None and following.place.fetched is None:
            following.place.fetched = self._fetch(following)
        ticket.order()
        return tensor.view(saved.shape)

    def _fetch(self, moved: _Moved) -> tuple[Tensor, Ticket]:
        tensor = torch.empty_like(moved.host, device=self._device)
        if moved.host.numel() == 0:
            return tensor, Done()

        def copy() -> None:
            moved.copied.order()
            tensor.copy_(moved.host, non_blocking=True)

        ticket = moved.place.block.reader = self._lanes.to_device.run(copy)
        return tensor, ticket

    def close(self) -> None:
        """End the threads."""
        self._outbox.drain()
        self._lanes.close()


def _forget(tensor: Tensor) -> None:
    """The end of a reference."""


__all__ = ["Activations"]
