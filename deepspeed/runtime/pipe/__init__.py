"""`deepspeed.runtime.pipe`: models as lists of layers, coordinates of ranks, instruction lists."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .coordinates import ProcessTopology as ProcessTopology
    from .module import LayerSpec as LayerSpec
    from .module import PipelineModule as PipelineModule
    from .module import TiedLayerSpec as TiedLayerSpec

_SOURCES = {
    "LayerSpec": ".module",
    "PipelineModule": ".module",
    "ProcessTopology": ".coordinates",
    "TiedLayerSpec": ".module",
}
_MODULES = ("engine", "module", "schedule", "topology")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in _SOURCES:
        return getattr(import_module(_SOURCES[name], __name__), name)
    from ...missing import placeholder

    return placeholder(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_SOURCES, *_MODULES])
