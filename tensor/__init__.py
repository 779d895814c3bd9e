"""Slices of layers over tensor ranks, tokens over sequence ranks, and tiles: a part of a sequence at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..utils import exports as _exports

if TYPE_CHECKING:
    from .sequence.distributed import DistributedAttention as DistributedAttention
    from .tiles.loss import tiled_loss as tiled_loss
    from .tiles.modules import tile_forward as tile_forward
    from .tiles.modules import tiled_mlp as tiled_mlp
    from .tiles.run import run_in_tiles as run_in_tiles
    from .vocabulary import cross_entropy as cross_entropy

# loaded on first use: reading a config imports xds.tensor.config and must not import torch
LOCATIONS = {
    "DistributedAttention": ".sequence.distributed",
    "cross_entropy": ".vocabulary",
    "run_in_tiles": ".tiles.run",
    "tile_forward": ".tiles.modules",
    "tiled_loss": ".tiles.loss",
    "tiled_mlp": ".tiles.modules",
}

__all__ = [
    "DistributedAttention",
    "cross_entropy",
    "run_in_tiles",
    "tile_forward",
    "tiled_loss",
    "tiled_mlp",
]


def __getattr__(name: str) -> Any:
    return _exports.load(__name__, LOCATIONS, name)


def __dir__() -> list[str]:
    return _exports.names(__name__, LOCATIONS)
