"""Activation checkpointing of the found blocks, switched on by the config alone.

torch's non-reentrant checkpoint around each block's forward: only the block's inputs are kept, and backward
runs the forward once more. Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016,
https://arxiv.org/abs/1604.06174.

A key-value cache that a block writes to would be written twice, so a block that will be recomputed gets
none (`transformers` does the same). A cache that holds something already, such as a learned prefix, is part
of the numbers: a block that is given one runs without recomputing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .forwards import Forward, replace_forwards


def checkpoint_blocks(blocks: Sequence[nn.Module]) -> Callable[[], None]:
    """Wrap the forward of every block; the function returned takes the wrapping off again."""
    return replace_forwards(blocks, _checkpointed)


def _checkpointed(forward: Forward) -> Forward:
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
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed


def _is_cache(value: Any) -> bool:
    """A key-value cache that is written to, by what `transformers` calls its methods."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")
