"""`deepspeed.elasticity`: one batch size for many numbers of ranks, by xds's own rules (`xds elastic`)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_SOURCES = {
    "compute_elastic_config": ".elasticity",
    "ELASTICITY": ".constants",
    "elasticity_enabled": ".elasticity",
    "ElasticityConfig": ".config",
    "ElasticityConfigError": ".config",
    "ElasticityError": ".config",
    "ElasticityIncompatibleWorldSize": ".config",
    "ENABLED": ".constants",
    "ENABLED_DEFAULT": ".constants",
    "ensure_immutable_elastic_config": ".elasticity",
    "IGNORE_NON_ELASTIC_BATCH_INFO": ".constants",
}
_MODULES = ("config", "constants", "elasticity")

__all__ = sorted(_SOURCES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in _SOURCES:
        return getattr(import_module(_SOURCES[name], __name__), name)
    from ..missing import placeholder

    return placeholder(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_SOURCES])
