"""Defines ops: each has a schema and a plain torch reference; a native library can register a kernel for it.

    torch.ops.xds.adam_(...) --CPU, GPU---> the kernel of a loaded library (libraries.py), if there is one
                             --else-------> the reference, with the same signature and the same values

So an op always works, `torch.compile` treats it as one node, and defining it builds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..coded import is_coded, rows_of
from ..flat import chunks
from ..rounding import rows_from

_NAMESPACE = "xds"
_library = torch.library.Library(_NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def define(
    schema: str, reference: Callable[..., Any], fake: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Define the op of `schema`, "name(arguments) -> result", with the implementation `reference`.

    Returns: a function that calls the op, with the signature and docstring of `reference`. The first argument
        is positional. If it is fp64, which has no kernels, the function calls the reference.

    Args:
        fake: returns the result's shape and dtype, for tracing; None where the op returns nothing.
    """
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(name, reference, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake or _nothing, lib=_library)
    op: Callable[..., Any] = getattr(getattr(torch.ops, _NAMESPACE), name).default

    @wraps(reference)
    def call(first: Tensor, *others: Any, **named: Any) -> Any:
        return (reference if first.dtype == torch.float64 else op)(first, *others, **named)

    call.__name__ = call.__qualname__ = name
    return call


def _nothing(*_: Any, **__: Any) -> None:
    return None


def skips(found_inf: Tensor | None) -> bool:
    """Whether the step must change nothing. Synchronizes with the device, which a reference may do."""
    return found_inf is not None and bool(found_inf)


def read_old(*pairs: tuple[Tensor | None, Tensor | None]) -> None:
    """Copy the values before the step to the tensors that the step changes: (tensor, old values or None)."""
    for tensor, old in pairs:
        if tensor is not None and old is not None:
            tensor.copy_(old)


def scaled(grad: Tensor, scale: Tensor | None, param: Tensor) -> Tensor:
    """The scaled gradient in the master's dtype, [n], in new memory."""
    wide = grad.to(param.dtype, copy=True)
    return wide if scale is None else wide.mul_(scale)


def in_chunks(reference: Callable[..., None]) -> Callable[..., None]:
    """Call an elementwise reference in cache-sized chunks on a CPU, so that its passes read from the cache.

    Args:
        reference: its first argument is a tensor [n], and it works on all its 1-D arguments alike. Of two
            dimensions are the rows of random numbers (ops/rounding.py) and states of 8 bits (ops/coded.py).
    """

    @wraps(reference)
    def run(*arguments: Any, **named: Any) -> None:
        first: Tensor = arguments[0]
        for piece in chunks(first.numel(), first.device.type == "cpu"):
            reference(
                *(_part(argument, piece) for argument in arguments),
                **{key: _part(argument, piece) for key, argument in named.items()},
            )

    return run


def _part(argument: Any, piece: slice) -> Any:
    if not isinstance(argument, Tensor) or not argument.dim():
        return argument
    if is_coded(argument):
        return argument[rows_of(piece.start, piece.stop)]
    return argument[piece] if argument.dim() == 1 else rows_from(argument, piece.start)
