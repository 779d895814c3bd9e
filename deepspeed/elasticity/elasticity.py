"""`deepspeed.elasticity.elasticity`: the batch size of an elastic config, and a scheduler's view of it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from ...engine.config.elasticity import refusal
from ..errors import raises_theirs
from . import constants as keys
from .config import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    plan_of,
)

log = logging.getLogger("xds")


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether the config has the section, switched on."""
    section = ds_config.get(keys.ELASTICITY)
    return bool(section and section.get(keys.ENABLED, keys.ENABLED_DEFAULT))


@raises_theirs
def compute_elastic_config(
    ds_config: Mapping[str, Any] | str,
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """(batch size in samples, valid numbers of data-parallel ranks), and the micro-batch where it is asked for.

    Args:
        ds_config: the config, or its JSON. Only the section `elasticity` is read.
        target_deepspeed_version: of the DeepSpeed that will train, at least 0.3.8.
        world_size: all ranks; then the micro-batch for them is returned too. 0 with `return_microbatch` or a
            section of version 0.2: that of the variable WORLD_SIZE.
    Raises:
        ElasticityConfigError: the section is missing, switched off or wrong.
        ElasticityIncompatibleWorldSize: these ranks cannot train the batch.
        ElasticityError: another version is needed.
    """
    section = _section(ds_config)
    _check_versions(section, target_deepspeed_version)
    plan = plan_of(section)
    valid = list(plan.replicas)
    if not world_size and return_microbatch:
        world_size = _world_size()
    if not world_size:
        return plan.batch_size, valid
    if not plan.fits(world_size):
        raise ElasticityIncompatibleWorldSize(
            f"world size = {world_size}: {refusal(plan, world_size, plan.world_sizes)}"
        )
    micro, _ = plan.split(world_size // plan.limits.model_parallel_size)
    return plan.batch_size, valid, micro


@raises_theirs
def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Check that a scheduler planned with the same section, which it left in DEEPSPEED_ELASTICITY_CONFIG.

    Raises:
        ElasticityConfigError: they differ.
    """
    text = os.environ.get(keys.DEEPSPEED_ELASTICITY_CONFIG)
    if text is None:
        log.warning(
            "%s is not set: no check of whether the scheduler planned with this section",
            keys.DEEPSPEED_ELASTICITY_CONFIG,
        )
        return
    planned = ElasticityConfig(json.loads(text))
    here = ElasticityConfig(runtime_elastic_config_dict)
    for name in ("max_acceptable_batch_size", "micro_batches", "version"):
        if getattr(planned, name) != getattr(here, name):
            raise ElasticityConfigError(
                f"elasticity: {name} is {getattr(here, name)} here, and the scheduler planned with "
                f"{getattr(planned, name)}: use one config for both"
            )


def _section(ds_config: Mapping[str, Any] | str) -> dict[str, Any]:
    data = json.loads(ds_config) if isinstance(ds_config, str) else ds_config
    section = data.get(keys.ELASTICITY)
    if section is None:
        raise ElasticityConfigError(f"the config has no section {keys.ELASTICITY}: add it")
    if not section.get(keys.ENABLED, keys.ENABLED_DEFAULT):
        raise ElasticityConfigError("elasticity.enabled is false: set it to true")
    return dict(section)


def _check_versions(section: dict[str, Any], target: str) -> None:
    version = section.get(keys.VERSION, keys.LATEST_ELASTICITY_VERSION)
    if float(version) > keys.LATEST_ELASTICITY_VERSION:
        raise ElasticityConfigError(
            f"elasticity.version = {version}: the newest is {keys.LATEST_ELASTICITY_VERSION}; set that"
        )
    section[keys.VERSION] = float(version)
    numbers = [int(part) for part in target.split("+")[0].split(".")[:3] if part.isdecimal()]
    least = [int(part) for part in keys.MINIMUM_DEEPSPEED_VERSION.split(".")]
    if numbers and numbers < least:
        raise ElasticityError(
            f"target_deepspeed_version = {target}: needs at least {keys.MINIMUM_DEEPSPEED_VERSION}"
        )


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    if not text.isdecimal():
        raise ElasticityConfigError(
            "the micro-batch depends on the number of ranks: pass world_size, or set WORLD_SIZE"
        )
    return int(text)


__all__ = ["compute_elastic_config", "elasticity_enabled", "ensure_immutable_elastic_config"]
