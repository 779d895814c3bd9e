"""Finds the layers that a pattern of the config names, compressed or not."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from .config import EVERY
from .layers import is_conv1d

# what a technique can compress; Conv1D of transformers counts as a linear layer
KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "weight_quantization": (nn.Linear, nn.Conv2d, nn.Embedding),
    "activation_quantization": (nn.Linear, nn.Conv2d),
    "sparse_pruning": (nn.Linear, nn.Conv2d),
    "row_pruning": (nn.Linear,),
    "head_pruning": (nn.Linear,),
    "channel_pruning": (nn.Conv2d,),
}


def matching(model: nn.Module, pattern: str, kinds: Sequence[type[nn.Module]]) -> list[str]:
    """Names of the layers of these kinds that a pattern finds, in the order of the model."""
    return [
        name
        for name, module in model.named_modules()
        if (isinstance(module, tuple(kinds)) or (nn.Linear in kinds and is_linear(module)))
        and (pattern == EVERY or re.search(pattern, name))
    ]


def is_linear(module: nn.Module) -> bool:
    """A linear layer, or Conv1D of transformers, compressed or not."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Conv1D of transformers, whose weight is [inputs, outputs], compressed or not."""
    return any(is_conv1d(kind) for kind in type(module).__mro__)


__all__ = ["KINDS", "is_linear", "is_transposed", "matching"]
