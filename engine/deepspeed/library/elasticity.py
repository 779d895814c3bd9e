"""`deepspeed.elasticity`: one batch size for many numbers of ranks, by xds's own rules (`xds elastic`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ....utils.errors import ConfigError, UsageError
from ...config.elasticity import refusal
from ...elastic.rules import Plan
from ...elastic.world_sizes import elastic_plan
from ..errors import raises_theirs


class ElasticityError(UsageError):
    """The section, or a number of ranks, cannot be used."""


class ElasticityConfigError(ElasticityError):
    """The section is wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """This number of ranks cannot train the batch."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether the config has the section, switched on."""
    section = ds_config.get("elasticity")
    return bool(section and section.get("enabled", False))


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
        target_deepspeed_version: without effect.
        world_size: all ranks; then the micro-batch for them is returned too. 0 with `return_microbatch`:
            that of the variable WORLD_SIZE.
    Raises:
        ElasticityConfigError: the section is missing, switched off or wrong.
        ElasticityIncompatibleWorldSize: these ranks cannot train the batch.
    """
    data = json.loads(ds_config) if isinstance(ds_config, str) else ds_config
    if not elasticity_enabled(data):
        raise ElasticityConfigError(
            "the config has no section elasticity with enabled = true: add it"
        )
    plan = _plan_of(data["elasticity"])
    if not world_size and return_microbatch:
        world_size = int(os.environ.get("WORLD_SIZE") or 0)
        if not world_size:
            raise ElasticityConfigError(
                "the micro-batch depends on the number of ranks: pass world_size, or set WORLD_SIZE"
            )
    if not world_size:
        return plan.batch_size, list(plan.replicas)
    if not plan.fits(world_size):
        raise ElasticityIncompatibleWorldSize(
            f"world size = {world_size}: {refusal(plan, world_size, plan.world_sizes)}"
        )
    micro, _ = plan.split(world_size // plan.limits.model_parallel_size)
    return plan.batch_size, list(plan.replicas), micro


def _plan_of(section: Mapping[str, Any]) -> Plan:
    try:
        return elastic_plan({"elasticity": dict(section)})
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from None
