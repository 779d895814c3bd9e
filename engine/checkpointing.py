"""Activation checkpointing of the found blocks, switched on by the config alone.

torch's non-reentrant checkpoint around each block's forward: only the block's inputs are kept, and backward
runs the forward once more. Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016,
https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(blocks: Sequence[nn.Module]) -> Callable[[], None]:
    """Wrap the forward of every block; the function returned takes the wrapping off again."""
    for block in blocks:
        _wrap(block)

    def undo() -> None:
        for block in blocks:
            block.__dict__.pop("forward", None)

    return undo


def _wrap(block: nn.Module) -> None:
    forward = block.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = checkpointed
