"""`get_accelerator`: the type of device that this process uses. A script may set another one."""

from __future__ import annotations

import os
from typing import Any

import torch

from ...utils.errors import UsageError
from ..errors import raises_theirs
from ..missing import placeholder
from .abstract_accelerator import DeepSpeedAccelerator
from .cpu_accelerator import CPU_Accelerator
from .cuda_accelerator import CUDA_Accelerator

SUPPORTED_ACCELERATOR_LIST = ["cuda", "cpu"]

ds_accelerator: DeepSpeedAccelerator | None = None  # scripts read it by this name


@raises_theirs
def get_accelerator() -> Any:
    """The one that was set, or that of the variable DS_ACCELERATOR, or CUDA where there is a GPU, or the CPU.

    Raises:
        UsageError: DS_ACCELERATOR names a device that xds does not train on.
    """
    global ds_accelerator
    if ds_accelerator is None:
        name = os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")
        if name not in SUPPORTED_ACCELERATOR_LIST:
            raise UsageError(
                f"DS_ACCELERATOR = {name!r}: xds trains on {' and '.join(SUPPORTED_ACCELERATOR_LIST)}; unset it"
            )
        ds_accelerator = CUDA_Accelerator() if name == "cuda" else CPU_Accelerator()
    return ds_accelerator


@raises_theirs
def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    """Let `get_accelerator` return `accel_obj`. The engine's own device does not change.

    Raises:
        UsageError: it is not a DeepSpeedAccelerator.
    """
    global ds_accelerator
    if not isinstance(accel_obj, DeepSpeedAccelerator):
        raise UsageError(
            f"set_accelerator({type(accel_obj).__name__}): needs an object of a class that derives from "
            "DeepSpeedAccelerator"
        )
    ds_accelerator = accel_obj


def is_current_accelerator_supported() -> bool:
    """Whether xds trains on the current type of device."""
    return get_accelerator().device_name() in SUPPORTED_ACCELERATOR_LIST


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["get_accelerator", "is_current_accelerator_supported", "set_accelerator"]
