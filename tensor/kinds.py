"""Which blocks are of one kind: one proof is enough for them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import nn

from .styles import ParallelStyle

NOT_SETTINGS = ("idx", "index", "layer_id", "layer_number", "training")  # in names of attributes


def kind_of(block: nn.Module, layers: Mapping[str, ParallelStyle]) -> Hashable:
    """Equal for blocks whose modules have the same classes and settings, and whose `layers` are cut alike."""
    cut = tuple((name, style, _shapes(block, name)) for name, style in layers.items())
    return cut, *((name, type(one), _settings(one)) for name, one in block.named_modules())


def _shapes(block: nn.Module, layer: str) -> tuple[torch.Size, ...]:
    return tuple(param.shape for param in block.get_submodule(layer).parameters())


def _settings(module: nn.Module) -> Hashable:
    """What a forward may depend on besides tensors, without the number of the layer."""
    found: list[tuple[str, Hashable]] = []
    for name, value in vars(module).items():
        if name.startswith("_") or any(word in name for word in NOT_SETTINGS):
            continue
        if isinstance(value, int | float | str | bool | None):
            found.append((name, value))
        elif callable(value):
            found.append((name, getattr(value, "__qualname__", type(value).__qualname__)))
    return tuple(found)


__all__ = ["kind_of"]
