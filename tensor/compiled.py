"""The messages of tensor ranks as custom ops of torch, which torch.compile keeps in a graph without a break.

    xds::tensor_enter(x, group)             as Exchange.enter
    xds::tensor_leave(y, group)             as Exchange.leave
    xds::tensor_gather(y, group, widths)    as Exchange.gather

`group` is a number: graphs contain no objects. Only compiled forwards use the ops. Eager ones use
`autograd.Function`, which needs less time for a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from ..ops.comm.collectives import Collectives
from ..ops.comm.handles import Handle

KIND = "tensor sums"
GATHER_KIND = "tensor gathers"
WHAT = "a value in a compiled block"

# torch has its ops once for a process, so their numbers tell all groups of the process apart
_groups: WeakValueDictionary[int, Collectives] = WeakValueDictionary()
_numbers: WeakKeyDictionary[Collectives, int] = WeakKeyDictionary()
_next = 0


def number_of(group: Collectives) -> int:
    """The number by which the ops find `group`, as long as it exists."""
    global _next
    if group not in _numbers:
        _numbers[group] = _next
        _groups[_next] = group
        _next += 1
    return _numbers[group]


def group_of(number: int) -> Collectives:
    """The opposite of `number_of`. In a graph the number may be symbolic: later engines have other ones."""
    return _groups[int(number)]


def start_sum(group: Collectives, tensor: Tensor, what: str) -> tuple[Tensor, Handle | None]:
    """A new contiguous tensor that has the sum over ranks of `tensor` after a wait for the handle, if any."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    return total, group.all_reduce(total, what=what, kind=KIND) if total.numel() else None


def summed(group: Collectives, tensor: Tensor, what: str) -> Tensor:
    """The sum over ranks of `tensor`, in a new contiguous tensor."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    if total.numel():
        group.sum(total, what=what, kind=KIND)
    return total


def gathered(group: Collectives, y: Tensor, widths: Sequence[int], what: str) -> Tensor:
    """[..., own columns] -> [..., sum of `widths`], in rank order."""
    rows = y.reshape(-1, y.shape[-1]).contiguous()
    outs = [y.new_empty(len(rows), width) for width in widths]
    group.all_to_all(outs, [rows] * len(widths), what=what, kind=GATHER_KIND).wait()
    return torch.cat(outs, 1).view(*y.shape[:-1], -1)


@torch.library.custom_op("xds::tensor_enter", mutates_args=())
def enter(x: Tensor, group: int) -> Tensor:
    """A copy of `x` [...]; in backward its gradients are summed."""
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("xds::tensor_leave", mutates_args=())
def leave(y: Tensor, group: int) -> Tensor:
    """The sum over ranks of `y` [...]."""
    return summed(group_of(group), y, WHAT)


@torch.library.custom_op("xds::tensor_gather", mutates_args=())
def gather(y: Tensor, group: int, widths: Sequence[int]) -> Tensor:
    """[..., own columns] -> [..., sum of `widths`]."""
    return gathered(group_of(group), y, widths, WHAT)


def _like(x: Tensor, group: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _wide(y: Tensor, group: int, widths: Sequence[int]) -> Tensor:
    return y.new_empty(*y.shape[:-1], sum(widths))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.rest = inputs[1:]


def _enter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return leave(grad, *ctx.rest), None


def _leave_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    group, widths = ctx.rest
    rank = group_of(group).rank
    return grad.narrow(-1, sum(widths[:rank]), widths[rank]), None, None


enter.register_fake(_like)
leave.register_fake(_like)
gather.register_fake(_wide)
enter.register_autograd(_enter_backward, setup_context=_keep)
leave.register_autograd(_leave_backward, setup_context=_keep)
gather.register_autograd(_gather_backward, setup_context=_keep)

__all__ = [
    "GATHER_KIND",
    "KIND",
    "enter",
    "gather",
    "gathered",
    "group_of",
    "leave",
    "number_of",
    "start_sum",
    "summed",
]
