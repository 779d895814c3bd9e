"""Takes nested values apart into tensors and a text, and puts them together again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...ops.torch_internals import (
    TreeSpec,
    tree_flatten,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)
from ...utils.errors import UsageError
from .part import Flow

_CONSTANTS = (type(None), bool, int, float, str)


def pack(value: Any, where: str) -> Flow:
    """Take any nested value apart.

    Args:
        where: what made the value, for the message.

    Raises:
        UsageError: `value` has an object that is neither a tensor nor None, a number or a text.
    """
    if isinstance(value, Tensor):  # as between most layers
        return Flow((value,), _tensor_text())
    leaves, spec = tree_flatten(value)
    others = [None if isinstance(leaf, Tensor) else [leaf] for leaf in leaves]
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_CONSTANTS)):
            raise UsageError(
                f"{where} returned an object of class {type(leaf).__name__}, which cannot be sent to the next "
                "pipeline stage; return tensors, numbers and texts in tuples, lists and dictionaries"
            )
    try:
        text = json.dumps([treespec_dumps(spec), others])
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UsageError(
            f"{where} returned a structure that cannot be sent to the next pipeline stage ({error}); return "
            "tensors, numbers and texts in tuples, lists and dictionaries"
        ) from error
    return Flow(tuple(leaf for leaf in leaves if isinstance(leaf, Tensor)), text)


def unpack(flow: Flow) -> Any:
    """The value that `pack` took apart, with the tensors of `flow`."""
    if flow.spec == _tensor_text():
        return writable(flow.leaves[0])
    structure, others = _parsed(flow.spec)
    tensors = iter([writable(leaf) for leaf in flow.leaves])
    leaves = [next(tensors) if other is None else other[0] for other in others]
    return tree_unflatten(leaves, structure)


@lru_cache(maxsize=1)
def _tensor_text() -> str:
    """The text of a tensor alone."""
    return json.dumps([treespec_dumps(tree_flatten(0)[1]), [None]])


@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[TreeSpec, list[Any]]:
    """The structure in a flow's text; for each leaf None, or a list of its one constant."""
    structure, others = json.loads(text)
    return treespec_loads(structure), others


class _Alias(torch.autograd.Function):
    """The same values, as a tensor that operations in place may write to."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def writable(tensor: Tensor) -> Tensor:
    """`tensor`, or an alias of it where torch refuses writes because it is a leaf that requires gradients."""
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        aliased: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
        return aliased
    return tensor


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a nested value, and its structure."""
    return tree_flatten(value)


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The opposite of `flatten`."""
    return tree_unflatten(list(leaves), spec)


__all__ = ["flatten", "pack", "unflatten", "unpack", "writable"]
