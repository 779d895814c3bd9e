"""`deepspeed.elasticity`: one batch size for many numbers of ranks, by xds's own rules (`xds elastic`)."""

from __future__ import annotations

from .config import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from .constants import ELASTICITY, ENABLED, ENABLED_DEFAULT, IGNORE_NON_ELASTIC_BATCH_INFO
from .elastic_agent import DSElasticAgent
from .elasticity import (
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)

__all__ = [
    "ELASTICITY",
    "ENABLED",
    "ENABLED_DEFAULT",
    "IGNORE_NON_ELASTIC_BATCH_INFO",
    "DSElasticAgent",
    "ElasticityConfig",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
]
