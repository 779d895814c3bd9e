"""The numbers of ranks that a config's `elasticity` section allows, for the launcher and for schedulers.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...utils.errors import ConfigError
from ...utils.schema.section import Report, read_section
from ..config.text import read_source
from .config import Elasticity, refusal, unplannable
from .rules import ElasticPlan


def elastic_plan(config_source: object) -> ElasticPlan:
    """The batch size of a config, and every number of ranks that can train it.

    Only the section `elasticity` is read; other keys of the file may still be incomplete.

    Raises:
        ConfigError: the section is missing or disabled, or no batch size fits.
    """
    data, name, complaints = read_source(config_source)
    section = data.get("elasticity") if isinstance(data, dict) else None
    if complaints or section is None:
        why = 'elasticity: is missing; write e.g. {"enabled": true, "max_train_batch_size": 2000, '
        raise ConfigError(complaints or [why + '"micro_batch_sizes": [2, 4, 6]}'], name)
    report = Report()
    read = read_section(Elasticity, section, "elasticity", report)
    if read is not None and not read.enabled:
        report.complain("elasticity.enabled", False, "must be true to train elastically")
    elif read is not None:
        report.complaints += unplannable(read, section)
    if read is None or report.complaints:
        raise ConfigError(report.complaints, name)
    return read.plan()


def fits(config_source: object) -> Callable[[int], bool]:
    """A function: whether a number of ranks can train the config's batch. Raises as `elastic_plan`."""
    return elastic_plan(config_source).fits


def valid_world_sizes(config_source: object, upto: int) -> list[int]:
    """The numbers of ranks up to `upto` that can train the config's batch. Raises as `elastic_plan`."""
    return [size for size in elastic_plan(config_source).world_sizes if size <= upto]


def compute_elastic_config(
    ds_config: dict[str, Any], target_deepspeed_version: str = "", world_size: int = 0
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """DeepSpeed's function: (batch size, valid numbers of ranks), and the micro-batch for `world_size` ranks.

    Args:
        target_deepspeed_version: ignored.
        world_size: data-parallel ranks, as are the valid numbers.
    Raises:
        ConfigError: as `elastic_plan`, or `world_size` ranks cannot train the batch.
    """
    found = elastic_plan(ds_config)
    if not world_size:
        return found.batch_size, list(found.replicas)
    if world_size not in found.replicas:
        raise ConfigError(
            [f"world size = {world_size}: {refusal(found, world_size, found.replicas)}"]
        )
    return found.batch_size, list(found.replicas), found.split(world_size)[0]


__all__ = ["compute_elastic_config", "elastic_plan", "fits", "valid_world_sizes"]
