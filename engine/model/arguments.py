"""What user code passes to `xds.initialize`: its checks, and what a PipelineModule says about the config.

A class of a feature can only be met where its module is loaded, so no module is loaded to look for one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

from ...utils.arguments import wrong
from ...utils.errors import UsageError
from ..config.config import Config

if TYPE_CHECKING:
    from ...pipe.module import PipelineModule

Runs = Sequence[Sequence[tuple[str, nn.Module]]]  # name and module of each block, by stage


def as_pipeline(model: nn.Module) -> PipelineModule | None:
    """`model`, if it is a PipelineModule: each rank builds its own layers, so ranks differ."""
    found = _if_loaded("pipe.module", "PipelineModule")
    return model if found is not None and isinstance(model, found) else None


def is_part(model: nn.Module) -> bool:
    """Each rank builds its own layers of the model."""
    return as_pipeline(model) is not None


def _if_loaded(module: str, name: str) -> Any:
    """`name` of a module of xds; None: the module is not loaded."""
    root = __name__.partition(".")[0]
    return getattr(sys.modules.get(f"{root}.{module}"), name, None)


def check_arguments(model: object, *, lr_scheduler: Any, collate_fn: Any, group: Any) -> None:
    """Check the arguments that are objects.

    Raises:
        UsageError: `model` is no module, or has parameters without a shape; or another is of a wrong type.
    """
    if not isinstance(model, nn.Module):
        raise wrong("model", model, "a torch.nn.Module object; build it before xds.initialize")
    pipeline = as_pipeline(model)
    whole = model if pipeline is None else pipeline.outline()  # LayerSpecs stay unbuilt
    tensors = [*whole.named_parameters(), *whole.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise UsageError(
            f"{lazy[0]} is one of {len(lazy)} tensors of the model that have no shape yet (lazy modules): "
            "call the model once with a batch before xds.initialize"
        )
    if not (lr_scheduler is None or callable(lr_scheduler) or hasattr(lr_scheduler, "step")):
        raise wrong("lr_scheduler", lr_scheduler, "a scheduler, or a callable that makes one")
    if not (collate_fn is None or callable(collate_fn)):
        raise wrong("collate_fn", collate_fn, "a callable, as torch's DataLoader takes it")
    if not (group is None or hasattr(group, "size")):
        raise wrong("group", group, "a process group of torch.distributed, or None")


def existing_modules(model: nn.Module) -> list[nn.Module]:
    """The model; of a PipelineModule, which builds all layers when asked for its modules, those that it has."""
    pipeline = as_pipeline(model)
    return [model] if pipeline is None else list(pipeline.existing())


def with_model(config: Config, model: nn.Module) -> Config:
    """The config with what a PipelineModule says: stages, schedule, shapes.

    Raises:
        ConfigError: the config says something else.
    """
    pipeline = as_pipeline(model)
    if pipeline is None:
        return config
    if pipeline.num_stages is not None:
        config = config.with_stages(pipeline.num_stages)
    section = config.pipeline
    changes: dict[str, Any] = {"dynamic_shape": section.dynamic_shape or pipeline.dynamic_shape}
    if pipeline.schedule is not None and "schedule" not in section.model_fields_set:
        changes["schedule"] = pipeline.schedule
    pipeline.seed_layers = pipeline.seed_layers or section.seed_layers
    if section.activation_checkpoint_interval:
        pipeline.activation_checkpoint_interval = section.activation_checkpoint_interval
    return config.model_copy(update={"pipeline": section.model_copy(update=changes)})


def is_cut(model: nn.Module, config: Config) -> bool:
    """The model runs in pipeline stages, possibly in a single one."""
    return config.pipeline.stages > 1 or as_pipeline(model) is not None


def check_whole(model: nn.Module) -> None:
    """
    Raises:
        UsageError: an earlier `initialize` has left only a part of the model on this rank.
    """
    modules = [module for top in existing_modules(model) for module in top.modules()]
    cut = [
        _if_loaded("pipe.cut.stand_ins", "StandIn"),
        _if_loaded("pipe.cut.layer_lists", "OtherStage"),
    ]
    if any(isinstance(module, tuple(kind for kind in cut if kind)) for module in modules):
        raise UsageError(
            "xds.initialize: an earlier xds.initialize has cut this model into pipeline stages, and the layers "
            "of other stages are gone; build the model again"
        )
    was_sliced = _if_loaded("tensor.slicing", "was_sliced")
    if was_sliced is not None and any(was_sliced(module) for module in modules):
        raise UsageError(
            "xds.initialize: an earlier xds.initialize with tensor_parallel.tp_size > 1 has cut the layers of "
            "this model, and a rank has slices only; build the model again"
        )


__all__ = [
    "Runs",
    "as_pipeline",
    "check_arguments",
    "check_whole",
    "existing_modules",
    "is_cut",
    "is_part",
    "with_model",
]
