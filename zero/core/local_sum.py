"""The sum of one flat buffer's gradients on this rank, since the last reduction.

    autograd -> param.grad --copy or add--> views of tensor [world_size * n]

- Gradients stay in `param.grad` until the buffer is complete; then one call copies them all. One that is not
  the only gradient of its slot in a backward is taken at once, unless it is small. So is a large one on a CPU,
  while it is in the cache.
- The first gradient of a slot is copied, later ones are added. Autograd allocates a new tensor anyway, so
  this is cheaper than to zero a preset view and add into it.
- On a device the buffer takes memory from its first gradient on until `give_back`, and its views stay valid.
  On a CPU it keeps its memory, or is one of a pool's blocks: new pages cost more than a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from ...ops.pool import BufferPool
from .flat_memory import views_in
from .layout import FlatLayout

SMALL_NUMEL = 1 << 14  # below it, one that arrives more than once is summed in `.grad`
LARGE_NUMEL = (
    1 << 17
)  # on a CPU: from it on, the copy of a gradient in the cache saves more than a call


class GradSums(NamedTuple):
    """Gradients since the last step: this rank's sums [world_size * n], which slots have one, the total [n]."""

    local: Tensor | None
    filled: list[bool]
    total: Tensor | None


@final
class LocalSum:
    """Owns the buffer. `tensor` is None between its release and the next gradient.

    filled: the slots that have a gradient; the others are undefined.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[nn.Parameter],
        pool: BufferPool,
        dtypes: tuple[torch.dtype, torch.dtype],
        *,
        is_pooled: bool,
        widens: bool,
        before_write: Callable[[], None],
        before_second: Callable[[], None],
    ) -> None:
        """
        Args:
            dtypes: of the parameters and of sums.
            is_pooled: on a CPU the buffer comes from `pool`, and returns to it.
            widens: more than a copy is computed in the dtype of sums, whatever the buffer's dtype was.
            before_write: called before the first write after a reduction or `begin`.
            before_second: called before the second gradient of a slot is added.
        """
        self.tensor: Tensor | None = None
        self.filled = [False] * len(layout.slots)
        self._layout = layout
        self._params = params
        self._pool = pool
        self._param_dtype, self._sum_dtype = dtypes
        self._is_pooled = is_pooled
        self._widens = widens
        self._before_write = before_write
        self._before_second = before_second
        self.is_small = [slot.numel < SMALL_NUMEL for slot in layout.slots]
        on_cpu = params[0].device.type == "cpu"
        self.is_large = [on_cpu and slot.numel >= LARGE_NUMEL for slot in layout.slots]
        self._keeps_views = not (on_cpu or is_pooled)
        self._views: list[Tensor] = []
        self._factor = 1.0
        self._uses_sum_dtype = False
        self._is_writable = False

    def begin_backward(self, *, uses_sum_dtype: bool) -> None:
        """A backward starts; its gradients are summed in the parameters' dtype or in that of sums."""
        self._factor = 1.0
        self._is_writable = False
        self._uses_sum_dtype = uses_sum_dtype

    def scale_by(self, factor: float) -> None:
        """Multiply the following gradients of this backward by `factor`."""
        self._factor = factor

    def take(self, position: int) -> None:
        """Take `.grad` of the parameter in slot `position` now."""
        param = self._params[position]
        grad, param.grad = param.grad, None
        if grad is not None:
            self._put(position, grad)

    @torch.no_grad()
    def put(self, position: int, grad: Tensor) -> None:
        """Take a gradient that is not in `.grad`. One that waits there came before it."""
        param = self._params[position]
        earlier, param.grad = param.grad, None
        if earlier is not None:
            self._put(position, earlier)
        self._put(position, grad)

    def _put(self, position: int, grad: Tensor) -> None:
        view = self._writable_views()[position]
        if self.filled[position] or self._factor != 1.0:
            self._widen()
            if self.filled[position]:
                self._before_second()
            view = self._views[position]
        if self.filled[position]:
            if self._factor != 1.0:
                grad = grad.to(view.dtype).mul(self._factor)  # rounded as if it were stored
            view.add_(grad)
        elif grad.layout == torch.strided:
            view.copy_(grad)
            if self._factor != 1.0:
                view.mul_(self._factor)
        else:
            view.zero_().add_(grad, alpha=self._factor)
        self.filled[position] = True

    def collect(self) -> None:
        """Take every gradient that is in `.grad`, in one call for the copies and one for the sums."""
        waiting = [at for at, param in enumerate(self._params) if param.grad is not None]
        if self._factor != 1.0:
            self._widen()
        if not waiting:
            return
        views = self._writable_views()
        if True in self.filled and any(self.filled[at] for at in waiting):
            self._widen()
            self._before_second()  # it may bring an earlier sum into every slot
            views = self._views
        copied: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for at in waiting:
            grad, self._params[at].grad = self._params[at].grad, None
            assert grad is not None
            if grad.layout != torch.strided:
                self._put(at, grad)
                continue
            into = added if self.filled[at] else copied
            into[0].append(views[at])
            into[1].append(grad)
            self.filled[at] = True
        if copied[0]:
            torch._foreach_copy_(*copied)
            if self._factor != 1.0:
                torch._foreach_mul_(copied[0], self._factor)
        if added[0]:
            views, grads = added
            if self._factor != 1.0:  # rounded as if it were stored
                wide = [grad.to(view.dtype) for view, grad in zip(views, grads, strict=True)]
                grads = list(torch._foreach_mul(wide, self._factor))
            torch._foreach_add_(views, grads)

    def settle(self) -> Tensor:
        """The buffer with every gradient that has arrived, and zeros elsewhere."""
        self.collect()
        views = self._writable_views()
        if False in self.filled:
            for view, filled in zip(views, self.filled, strict=True):
                if not filled:
                    view.zero_()
            self.filled = [True] * len(views)
        assert self.tensor is not None
        return self.tensor

    @property
    def has_any(self) -> bool:
        """Some gradient has arrived since the last reduction."""
        return True in self.filled or any(param.grad is not None for param in self._params)

    # -- the buffer -------------------------------------------------------------------------------------

    def _writable_views(self) -> list[Tensor]:
        """The slots, allocated, and not shared with a reduced total."""
        if self._is_writable:
            return self._views
        dtype = self._sum_dtype if self._uses_sum_dtype else self._param_dtype
        if self.tensor is None or (self.tensor.dtype != dtype and True not in self.filled):
            self.allocate(dtype)
        elif not self.tensor.untyped_storage().nbytes():
            self.tensor.untyped_storage().resize_(self.tensor.nbytes)
            self._zero_gaps(self.tensor)
        self._is_writable = True
        self._before_write()
        return self._views

    def _widen(self) -> None:
        narrow = self.tensor
        if not self._widens:
            return
        if narrow is not None and narrow.dtype != self._sum_dtype:
            self.allocate(self._sum_dtype).copy_(narrow)
            self._pool.give(narrow)
        self._uses_sum_dtype = True

    def allocate(self, dtype: torch.dtype) -> Tensor:
        """A new buffer; only its gaps are defined, as zeros."""
        device, numel = self._params[0].device, self._layout.numel
        if self._is_pooled:
            tensor = self._pool.take(numel, dtype, device)
        else:
            tensor = self._pool.empty(numel, dtype, device)
        self._zero_gaps(tensor)
        self.tensor = tensor
        self._views = views_in(tensor, self._layout)
        return tensor

    def _zero_gaps(self, tensor: Tensor) -> None:
        for start, stop in self._layout.gaps():
            tensor[start:stop].zero_()

    def add_to(self, earlier: Tensor) -> None:
        """Continue the sum `earlier` [world_size * n], which comes before the gradients in the buffer."""
        total = self.allocate(self._sum_dtype) if self.tensor is None else self.tensor
        whole = views_in(earlier, self._layout)
        for view, value, filled in zip(self._views, whole, self.filled, strict=True):
            # the same additions in the same order as if the earlier sum had never left
            view.copy_(value.to(view) + view if filled else value)
        self.filled = [True] * len(self.filled)
        assert total is self.tensor

    def gathered(self) -> Tensor:
        """Where totals are gathered: the buffer, or other memory while late gradients are in it."""
        assert self.tensor is not None
        return torch.empty_like(self.tensor) if self.has_any else self.tensor

    def clear(self) -> None:
        """The gradients are being sent, or dropped: the next one of a slot is its first."""
        self.filled = [False] * len(self.filled)

    def protect(self) -> None:
        """Call `before_write` before the next write."""
        self._is_writable = False

    def drop(self) -> None:
        """Drop all gradients, also those in `param.grad`. A large one stays there if a script's hook raised."""
        self.clear()
        self.protect()
        for param in self._params:
            param.grad = None

    def release(self) -> None:
        """Forget the buffer, without its return to the pool."""
        self.tensor, self._views = None, []
        self.clear()
        self.protect()

    def give_back(self) -> None:
        """Free the memory of the buffer, or return it to the pool."""
        if self._keeps_views and self.tensor is not None:
            self.tensor.untyped_storage().resize_(0)
            self.clear()
            self.protect()
            return
        if self.tensor is not None:
            self._pool.give(self.tensor)
        self.release()


__all__ = ["SMALL_NUMEL", "GradSums", "LocalSum"]
