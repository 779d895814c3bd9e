"""Ranks that accelerate counted before it knew of DeepSpeed, on a machine without a GPU.

`PartialState()` knows no backend there, and counts one rank. An Accelerator that gets a DeepSpeedPlugin
afterwards keeps that number: each rank would read the whole dataset. So its count is dropped while the
Accelerator is made, and accelerate counts again. PartialStates that exist share the new count.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .ignored_plugin import accelerator_frame


def count_ranks_again() -> None:
    """Drop accelerate's count of one rank, if an Accelerator with a plugin is the caller; rank 0 warns."""
    num_ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if num_ranks < 2 or os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return
    frame = accelerator_frame()
    if frame is None or frame.f_locals.get("cpu") or not frame.f_locals.get("deepspeed_plugins"):
        return
    early = _state("PartialState")
    if early.get("num_processes") != 1 or _state("AcceleratorState"):
        return
    early.clear()
    if os.environ.get("RANK", "0") == "0":
        import logging

        logging.getLogger("xds").warning(
            "PartialState() came before the Accelerator, when accelerate did not know of DeepSpeed: it counted "
            "one rank, and counts %d from here on; make the Accelerator first, or set "
            "ACCELERATE_USE_DEEPSPEED=true",
            num_ranks,
        )


def _state(name: str) -> dict[str, Any]:
    """What all objects of that class share; empty: there is none yet."""
    found = getattr(getattr(sys.modules.get("accelerate.state"), name, None), "_shared_state", None)
    return found if isinstance(found, dict) else {}


__all__ = ["count_ranks_again"]
