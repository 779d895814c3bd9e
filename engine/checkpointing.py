"""Activation checkpointing of the found blocks, switched on by the config alone.

torch's non-reentrant checkpoint around each block's forward: only the block's inputs are kept, and backward
runs the forward once more. Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016,
https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from .forwards import Forward, replace_forwards


def checkpoint_blocks(blocks: Sequence[nn.Module]) -> Callable[[], None]:
    """Wrap the forward of every block; the function returned takes the wrapping off again."""
    return replace_forwards(blocks, _checkpointed)


def _checkpointed(forward: Forward) -> Forward:
    @functools.wraps(forward)
    def checkpointed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, module, *args, use_reentrant=False, **kwargs)

    return checkpointed
