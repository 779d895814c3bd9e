"""Activation checkpointing of the model's blocks, enabled by the config.

torch's non-reentrant checkpoint runs around each block's forward: only the block's inputs are kept, and
backward runs the forward again. Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016,
https://arxiv.org/abs/1604.06174.

A recomputed block has no second effect on its buffers, such as running statistics.

Key-value caches:
- A recomputed block would write to its cache twice, so it gets no cache (`transformers` does the same).
- A cache that already holds values, such as a learned prefix, affects the result. A block that gets one runs
  without recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...ops.torch_internals import tree_leaves
from ...utils.module_buffers import Buffers
from .caches import is_cache, without_caches
from .forwards import Forward, replace_forwards

# around a checkpoint: where the tensors among its arguments are stored until backward
Storing = Callable[[list[torch.Tensor]], AbstractContextManager[None]]


@final
class Recomputing:
    """Recomputes `blocks` in backward, between `begin` and `end`."""

    def __init__(self, blocks: Sequence[nn.Module], storing: Storing | None = None) -> None:
        self._blocks = blocks
        self._storing = storing
        self._undo: Callable[[], None] | None = None

    def begin(self) -> None:
        """Wrap the forward of every block."""
        storing = self._storing or (lambda tensors: nullcontext())
        change = functools.partial(_checkpointed, storing, _OfBlocks(self._blocks))
        self._undo = replace_forwards(self._blocks, change)

    def end(self) -> None:
        """Restore the forwards."""
        if self._undo is not None:
            self._undo()
        self._undo = None

    @contextmanager
    def around_graphs(self, *, plans: bool) -> Iterator[None]:
        """What wraps the forwards inside stays inside of the recomputation, where it cannot be in a graph.

        It can, unless it stores inputs elsewhere. plans: the compiler decides what is recomputed.
        """
        is_outside = self._undo is not None and (self._storing is not None or not plans)
        if is_outside:
            self.end()
        try:
            yield
        finally:
            if is_outside:
                self.begin()


@final
class _OfBlocks:
    """The buffers of each block. dynamo does not look into it, so equal blocks share a graph."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._found = {block: Buffers(block.modules()) for block in blocks}

    def once(self, forward: Forward, block: nn.Module) -> Forward:
        """`forward` of `block`, of which only the first call has an effect on buffers."""
        own = self._found.get(block) or Buffers(block.modules())  # of a copy of a block
        return own.once(forward)


def _checkpointed(storing: Storing, buffers: _OfBlocks, forward: Forward) -> Forward:
    @functools.wraps(forward)
    def checkpointed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
        if not torch.is_grad_enabled() or any(cache.get_seq_length() for cache in caches):
            return forward(module, *args, **kwargs)
        args, kwargs = without_caches(args, kwargs)
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        with storing(tensors):
            run = _Run(buffers, forward)
            return checkpoint(run, module, *args, use_reentrant=False, **kwargs)

    return checkpointed


@final
class _Run:
    """A forward and its recomputations, of which only the first has an effect on buffers."""

    def __init__(self, buffers: _OfBlocks, forward: Forward) -> None:
        self._buffers, self._forward = buffers, forward
        self._once: Forward | None = None

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph writes each buffer once, at its end
            return self._forward(module, *args, **kwargs)
        if self._once is None:
            self._once = self._buffers.once(self._forward, module)
        return self._once(module, *args, **kwargs)


__all__ = ["Recomputing"]
