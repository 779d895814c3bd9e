"""Copies of modules on the meta device: shapes without memory; and a mode in which they run there."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from typing import Any, final

import torch
from torch import Tensor, nn

from ...ops.torch_internals import TorchDispatchMode

_aten = torch.ops.aten


def meta_copy(
    module: nn.Module, memo: dict[int, Any] | None = None, skip: Collection[int] = ()
) -> nn.Module:
    """A copy whose parameters and buffers are on the meta device. Nothing of their size is allocated.

    Hooks are not copied. Parameters whose values are stored elsewhere are copied by their shape.

    Args:
        memo: the memo of `copy.deepcopy`; with the same memo, tied parameters of two modules stay tied.
        skip: ids of parameters that need no copy, as `memo` has their modules.
    """
    memo = {} if memo is None else memo
    for param in module.parameters():
        if id(param) not in memo and id(param) not in skip:
            memo[id(param)] = nn.Parameter(on_meta(param), requires_grad=param.requires_grad)
            memo.setdefault(id(memo), []).append(param)  # as deepcopy does: the id must stay taken
    for buffer in module.buffers():
        if id(buffer) not in memo:
            memo[id(buffer)] = on_meta(buffer)
            memo.setdefault(id(memo), []).append(buffer)
    copied = deepcopy(module, memo)
    for inner in copied.modules():
        for hooks in (
            inner._forward_hooks,
            inner._forward_pre_hooks,
            inner._backward_hooks,
            inner._backward_pre_hooks,
        ):
            hooks.clear()
    return copied


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor on the meta device with the shape, strides and dtype of `tensor`."""
    return torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta"
    )


@final
class ShapesOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, nothing is computed. A model that reads a value gets True: masks are asked if they are full."""

    def __init__(self, *, copies_zeros: bool = False) -> None:
        """copies_zeros: a copy to the host has zeros; else torch refuses it."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies_zeros = copies_zeros

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would load its compiler to keep the mode out of what is compiled

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return True
        if func in (_aten.mm.default, _aten.addmm.default) and hasattr(args[-1], "_data"):
            # torchao's tensors of 8 bits: the meta kernel takes no sizes that CPUs take
            shape = (args[-2].shape[0], args[-1].shape[1])
            return torch.empty(shape, dtype=args[-1].dtype, device="meta")
        if func is _aten.is_set_to.default:  # torch has no such kernel for the meta device
            return _is_view_of(*args)
        if self._copies_zeros and func is _aten._to_copy.default and args[0].is_meta:
            to = {
                "dtype": args[0].dtype,
                **{k: v for k, v in kwargs.items() if k != "non_blocking"},
            }
            if str(to.get("device", "meta")) == "cpu":
                return torch.zeros(args[0].shape, dtype=to["dtype"])
        return func(*args, **kwargs)


def _is_view_of(one: Tensor, other: Tensor) -> bool:
    """They are the same elements of the same memory."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and (one.storage_offset(), one.shape, one.stride()) == (
        other.storage_offset(),
        other.shape,
        other.stride(),
    )


__all__ = ["ShapesOnly", "meta_copy", "on_meta"]
