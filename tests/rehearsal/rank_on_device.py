"""A rank of tests_on_device.py. Importing this module loads the device, so torch is imported here first.

The tests are written for the CPU. What they take for granted there is given to them, never to the engine:

- tensors that a test makes without a device are on the device, also with a generator of the CPU;
- `numpy()` copies; an op that a test calls itself takes tensors of both devices;
- a group of gloo is one of messages.py: NCCL's stand-in, or with XDS_REHEARSE=gloo that of gloo.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import stand_in

stand_in.load(stand_in.compiled())

import messages  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import Parameter  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._device import _device_constructors  # noqa: E402

import xds.engine.initialize  # noqa: E402, F401

ROOT = Path(xds.__file__).parent.resolve()
TESTS = Path(__file__).resolve().parents[1]
_start_group = dist.init_process_group
_GROUP = messages.GLOO if "gloo" in os.environ.get("XDS_REHEARSE", "") else messages.BACKEND


def _start(backend: Any = None, *args: Any, **more: Any) -> Any:
    return _start_group(_GROUP if backend in (None, "gloo") else backend, *args, **more)


dist.init_process_group = _start
stand_in.use_host_kernels()


@cache
def _owner(filename: str) -> str:
    """The tests, xds, or nobody that counts."""
    path = Path(filename).resolve()
    if filename.startswith("<") or path.parent == TESTS / "rehearsal":  # the device itself
        return ""
    if TESTS in path.parents:
        return "tests"
    return "xds" if ROOT in path.parents else ""


def _callers() -> Iterable[str]:
    frame = sys._getframe(2)
    while frame is not None:
        owner = _owner(frame.f_code.co_filename)
        if owner and frame.f_code.co_name != "__torch_function__":  # the engine has modes, too
            yield owner
        frame = frame.f_back  # type: ignore[assignment]


class _OfTests(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors():
            if kwargs.get("device") is None and not kwargs.get("pin_memory"):
                if next(iter(_callers()), "") == "tests":
                    return _made(func, args, kwargs)
        elif func is Tensor.numpy and args[0].is_cuda:
            if next(iter(_callers()), "") == "tests":
                args = (args[0].cpu(), *args[1:])
        elif _is_mixed(args) and not str(func.__name__).endswith("_") and "xds" not in _callers():
            args = _moved(args, torch.device("cuda"))
        return func(*args, **kwargs)


def _made(func: Any, args: Any, kwargs: Any) -> Any:
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type == "cpu":
        return func(*args, **kwargs).to("cuda")
    return (
        func(*args, **kwargs, device="cuda")
        if "device" not in kwargs
        else func(*args, **(kwargs | {"device": "cuda"}))
    )


def _is_mixed(args: Any) -> bool:
    kinds = set()
    for value in args:
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if type(one) in (Tensor, Parameter) and (one.dim() or one.is_cuda):
                kinds.add(one.is_cuda)
    return len(kinds) > 1


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_moved(one, device) for one in value)
    if type(value) is dict:
        return {key: _moved(one, device) for key, one in value.items()}
    return value


class _Pickler(pickle.Pickler):
    """Tensors of the device become tensors of the CPU: the process of the tests has no device."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.is_cuda:
            return value.detach().cpu().__reduce_ex__(4)
        return NotImplemented


def called(function: Callable[..., Any], *args: Any) -> bytes:
    """`function(*args)`, pickled; a fault of the device raises."""
    ops = torch.ops.host_cuda
    ops.take_faults()
    ops.settings(False, "raise" in os.environ.get("XDS_REHEARSE", ""))
    try:
        with _OfTests():
            result = function(*args)
            torch.cuda.synchronize()
        gc.collect()
    except BaseException as error:
        if faults := sorted(set(ops.take_faults())):
            error.add_note("\n".join(faults)) if hasattr(error, "add_note") else None
        raise
    if faults := sorted(set(ops.take_faults())):
        raise AssertionError("\n".join(faults))
    answer = io.BytesIO()
    _Pickler(answer).dump(result)
    return answer.getvalue()
