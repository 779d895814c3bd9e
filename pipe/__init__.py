"""Pipeline parallelism: cuts a model into stages of consecutive layers and runs them by a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..utils import exports as _exports

if TYPE_CHECKING:
    from .layer_specs import LayerSpec as LayerSpec
    from .layer_specs import TiedLayerSpec as TiedLayerSpec
    from .module import DualPipeVModule as DualPipeVModule
    from .module import PipelineModule as PipelineModule

# loaded on first use: reading a config imports xds.pipe.config and must not import torch
LOCATIONS = {
    "DualPipeVModule": ".module",
    "LayerSpec": ".layer_specs",
    "PipelineModule": ".module",
    "TiedLayerSpec": ".layer_specs",
}

__all__ = ["DualPipeVModule", "LayerSpec", "PipelineModule", "TiedLayerSpec"]


def __getattr__(name: str) -> Any:
    return _exports.load(__name__, LOCATIONS, name)


def __dir__() -> list[str]:
    return _exports.names(__name__, LOCATIONS)
