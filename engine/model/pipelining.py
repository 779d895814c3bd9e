"""Builds what a pipeline adds to an engine: the cut of the model, its groups, its messages, its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import nn

from ...compression.legs import BuildLegs, ExactLegs
from ...ops.comm.collectives import Collectives
from ...ops.comm.mesh_groups import AxisGroups, MeshGroups
from ...ops.comm.parts import EqualParts
from ...ops.mesh import Axis
from ...pipe.channel import JOINS, Channel, Ways
from ...pipe.cut.cutting import cut_model
from ...pipe.cut.layer_lists import OtherStage
from ...pipe.cut.part import Part
from ...pipe.cut.plain_models import Sides
from ...pipe.cut.stand_ins import StandIn
from ...pipe.module import PipelineModule
from ...pipe.schedules.actions import Placement, Table
from ...pipe.schedules.lowering import with_states
from ...pipe.schedules.plan import SchedulePlan
from ...pipe.weight_grads import WeightGrads
from ...tensor.shares import unit_of
from ...tensor.slicing import Sliced, was_sliced
from ...utils.errors import UsageError
from ...zero.access.owners import find_owner
from ...zero.core.groups import FlatGroup, FlatGroups
from ...zero.core.layout import Box
from ...zero.core.policy import Policy
from ...zero.core.sharded_model import ShardedModel
from ...zero.core.slices import Slices
from ..config.config import Config
from ..parts import LoopFactory, Parts
from ..steps.batch_loop import Loop
from ..steps.counters import Counters
from ..steps.pipeline_loop import Pipeline, PipelineLoop, Sequences
from ..steps.training_step import TrainingStep
from .shard_groups import ALL_RANKS, DATA_AXES, ShardGroups

Runs = Sequence[Sequence[tuple[str, nn.Module]]]

ALL_OF_A_STAGE: tuple[Axis, ...] = ("data", "sequence", "tensor")


@final
@dataclass(frozen=True, eq=False)
class Cut:
    """The part of the model that rank `rank` of a pipeline has."""

    part: Part
    plan: SchedulePlan
    rank: int

    @property
    def runs(self) -> list[list[tuple[str, nn.Module]]]:
        """Its blocks by stage, as `plan_units` takes them."""
        found: dict[int, list[tuple[str, nn.Module]]] = {}
        for block in self.part.blocks:
            found.setdefault(block.stage, []).append((block.name, block.module))
        return list(found.values())


class BuildPolicy(Protocol):
    """The policy of a ZeRO stage over a number of ranks."""

    def __call__(self, stage: int, world_size: int) -> Policy: ...


def with_model(config: Config, model: nn.Module) -> Config:
    """The config with what a PipelineModule says: stages, schedule, shapes.

    Raises:
        ConfigError: the config says something else.
    """
    if not isinstance(model, PipelineModule):
        return config
    if model.num_stages is not None:
        config = config.with_stages(model.num_stages)
    section = config.pipeline
    changes: dict[str, Any] = {"dynamic_shape": section.dynamic_shape or model.dynamic_shape}
    if model.schedule is not None and "schedule" not in section.model_fields_set:
        changes["schedule"] = model.schedule
    model.seed_layers = model.seed_layers or section.seed_layers
    if section.activation_checkpoint_interval:
        model.activation_checkpoint_interval = section.activation_checkpoint_interval
    return config.model_copy(update={"pipeline": section.model_copy(update=changes)})


def is_cut(model: nn.Module, config: Config) -> bool:
    """The model runs in pipeline stages, possibly in a single one."""
    return config.pipeline.stages > 1 or isinstance(model, PipelineModule)


def is_part(model: nn.Module) -> bool:
    """Each rank builds its own layers of the model, so ranks differ."""
    return isinstance(model, PipelineModule)


def check_whole(model: nn.Module) -> None:
    """
    Raises:
        UsageError: an earlier `initialize` has left only a part of the model on this rank.
    """
    # a PipelineModule builds all of its layers when it is asked for its modules
    existing = model.existing() if isinstance(model, PipelineModule) else [model]
    modules = [module for top in existing for module in top.modules()]
    if any(isinstance(module, StandIn | OtherStage) for module in modules):
        raise UsageError(
            "xds.initialize: an earlier xds.initialize has cut this model into pipeline stages, and the layers "
            "of other stages are gone; build the model again"
        )
    if any(was_sliced(module) for module in modules):
        raise UsageError(
            "xds.initialize: an earlier xds.initialize with tensor_parallel.tp_size > 1 has cut the layers of "
            "this model, and a rank has slices only; build the model again"
        )


def cut(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    config: Config,
    mesh: MeshGroups,
) -> Cut:
    """Keep the part of `model` that this rank has. `blocks`: found in the whole model.

    Raises:
        UsageError: the model cannot be cut into so many stages.
    """
    section = config.pipeline
    if section.stages > 1 and not mesh.is_everywhere:
        raise UsageError(
            f"group= with pipeline.stages = {section.stages}: a pipeline uses all ranks; leave group= out, or "
            "start a job of its own for it"
        )
    existing = model.existing() if isinstance(model, PipelineModule) else [model]
    if any(find_owner(param) is not None for m in existing for param in m.parameters()):
        raise UsageError(
            f"pipeline.stages = {section.stages}: the model was built in xds.zero.Init, which spreads every "
            'parameter over all ranks; build it on the meta device (with torch.device("meta")) and pass '
            "weights= to xds.initialize, or use xds.pipe.PipelineModule with LayerSpec layers"
        )
    rank = mesh.coordinate("pipe")
    plan = plan_schedule(model, blocks, config)
    mesh.opened[0].name_places(
        {
            rank: _stages_text(plan.placement.stages_of(mesh.mesh.coordinates(rank).pipe))
            for rank in range(mesh.mesh.size)
        }
    )
    part = cut_model(model, blocks, plan.placement, rank, *partition_of(model, config))
    return Cut(part, plan, rank)


def plan_schedule(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], config: Config
) -> SchedulePlan:
    """The schedule that the config asks for. `blocks`: found in the whole model.

    Raises:
        UsageError: there are more stages than layers, or the schedule cannot work with these numbers.
    """
    section = config.pipeline
    steps = config.gradient_accumulation_steps
    num_layers = len(model.layers) if isinstance(model, PipelineModule) else len(blocks)
    most = num_layers if isinstance(model, PipelineModule) else len(list(model.modules()))
    chunks = section.chunks or 1
    if num_layers and chunks > 1 and section.stages * chunks > most:  # its table may be very large
        raise UsageError(
            f"pipeline.stages = {section.stages} x pipeline.chunks = {chunks} are more stages than the "
            f"model has layers ({num_layers}); lower one of them"
        )
    return SchedulePlan(section.schedule, section.stages, section.chunks or 0, steps, num_layers)


def partition_of(model: nn.Module, config: Config) -> tuple[str | tuple[int, ...] | None, Sides]:
    """Where the config cuts the layers, and what it says about the modules around them."""
    section = config.pipeline
    is_given = not is_part(model) or "partition" in section.model_fields_set
    partition = section.partition if is_given else None
    return partition, Sides(section.first_stage_modules, section.last_stage_modules)


def _stages_text(stages: Sequence[int]) -> str:
    return ("stage " if len(stages) == 1 else "stages ") + " and ".join(map(str, stages))


def open_flat_groups(
    mesh: AxisGroups,
    world: Collectives,
    policy: BuildPolicy,
    stage: int,
    found: Cut | None,
    sliced: Sliced | None = None,
    legs: BuildLegs = ExactLegs,
    shard_groups: ShardGroups = ALL_RANKS,
) -> FlatGroups:
    """The group of every flat buffer. For all ranks.

    Args:
        sliced: what the tensor ranks have cut; None: nothing.
        legs: how gradients and parameters are sent.
        shard_groups: which data-parallel ranks a buffer is sharded over.
    """
    num_tensor = mesh.mesh.tensor
    is_one = found is None and num_tensor == 1
    collectives = world if is_one else mesh.along(DATA_AXES)
    data = shard_groups.open(mesh, collectives, policy, stage, legs)
    sliced = Sliced() if sliced is None else sliced
    by_param: dict[int, FlatGroup] = {}
    # all groups drop parameters or none
    reached = stage if data.policy.shards_params else min(stage, 2)
    if num_tensor > 1:
        both = mesh.along(ALL_OF_A_STAGE)
        kept = policy(reached, both.world_size)
        equal = FlatGroup(both, legs(both, num_tensor), kept, 1)  # gradients are equal on all
        parts = FlatGroup(both, legs(both), kept, 2)
        by_param = {key: parts if key in sliced.partial else equal for key in sliced.whole}
    kinds = _shared_kinds(found, sliced)
    first = 3  # the number of the first group, the same on all ranks
    for number, (stages, is_cut) in enumerate(kinds, first):
        shared = mesh.shared(stages, by_slice=is_cut)
        if shared is None:
            continue
        sent = legs(shared, 1 if is_cut else num_tensor)
        kept = policy(min(stage, 2), shared.world_size)
        group = FlatGroup(shared, sent, kept, number, is_shared=True)
        by_param |= dict.fromkeys(kinds[stages, is_cut], group)
    in_stages = {key for keys in kinds.values() for key in keys}
    if num_tensor > 1:
        for number, key_group in enumerate(_copied(mesh, world, sliced), first + len(kinds)):
            copies, keys = key_group
            kept = policy(reached, copies.world_size)
            group = FlatGroup(copies, legs(copies), kept, number)
            by_param |= dict.fromkeys(keys.difference(in_stages), group)
    names = {} if found is None else dict(found.part.names)
    slices = _slices(mesh, sliced, found)
    return FlatGroups(world, data, mesh.mesh, by_param, names, slices)


def _shared_kinds(
    found: Cut | None, sliced: Sliced
) -> dict[tuple[tuple[int, ...], bool], set[int]]:
    """(pipeline ranks, is it cut) -> id of this rank's parameters, for what several stages hold. Sorted.

    The keys are the same on all ranks.
    """
    if found is None:
        return {}
    part = found.part
    kinds = sorted({(ranks, name in sliced.names) for name, ranks in part.shared.items()})
    keys: dict[tuple[tuple[int, ...], bool], set[int]] = {kind: set() for kind in kinds}
    for key, name in part.names.items():
        if name in part.shared:
            keys[part.shared[name], name in sliced.names].add(key)
    return keys


def _copied(
    mesh: AxisGroups, world: Collectives, sliced: Sliced
) -> list[tuple[Collectives, set[int]]]:
    """The ranks that hold copies of slices, with id of these parameters. For all ranks; in one order."""
    num_tensor, rank = mesh.mesh.tensor, mesh.coordinate("tensor")
    by_count: dict[int, set[int]] = {}  # number of different slices
    for key, piece in sliced.slices.items():
        count = len(set(piece.by_rank))
        if count < num_tensor:
            by_count.setdefault(count, set()).add(key)
    mine = torch.zeros(num_tensor, dtype=torch.int64, device=world.device)
    mine[list(by_count)] = 1
    counts = world.gather_small(mine, what="copies of slices").amax(0).nonzero()[:, 0].tolist()
    found = []
    for count in counts:
        sets: list[list[int]] = [[] for _ in range(count)]
        for other in range(num_tensor):
            sets[unit_of(count, num_tensor, other)].append(other)
        keys = by_count.get(count, set())
        assert all(sliced.copies(key, rank) in map(tuple, sets) for key in keys)
        found.append((mesh.within(ALL_OF_A_STAGE, sets), keys))
    return found


def _slices(mesh: AxisGroups, sliced: Sliced, found: Cut | None) -> dict[int, Slices]:
    """The slices of each parameter on all tensor ranks. For all ranks."""
    if mesh.mesh.tensor == 1:
        return {}
    tensor, together = mesh.along("tensor"), mesh.along(ALL_OF_A_STAGE)
    part = None if found is None else found.part
    names = {} if part is None else part.names
    shared = {} if part is None else part.shared
    over_stages = {
        ranks: mesh.shared(ranks)
        for ranks in sorted({ranks for name, ranks in shared.items() if name in sliced.names})
    }
    result = {}
    for key, one in sliced.slices.items():
        boxes = tuple(Box(one.whole, one.dim, ranges) for ranges in one.by_rank)
        ranks = shared.get(names.get(key, ""), (mesh.coordinate("pipe"),))
        is_first = mesh.coordinate("pipe") == min(ranks)
        is_first = is_first and not (mesh.coordinate("data") or mesh.coordinate("sequence"))
        of_stages = over_stages.get(ranks)
        result[key] = Slices(tensor, of_stages or together, boxes, is_first)
    return result


def _ways(mesh: MeshGroups, kind: str, placement: Placement) -> Ways:
    """The groups of one kind of message; several chunks send it in both directions between two ranks."""
    up = mesh.along("pipe", kind)
    return Ways(up, mesh.along("pipe", f"{kind}, back") if placement.num_chunks > 1 else up)


def build_pipeline(
    found: Cut,
    mesh: MeshGroups,
    config: Config,
    sharded: ShardedModel,
    sequences: Sequences | None = None,
) -> LoopFactory:
    """What makes the loop of a pipeline. Opens the groups of its messages: for all ranks."""
    section = config.pipeline
    placement = found.plan.placement
    forward, backward = _ways(mesh, "forward", placement), _ways(mesh, "backward", placement)
    wanted = (section.pipe_partitioned, section.grad_partitioned)
    group = mesh.along("tensor") if mesh.mesh.tensor > 1 else None
    parts = [EqualParts(group, JOINS) if cut and group is not None else None for cut in wanted]
    ways = (forward, backward, placement)
    # whether a model of transformers makes a mask depends on the tokens of this sequence rank
    is_dynamic = section.dynamic_shape or sequences is not None
    channel = Channel(*ways, is_dynamic=is_dynamic, parts=(parts[0], parts[1]))
    deferred = [found.part.module] if found.plan.splits_backward else []
    weight_grads = WeightGrads(deferred, sharded.add_gradient)

    def table_of(count: int, *, gathers_each: bool) -> Table:
        reduces_each = section.reduce == "micro_batch" and sharded.reduces_each_backward
        return with_states(
            found.plan.table(count), gathers_each=gathers_each, reduces_each=reduces_each
        )

    pipeline = Pipeline(
        part=found.part,
        placement=placement,
        rank=found.rank,
        channel=channel,
        pipe=mesh.along("pipe", "batches"),
        weight_grads=weight_grads,
        table_of=table_of,
        sequences=sequences,
    )

    def build(parts: Parts, step: TrainingStep, counters: Counters) -> Loop:
        return PipelineLoop(parts, pipeline, step, counters)

    return build


__all__ = [
    "Cut",
    "Runs",
    "build_pipeline",
    "check_whole",
    "cut",
    "is_cut",
    "is_part",
    "open_flat_groups",
    "partition_of",
    "plan_schedule",
    "with_model",
]
