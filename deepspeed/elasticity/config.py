"""`deepspeed.elasticity.config`: the section `elasticity` by DeepSpeed's names, and the errors about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, final

from ...engine.elastic.rules import Plan
from ...engine.elastic.world_sizes import elastic_plan
from ...utils.errors import ConfigError, UsageError
from . import constants as keys


class ElasticityError(UsageError):
    """The section, or a number of ranks, cannot be used."""


class ElasticityConfigError(ElasticityError):
    """The section is wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """This number of ranks cannot train the batch."""


@final
class ElasticityConfig:
    """A checked section.

    max_acceptable_batch_size: samples. micro_batches: samples of each allowed micro-batch.
    """

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        """
        Raises:
            ElasticityConfigError: lists what is wrong.
        """
        given = dict(param_dict)
        self.enabled = bool(given.get(keys.ENABLED, keys.ENABLED_DEFAULT))
        # a section that is switched off may still be incomplete
        self.plan = plan_of({**given, keys.ENABLED: True}) if self.enabled else None
        self.max_acceptable_batch_size = given.get(keys.MAX_ACCEPTABLE_BATCH_SIZE, 2000)
        self.micro_batches = list(given.get(keys.MICRO_BATCHES, (2, 4, 6)))
        self.min_gpus = given.get(keys.MIN_GPUS, 1)
        self.max_gpus = given.get(keys.MAX_GPUS, 10_000)
        self.model_parallel_size = given.get(keys.MODEL_PARALLEL_SIZE, 1)
        self.num_gpus_per_node = given.get(keys.NUM_GPUS_PER_NODE, 1)
        self.min_time = given.get(keys.MIN_TIME, 0)
        self.version = given.get(keys.VERSION, keys.LATEST_ELASTICITY_VERSION)
        self.prefer_larger_batch_size = given.get(keys.PREFER_LARGER_BATCH, True)
        self.ignore_non_elastic_batch_info = given.get(keys.IGNORE_NON_ELASTIC_BATCH_INFO, False)
        self._given = given

    def repr(self) -> dict[str, Any]:
        """The section as it was given."""
        return dict(self._given)

    def __repr__(self) -> str:
        return json.dumps(self._given, sort_keys=True, indent=4)


def plan_of(section: Mapping[str, Any]) -> Plan:
    """The batch size, and the numbers of ranks that can train it.

    Raises:
        ElasticityConfigError: the section is wrong, or no batch size fits.
    """
    try:
        return elastic_plan({keys.ELASTICITY: dict(section)})
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from None


__all__ = [
    "ElasticityConfig",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "plan_of",
]
