"""`deepspeed.utils.torch`: questions about the installed torch, and hooks of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from ...utils.errors import UsageError
from ..errors import raises_theirs
from ..missing import placeholder


@raises_theirs
def required_torch_version(
    min_version: str | float | None = None, max_version: str | float | None = None
) -> bool:
    """Whether torch's version is within the bounds.

    Raises:
        UsageError: no bound is given.
    """
    if not min_version and not max_version:
        raise UsageError("required_torch_version: needs min_version or max_version; pass one")
    here = Version(torch.__version__)
    if min_version and here < Version(str(min_version)):
        return False
    return not (max_version and here > Version(str(max_version)))


def is_functorch_transforming() -> bool:
    """Whether the code runs inside torch.func.grad, vmap or the like."""
    peek = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


def register_grad_hook(param: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Call `hook` with the parameter after each accumulation into its gradient. Returns torch's handle."""
    if required_torch_version(min_version=2.1):
        return param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    node: Any = param.expand_as(param).grad_fn
    return node.next_functions[0][0].register_hook(hook)


def jit_script_compat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile(fn)`."""
    compiled: Callable[..., Any] = torch.compile(fn)
    return compiled


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["is_functorch_transforming", "register_grad_hook", "required_torch_version"]
