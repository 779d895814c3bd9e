"""Activation checkpointing of the model's blocks, enabled by the config.

torch's non-reentrant checkpoint runs around each block's forward: only the block's inputs are kept, and
backward runs the forward again. Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016,
https://arxiv.org/abs/1604.06174.

Key-value caches:
- A recomputed block would write to its cache twice, so it gets no cache (`transformers` does the same).
- A cache that already holds values, such as a learned prefix, affects the result. A block that gets one runs
  without recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from .forwards import Forward, replace_forwards

# around a checkpoint: where the tensors among its arguments are stored until backward
Storing = Callable[[list[torch.Tensor]], AbstractContextManager[None]]


def checkpoint_blocks(
    blocks: Sequence[nn.Module], storing: Storing = lambda tensors: nullcontext()
) -> Callable[[], None]:
    """Wrap the forward of every block; the returned function restores the forwards."""
    return replace_forwards(blocks, functools.partial(_checkpointed, storing))


def _checkpointed(storing: Storing, forward: Forward) -> Forward:
    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
        if not torch.is_grad_enabled() or any(cache.get_seq_length() for cache in caches):
            return forward(*args, **kwargs)
        if caches:
            args = tuple(None if _is_cache(value) else value for value in args)
            kwargs = {key: None if _is_cache(kwargs[key]) else kwargs[key] for key in kwargs}
            if kwargs.get("use_cache"):
                kwargs["use_cache"] = False
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        with storing(tensors):
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed


def _is_cache(value: Any) -> bool:
    """Whether this is a key-value cache, recognised by the method names of `transformers`."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")
