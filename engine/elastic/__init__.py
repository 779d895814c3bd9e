"""One batch size for many numbers of ranks. Schedulers take `compute_elastic_config` from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .world_sizes import compute_elastic_config as compute_elastic_config


def __getattr__(name: str) -> Any:  # the config reads `rules`, and `world_sizes` reads the config
    if name != "compute_elastic_config":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .world_sizes import compute_elastic_config

    return compute_elastic_config
