"""Elastic training: one batch size for many numbers of ranks, with DeepSpeed's `compute_elastic_config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .world_sizes import compute_elastic_config as compute_elastic_config


def __getattr__(
    name: str,
) -> Any:  # lazy: the config imports `rules`, and `world_sizes` imports the config
    if name != "compute_elastic_config":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .world_sizes import compute_elastic_config

    return compute_elastic_config
