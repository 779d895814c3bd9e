"""`deepspeed.runtime.pipe.module`: models as lists of layers, for pipelines."""

from __future__ import annotations

from typing import Any

from ....pipe.layer_specs import LayerSpec, TiedLayerSpec
from ....pipe.module import PipelineModule
from ...missing import placeholder


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
