"""A warning where accelerate gets a DeepSpeedPlugin and ignores it, because it was told to use the CPU.

`Accelerator(cpu=True, deepspeed_plugin=...)` trains with DDP and says nothing. It asks for deepspeed's version
before it chooses, and calls nothing of deepspeed's afterwards. So the two arguments are read while it asks.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

CALLER = "accelerate.accelerator"
CPU = "ACCELERATE_USE_CPU"  # `accelerate launch --cpu` sets it
TRUE = ("1", "y", "yes", "t", "true", "on")
_said: set[str] = set()


def warn_of_ignored_plugin() -> None:
    """Warn once, on rank 0, if an Accelerator that ignores its plugin is the caller."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true" or os.environ.get("RANK", "0") != "0":
        return
    cause = _cause(accelerator_frame())
    if cause is None or cause in _said:
        return
    _said.add(cause)
    import logging

    logging.getLogger("xds").warning(
        "accelerate ignores the DeepSpeedPlugin, because %s is set: this run trains with DDP, without ZeRO; "
        "leave %s out, it is not needed on a machine without a GPU",
        cause,
        cause,
    )


def accelerator_frame() -> FrameType | None:
    """The frame of `Accelerator.__init__`, if it is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and frame.f_globals.get("__name__") == CALLER:
            return frame
        frame = frame.f_back
    return None


def _cause(frame: FrameType | None) -> str | None:
    """What makes the Accelerator ignore its plugin; None: it has none, or uses it."""
    if frame is None or not frame.f_locals.get("deepspeed_plugins"):
        return None
    if frame.f_locals.get("cpu"):
        return "cpu=True"
    return CPU if os.environ.get(CPU, "").lower() in TRUE else None


__all__ = ["accelerator_frame", "warn_of_ignored_plugin"]
