"""`deepspeed.runtime.utils`: those of its functions that scripts call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ...engine.process.process import pick_device
from ...engine.telemetry.timers import memory_use
from ..missing import placeholder
from ..utils.logging import print_rank_0

GIB = 2**30


def see_memory_usage(message: str, force: bool = False) -> None:
    """With `force`, log the current and peak memory use of rank 0's process, in GiB."""
    if force:
        use = memory_use(pick_device())
        print_rank_0(f"{message}: {use.now_bytes / GIB:.2f} GiB, peak {use.peak_bytes / GIB:.2f}")


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
