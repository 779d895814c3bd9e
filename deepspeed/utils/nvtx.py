"""`instrument_w_nvtx`: shows calls of a function as ranges in the profiler's timeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch.compiler import is_compiling

from ..accelerator import get_accelerator
from ..missing import placeholder

Function = TypeVar("Function", bound=Callable[..., Any])

enable_nvtx = True  # scripts may switch it off here
DEEPSPEED_NVTX_DOMAIN = "DeepSpeed"


def instrument_w_nvtx(func: Function) -> Function:
    """A decorator: each call is a range with the function's name. Inside torch.compile there is no range."""

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not enable_nvtx or is_compiling():
            return func(*args, **kwargs)
        device = get_accelerator()
        options = (
            {"domain": DEEPSPEED_NVTX_DOMAIN}
            if getattr(device, "supports_nvtx_domain", False)
            else {}
        )
        device.range_push(func.__qualname__, **options)
        try:
            return func(*args, **kwargs)
        finally:
            device.range_pop(**options)

    return call  # type: ignore[return-value]


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["instrument_w_nvtx"]
