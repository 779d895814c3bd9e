"""Where elements of a checkpoint are read to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...utils.views import holds, write
from .ranges import Copy, merged


@dataclass(frozen=True, eq=False)
class Target:
    """`copies` fill `receiver` [n], which is then copied to `destination` of any layout, if there is one.

    is_fresh: `receiver` is not in use yet, so it may be filled before the load is known to succeed.
    name: of the tensor `destination`, if there is one.
    """

    receiver: Tensor
    copies: tuple[Copy, ...]
    destination: Tensor | None = None
    is_fresh: bool = False
    name: str = ""

    def fits(self) -> bool:
        """`destination` can hold the values of `receiver`."""
        return self.destination is None or holds(
            self.destination, self.receiver.view(self.destination.shape)
        )

    def finish(self) -> None:
        """Copy `receiver` to `destination`, if there is one."""
        if self.destination is not None:
            write(self.destination, self.receiver.view(self.destination.shape))


def target_for(
    tensor: Tensor, copies: list[Copy], *, is_fresh: bool = False, name: str = ""
) -> Target:
    """A target that fills `tensor` in row-major order."""
    is_plain = not (tensor.is_conj() or tensor.is_neg())  # memory holds the actual values
    if tensor.is_contiguous() and is_plain:
        flat = tensor.detach().view(-1)
        if is_fresh:
            _zero_rest(flat, copies)
        return Target(flat, tuple(merged(copies)), is_fresh=is_fresh)
    return Target(
        torch.zeros(tensor.numel(), dtype=tensor.dtype, device=tensor.device),
        tuple(merged(copies)),
        destination=tensor.detach(),
        is_fresh=True,
        name=name,
    )


def _zero_rest(flat: Tensor, copies: list[Copy]) -> None:
    """Zero the elements that no copy fills; zeroing all of it first would write the memory twice."""
    if any(copy.count > 1 for copy in copies):
        if sum(copy.total_numel for copy in copies) != flat.numel():
            flat.zero_()
        return
    filled = 0
    for copy in sorted(copies, key=lambda copy: copy.target):
        flat[filled : copy.target].zero_()
        filled = max(filled, copy.target + copy.numel)
    flat[filled:].zero_()


__all__ = ["Target", "target_for"]
