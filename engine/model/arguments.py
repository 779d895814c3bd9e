"""What user code passes to `xds.initialize`: its checks, also that all ranks have the same config and model.

A class of a feature can only be met where its module is loaded, so no module is loaded to look for one.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from ...ops.comm.collectives import Collectives
from ...ops.comm.config import Communication
from ...ops.comm.exchange import all_gather_json
from ...ops.comm.opening import open_collectives
from ...ops.flat import is_channels_last
from ...utils.arguments import wrong
from ...utils.errors import ConfigError, UsageError, XdsError
from ...utils.quoting import printable, ranks_text
from ..config.config import Config

if TYPE_CHECKING:
    from ...pipe.module import PipelineModule


BlockRuns = Sequence[Sequence[tuple[str, nn.Module]]]  # name and module of each block, by stage


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


def has_compressed_layers(model: nn.Module) -> bool:
    """The script has called `xds.compression.init_compression`."""
    layer = _if_loaded("compression.training.layers", "CompressedLayer")
    return layer is not None and any(isinstance(module, layer) for module in model.modules())


def unwrap_weights(model: nn.Module) -> None:
    """Give layers that a script has converted for FSDP2's gathers in 8 bits their parameters back.

    accelerate asks torchao for them. They are the objects that the script's optimizer has.
    """
    layer = getattr(sys.modules.get("torchao.float8.float8_linear"), "Float8Linear", None)
    if layer is None or is_part(model):  # a look at the modules of a part would build the whole
        return
    for module in model.modules():
        inner = getattr(module._parameters.get("weight"), "_tensor", None)
        if isinstance(module, layer) and isinstance(inner, nn.Parameter):
            module._parameters["weight"] = inner


def optional_states(model: nn.Module) -> tuple[str, ...]:
    """Names in `model` that weights of one without compressed layers lack."""
    if not has_compressed_layers(model):
        return ()
    states = _if_loaded("compression.training.layers", "STATES")
    return tuple(name for pair in states.values() for name in pair)


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
    was_cut = _if_loaded("experts.cut", "was_cut")
    if was_cut is not None and any(was_cut(module) for module in modules):
        raise UsageError(
            "xds.initialize: an earlier xds.initialize with expert_parallel has left some experts of this "
            "model on each rank; build the model again"
        )


# -- every rank has the same config and the same model ---------------------------------------------------
# Without the check of the config, ranks would update their shards by different rules, or wait for messages that
# no rank sends. Without that of the model, they would exchange flat buffers of unequal sizes, and gloo would
# abort the process.

CONFIG = "the config"
MODEL = "the layout of the model"
# keys and sections that decide what a rank prints or measures on itself, and nothing that it sends
OF_RANK = {
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "steps_per_print",
    "dump_state",
    "log_level",
    "wall_clock_breakdown",
    "memory_breakdown",
    "timers",
    "comms_logger.verbose",
    "flops_profiler.module_depth",
    "flops_profiler.top_modules",
    "flops_profiler.detailed",
    "flops_profiler.output_file",
    "data_efficiency.data_sampling.dynamic_batching.verbose",
    "compression_training.weight_quantization.shared_parameters.quantize_verbose",
    "quantize_training.quantize_verbose",
}
# folders on a local disk; only whether they are given is compared
OF_NODES = {
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
    "checkpoint.preemption_save_dir",
    "report_folder",
}
# of groups of ranks that train alone (outer): what may differ from one to another
BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
OF_GROUPS = (*BATCHES, "zero_optimization.")
MOST_KEYS = 8  # in one message
MOST_VALUES = 4  # of one key
MOST_CHARS = 80  # of one value
NOT_GIVEN = "not given"
REFUSED = "refused"  # in place of settings, of a rank that cannot use its arguments
Settings = dict[str, str]


# -- the config ---------------------------------------------------------------------------------------------

_NO_OPTIMIZER = (
    'optimizer is missing: write e.g. {"type": "AdamW", "params": {"lr": 3e-4}}, or pass optimizer= to '
    "xds.initialize; a model that only infers is frozen first, by model.requires_grad_(False)"
)


def resolve_together(
    config: Config,
    optimizer: Any,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    needs_section: bool,
    num_groups: int = 1,
) -> Config:
    """`config.resolve` for the ranks of the group. A collective: compare all settings of all ranks.

    Args:
        num_groups: the run has so many groups like this one.
        optimizer: the one that the script passes, if any. Its class and hyperparameters are compared as well.
        needs_section: the config must have a section `optimizer`. A frozen model (a teacher) needs none.
    Sends: 16 bytes to each rank, the first message of the engine; if the hashes differ, all settings.

    Raises:
        UsageError: on every rank; has the keys that differ, with the values of the ranks.
        ConfigError: as `config.resolve`, or the section is missing, on every rank; all complaints at once.
    """
    # another rank may have another config, which is then the cause of a complaint
    complaints = [_NO_OPTIMIZER] if needs_section and config.optimizer is None else []
    try:
        config = config.resolve(num_groups * group.size())
    except ConfigError as error:
        complaints += error.complaints
    mine = dict([*_of_config(config), *_of_optimizer(optimizer)])
    groups = 1 if config.outer is None or num_groups > 1 else config.outer.groups
    by_rank = _unless_same(mine, group, device, groups, _may_differ(config, mine))
    if by_rank is not None:
        raise UsageError(_difference(by_rank))
    if complaints:
        raise ConfigError(complaints, config.source)
    return config


def refuse_together(error: XdsError, group: dist.ProcessGroup, device: torch.device) -> None:
    """Take part in `resolve_together` of the other ranks, which raise `error` as well. A collective."""
    _unless_same({REFUSED: str(error)}, group, device)


def _may_differ(config: Config, settings: Settings) -> set[str]:
    """Those of the settings that groups of ranks need not have alike."""
    if config.data_packing.tokens or config.data_efficiency.data_sampling.has_curriculum:
        return {key for key in settings if key.startswith(OF_GROUPS) and key not in BATCHES}
    return {key for key in settings if key.startswith(OF_GROUPS)}


def settings_of_groups(config: Config) -> Settings:
    """What all groups of ranks have alike."""
    settings = dict(_of_config(config))
    free = _may_differ(config, settings)
    return {key: value for key, value in settings.items() if key not in free}


def _unless_same(
    mine: Settings,
    group: dist.ProcessGroup,
    device: torch.device,
    num_groups: int = 1,
    free: Collection[str] = (),
) -> list[Settings] | None:
    """The settings of each rank; None: all have the same. A collective.

    free: settings that only the ranks of each group must have alike.
    """
    # the section `communication` may differ, so the message does not depend on it
    plain = open_collectives(
        group, device, section=Communication.model_construct(shared_memory=False)
    )
    if num_groups == 1 or group.size() % num_groups:
        num_groups, free = 1, ()
    shared = {key: value for key, value in mine.items() if key not in free}
    own = {key: mine[key] for key in free}
    if _is_same(_text(shared), plain, CONFIG) and (
        num_groups == 1 or _is_same(_text(own), plain, CONFIG, num_groups)
    ):
        return None
    found: list[Settings] = all_gather_json(plain, mine, CONFIG)
    for key in own:  # the message is about the others
        each = len(found) // num_groups
        parts = [found[at : at + each] for at in range(0, len(found), each)]
        if all(len({one.get(key) for one in part}) == 1 for part in parts):
            for one in found:
                one.pop(key, None)
    return found


def _text(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True)


def _of_config(config: Config) -> Iterator[tuple[str, str]]:
    """(key, value as text) for each setting that all ranks must share."""
    for name, value in config.as_dict().items():
        yield from _leaves(name, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if name in OF_RANK:
        return
    if isinstance(value, dict) and value:
        for key in value:
            yield from _leaves(f"{name}.{key}", value[key])
    elif name in OF_NODES:
        yield name, "given" if value else NOT_GIVEN
    else:
        yield name, json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)


def _of_optimizer(optimizer: Any) -> Iterator[tuple[str, str]]:
    """The class of an optimizer that the script passes, and plain values in its groups."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    yield "optimizer=", type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            parts = value if isinstance(value, tuple | list) else (value,)
            if all(isinstance(part, bool | int | float | str) for part in parts):
                yield f"optimizer=, group {number}, {key}", json.dumps(value)


def _difference(by_rank: list[Settings]) -> str:
    """The sentence with the keys that differ. A section that some ranks do not have has the keys in it."""
    refused = next((rank for rank, one in enumerate(by_rank) if REFUSED in one), None)
    if refused is not None:
        return f"xds.initialize failed on rank {refused}: {by_rank[refused][REFUSED]}"
    every = dict.fromkeys(key for one in by_rank for key in one)
    differ = [key for key in every if len({one.get(key) for one in by_rank}) > 1]
    keys = [key for key in differ if not any(other.startswith(f"{key}.") for other in differ)]
    other = next(rank for rank, one in enumerate(by_rank) if one != by_rank[0])
    more = f"; and {len(keys) - MOST_KEYS} more keys" if len(keys) > MOST_KEYS else ""
    parts = [_values(key, by_rank) for key in keys[:MOST_KEYS]]
    return (
        f"rank {other} has another config than rank 0: {'; '.join(parts)}{more}; pass the same config on every "
        "rank"
    )


def _values(key: str, by_rank: list[Settings]) -> str:
    """For example "gradient_clipping = 0.0 on ranks 0, 2 and 1.0 on rank 1"."""
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(by_rank):
        ranks.setdefault(one.get(key, NOT_GIVEN), []).append(rank)
    shown = [
        f"{printable(value, MOST_CHARS)} on {ranks_text(who)}"
        for value, who in list(ranks.items())[:MOST_VALUES]
    ]
    more = f" and {len(ranks) - MOST_VALUES} more values" if len(ranks) > MOST_VALUES else ""
    return f"{printable(key)} = {' and '.join(shown)}{more}"


# -- the model ----------------------------------------------------------------------------------------------


def check_same_model(model: nn.Module, collectives: Collectives) -> None:
    """A collective: compare the model's layout on all ranks.

    Sends:   16 bytes to each rank; if the digests differ, 10 more bytes per tensor.

    Raises:
        UsageError: on every rank; names the first parameter or buffer that differs.
    """
    lines = _lines(model)
    if _is_same("\n".join(lines), collectives, MODEL):
        return
    sums = all_gather_json(collectives, [zlib.crc32(line.encode()) for line in lines], MODEL)
    other = next(rank for rank, found in enumerate(sums) if found != sums[0])
    at = next(
        (i for i, (one, two) in enumerate(zip(sums[0], sums[other], strict=False)) if one != two),
        min(len(sums[0]), len(sums[other])),
    )
    shown = all_gather_json(collectives, lines[at] if at < len(lines) else "nothing more", MODEL)
    raise UsageError(
        f"rank {other} has another model than rank 0: {shown[other]} on rank {other}, {shown[0]} on rank 0; "
        "build the same model, with the same config, on every rank"
    )


def _lines(model: nn.Module) -> list[str]:
    """Everything that must be equal, one line each, in layout order."""
    params = [
        f"parameter {name} {_described(param)}{' (channels_last)' if is_channels_last(param) else ''}"
        f"{'' if param.requires_grad else ' (frozen)'}"
        for name, param in model.named_parameters()
    ]
    return params + [f"buffer {name} {_described(each)}" for name, each in model.named_buffers()]


def _described(tensor: torch.Tensor) -> str:
    if nn.parameter.is_lazy(tensor):
        return "without a shape"  # refused later, with the remedy
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


# -- both ---------------------------------------------------------------------------------------------------


def _is_same(text: str, collectives: Collectives, what: str, num_groups: int = 1) -> bool:
    """Whether all ranks have the same text, or all ranks of each group. A collective."""
    digest = hashlib.sha256(text.encode()).digest()[:16]
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(collectives.device)
    table = collectives.gather_small(mine, what=what)
    parts = table.view(num_groups, -1, 2)
    return bool((parts == parts[:, :1]).all())


__all__ = [
    "BlockRuns",
    "as_pipeline",
    "check_arguments",
    "check_whole",
    "existing_modules",
    "has_compressed_layers",
    "is_cut",
    "is_part",
    "optional_states",
    "refuse_together",
    "resolve_together",
    "settings_of_groups",
    "unwrap_weights",
    "with_model",
]
