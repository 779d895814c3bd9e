"""Copies of modules on the meta device: shapes without memory."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn


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


__all__ = ["meta_copy", "on_meta"]
