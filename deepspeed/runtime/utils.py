"""`deepspeed.runtime.utils`: those of its functions that scripts call."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ...engine.process.process import pick_device
from ...engine.telemetry.memory import memory_line
from ..missing import placeholder
from ..utils.logging import print_rank_0


def see_memory_usage(message: str, force: bool = False) -> None:
    """With `force`, log on rank 0: memory of its device in use (MA) and kept (CA), peaks, the host's memory."""
    if force:
        gc.collect()
        print_rank_0(memory_line(message, pick_device()))


def set_random_seed(seed: int) -> None:
    """Seed Python's and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)


def move_to_device(
    item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """`item` with its tensors on `device`; of those alone for which `criterion_func` is true, if given."""

    def moved(leaf: Any) -> Any:
        is_chosen = (
            isinstance(leaf, torch.Tensor) if criterion_func is None else criterion_func(leaf)
        )
        return leaf.to(device) if is_chosen else leaf

    return tree_map(moved, item)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
