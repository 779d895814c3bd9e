"""Elastic training: one batch size for many numbers of ranks, with DeepSpeed's `compute_elastic_config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...utils import exports as _exports

if TYPE_CHECKING:
    from .world_sizes import compute_elastic_config as compute_elastic_config


# loaded on first use: the config imports `rules`, and `world_sizes` imports the config
def __getattr__(name: str) -> Any:
    return _exports.load(__name__, {"compute_elastic_config": ".world_sizes"}, name)
