"""`deepspeed.runtime.compiler`: torch.compile under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..missing import placeholder
from ..utils.torch import required_torch_version

Function = Callable[..., Any]


def is_compile_supported() -> bool:
    return True


def is_compiling() -> bool:
    """torch.compile traces this call."""
    return bool(torch.compiler.is_compiling())


def disable(func: Function) -> Function:
    """A decorator: `func` is not compiled; compiled code calls it."""
    found: Function = torch.compiler.disable(func)  # type: ignore[no-untyped-call]
    return found


lazy_disable = disable


def enable(min_version: Any = None) -> Function:
    """A decorator, with or without an argument: compiled from torch `min_version` on, else not compiled."""
    if callable(min_version):
        found: Function = min_version
        return found

    def decorate(func: Function) -> Function:
        is_new_enough = min_version is None or required_torch_version(min_version=min_version)
        return func if is_new_enough else disable(func)

    return decorate


def dummy_decorator(func: Function) -> Function:
    return func


@contextmanager
def compiled_autograd(enabled: bool, kwargs: dict[str, Any]) -> Iterator[None]:
    """Backward passes in the block are compiled, with these options of torch.compile."""
    if not enabled or is_compiling():
        yield
        return
    from torch._dynamo.compiled_autograd import _enable

    with _enable(torch.compile(**kwargs)):
        yield


def compile() -> Function:
    """torch.compile."""
    found: Function = torch.compile
    return found


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
