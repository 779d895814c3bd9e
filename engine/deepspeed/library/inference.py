"""`deepspeed.init_inference` and the names around it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from ....utils.version import __version__
from ...inference.config import InferenceConfig
from ...inference.engine import InferenceEngine
from ...inference.inference import init_inference as xds_init_inference
from .. import stand_in
from ..errors import raises_theirs


@raises_theirs
def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """`xds.init_inference`; its errors can be caught as ValueError and AssertionError."""
    engine = xds_init_inference(model, config, **kwargs)
    stand_in.engine_was_made()
    if dist.get_rank() == 0 and stand_in.is_active():
        ranks = dist.get_world_size()
        print(f"xds {__version__} stands in for deepspeed; inference, ranks: {ranks}", flush=True)
    return engine


@raises_theirs
def DeepSpeedInferenceConfig(**values: Any) -> InferenceConfig:  # noqa: N802 (a class in DeepSpeed)
    """The checked keys; `init_inference` takes it as `config`."""
    return InferenceConfig.load(values)


def default_inference_config() -> dict[str, Any]:
    """All keys with their defaults."""
    return InferenceConfig.load().as_dict()


__all__ = ["InferenceEngine"]
