"""Pipelines whose steps have fewer micro-batches than stages, which DeepSpeed trains too."""

from __future__ import annotations

from torch import nn

from ....engine.config.config import Config
from ....pipe.module import PipelineModule
from ....utils.errors import ConfigError

FALLBACK = "gpipe"


def with_schedule_for(config: Config, model: nn.Module, world_size: int) -> Config:
    """`config`, which is not resolved, with a schedule that can run the micro-batches of a step.

    With fewer micro-batches than stages the default, 1F1B, has the order of GPipe: all of them are in flight.
    xds refuses that, because most ranks wait. A schedule that the config or the model names is kept.
    """
    own = config.pipeline
    if (
        not isinstance(model, PipelineModule)
        or model.schedule
        or "schedule" in own.model_fields_set
    ):
        return config
    changed = own.model_copy(
        update={"schedule": FALLBACK, "stages": model.num_stages or own.stages}
    )
    try:
        tried = config.model_copy(update={"pipeline": changed}).resolve(world_size)
    except ConfigError:
        return config  # the engine says it
    steps = tried.gradient_accumulation_steps
    if steps is None or steps >= changed.stages:
        return config
    note = (
        f"pipeline.schedule is {FALLBACK}: a step has fewer micro-batches ({steps}) than stages "
        f"({changed.stages}), so ranks wait; more gradient_accumulation_steps use them better"
    )
    section = own.model_copy(update={"schedule": FALLBACK})
    return config.model_copy(update={"pipeline": section, "notes": (*config.notes, note)})


__all__ = ["with_schedule_for"]
