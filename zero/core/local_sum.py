"""The local sum of one flat buffer: this rank's gradients since the last reduction.

    autograd -> param.grad --copy, or add--> local [world_size * n]

- Its dtype: that of the parameters, so one gradient is only copied. With a second gradient it becomes that of
  sums.
- On a device the buffer takes no memory between the update and the next gradient, when activations take most.
  On a CPU the memory is a pool's block: new pages cost more than a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

import torch
from torch import Tensor, nn

from ...ops.pool import BufferPool
from ..layout.layout import FlatLayout
from .param_bucket import views_in


@final
@dataclass(frozen=True)
class GradDtypes:
    """The dtypes of one buffer: of its parameters, of their sums, and of what is sent."""

    params: torch.dtype
    sums: torch.dtype
    sent: torch.dtype


class FreedMemory(Enum):
    """What becomes of the memory of a local sum that is not needed for now."""

    TO_POOL = 1  # the next buffer takes it
    STAYS = 2  # on a CPU, which has no other use for it
    RESIZED = 3  # on a device: the storage has no bytes, and its views stay


@final
class LocalSum:
    """Owns the buffer, and says which slots have a gradient.

    Attributes:
        buffer: [world_size * n]; None between its release and the next gradient.
        filled: by slot: it has a gradient. The others are undefined.
        is_writable: allocated, and not shared with the reduced sum.
        dtype: that the buffer gets when it is allocated next.
        factor: of the gradients of this backward.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[nn.Parameter],
        pool: BufferPool,
        dtypes: GradDtypes,
    ) -> None:
        self.layout = layout
        self.params = params
        self.pool = pool
        self.dtypes = dtypes
        self.device = params[0].device
        self.buffer: Tensor | None = None
        self.filled = [False] * len(layout.slots)
        self.is_writable = False
        self.dtype = dtypes.params
        self.factor = 1.0
        self.freed = FreedMemory.STAYS
        self._views: list[Tensor] = []  # the slots of the buffer

    # -- gradients --------------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[int]:
        """Slots whose gradient is still in `.grad`."""
        return [position for position, param in enumerate(self.params) if param.grad is not None]

    @property
    def is_filled(self) -> bool:
        """Some slot has a gradient here."""
        return True in self.filled

    @property
    def has_arrived(self) -> bool:
        """Some gradient has arrived since the last reduction."""
        return self.is_filled or any(param.grad is not None for param in self.params)

    def add(self, position: int, grad: Tensor) -> None:
        """Add the gradient of one slot. The buffer is writable."""
        view = self._views[position]
        if self.filled[position]:
            if self.factor != 1.0:
                grad = grad.to(view.dtype).mul(self.factor)  # rounded as if it were stored
            view.add_(grad)
        elif grad.layout == torch.strided:
            view.copy_(grad)
            if self.factor != 1.0:
                view.mul_(self.factor)
        else:
            view.zero_().add_(grad, alpha=self.factor)
        self.filled[position] = True

    def collect(self, waiting: Sequence[int]) -> None:
        """Take the gradients of these slots from `.grad`, in one call for the copies and one for the sums."""
        views = self._views
        copied: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for position in waiting:
            grad, self.params[position].grad = self.params[position].grad, None
            assert grad is not None
            if grad.layout != torch.strided:
                self.add(position, grad)
                continue
            into = added if self.filled[position] else copied
            into[0].append(views[position])
            into[1].append(grad)
            self.filled[position] = True
        if copied[0]:
            torch._foreach_copy_(*copied)
            if self.factor != 1.0:
                torch._foreach_mul_(copied[0], self.factor)
        if added[0]:
            views, grads = added
            if self.factor != 1.0:  # rounded as if it were stored
                wide = [grad.to(view.dtype) for view, grad in zip(views, grads, strict=True)]
                grads = list(torch._foreach_mul(wide, self.factor))
            torch._foreach_add_(views, grads)

    def settle(self) -> Tensor:
        """The buffer with zeros where no gradient has arrived. It is writable."""
        if False in self.filled:
            for view, is_filled in zip(self._views, self.filled, strict=True):
                if not is_filled:
                    view.zero_()
            self.filled = [True] * len(self._views)
        assert self.buffer is not None
        return self.buffer

    def continue_sum(self, earlier: Tensor) -> None:
        """The sum `earlier` [world_size * n] comes before the gradients in the buffer."""
        if self.buffer is None:
            self.allocate(self.dtypes.sums)
        whole = views_in(earlier, self.layout)
        for view, value, is_filled in zip(self._views, whole, self.filled, strict=True):
            # the same additions in the same order as if the earlier sum were still in the buffer
            view.copy_(value.to(view) + view if is_filled else value)
        self.filled = [True] * len(self.filled)

    def widen(self) -> None:
        """From now on the buffer has the dtype of sums; its gradients are converted."""
        narrow = self.buffer
        if narrow is not None and narrow.dtype != self.dtypes.sums:
            self.allocate(self.dtypes.sums).copy_(narrow)
            self.pool.give(narrow)
        self.dtype = self.dtypes.sums

    # -- memory -----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Allocate the buffer, unless it is there: it is writable."""
        buffer = self.buffer
        if buffer is None or (buffer.dtype != self.dtype and not self.is_filled):
            self.allocate(self.dtype)
        elif not buffer.untyped_storage().nbytes():
            buffer.untyped_storage().resize_(buffer.nbytes)
            self._zero_gaps(buffer)
        self.is_writable = True

    def allocate(self, dtype: torch.dtype) -> Tensor:
        """A new buffer; only its gaps are defined, as zeros."""
        take = self.pool.take if self.freed is FreedMemory.TO_POOL else self.pool.empty
        buffer = take(self.layout.numel, dtype, self.device)
        self._zero_gaps(buffer)
        self.buffer = buffer
        self._views = views_in(buffer, self.layout)
        return buffer

    def _zero_gaps(self, buffer: Tensor) -> None:
        for start, stop in self.layout.gaps():
            buffer[start:stop].zero_()

    def mark_empty(self) -> None:
        """The gradients are being sent, or dropped: the next one of a slot is its first."""
        self.filled = [False] * len(self.filled)

    def detach(self) -> None:
        """Give up the buffer, without its return to the pool."""
        self.buffer, self._views = None, []
        self.mark_empty()
        self.is_writable = False

    def free(self) -> None:
        """Free the memory of the buffer, or return it to the pool."""
        if self.freed is FreedMemory.RESIZED and self.buffer is not None:
            self.buffer.untyped_storage().resize_(0)
            self.mark_empty()
            self.is_writable = False
            return
        if self.buffer is not None:
            self.pool.give(self.buffer)
        self.detach()


__all__ = ["FreedMemory", "GradDtypes", "LocalSum"]
