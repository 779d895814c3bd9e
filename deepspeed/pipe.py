"""`deepspeed.pipe`: models as lists of layers, for pipelines."""

from __future__ import annotations

from typing import Any

from ..pipe.layer_specs import LayerSpec, TiedLayerSpec
from .missing import placeholder
from .runtime.pipe.coordinates import ProcessTopology
from .runtime.pipe.module import DualPipeVModule, PipelineModule


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["DualPipeVModule", "LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec"]
