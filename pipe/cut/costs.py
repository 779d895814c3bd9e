"""Counts what a layer costs: its trained parameters, and multiplications by its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..partition import LayerSize


def size_of(layer: Any, config: Any = None) -> LayerSize:
    """The size of a module or function.

    Args:
        config: a configuration with `num_experts_per_tok`: of stacked experts, so many are counted.
    """
    if not isinstance(layer, nn.Module):
        return LayerSize(getattr(layer, "__name__", type(layer).__name__))
    numel = sum(param.numel() for param in layer.parameters() if param.requires_grad)
    return LayerSize(type(layer).__name__, numel, _operations(layer, config))


def sum_of(layers: Iterable[nn.Module], config: Any = None) -> LayerSize:
    """The sizes of several modules together."""
    sizes = [size_of(layer, config) for layer in layers]
    return LayerSize("", sum(s.numel for s in sizes), sum(s.operations for s in sizes))


def _operations(layer: nn.Module, config: Any) -> int:
    """Elements of matrices that a token is multiplied by. Embeddings are looked up: they count nothing."""
    chosen = getattr(config, "num_experts_per_tok", None)
    total = 0
    for module in layer.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        for param in module.parameters(recurse=False):
            if param.dim() == 3 and isinstance(chosen, int) and param.shape[0] > chosen:
                total += param.numel() // param.shape[0] * chosen
            elif param.dim() >= 2:
                total += param.numel()
    return total


__all__ = ["size_of", "sum_of"]
