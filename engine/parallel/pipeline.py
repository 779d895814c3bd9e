"""Builds what a pipeline adds to an engine: the cut of the model, its messages, its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import nn

from ...ops.comm.exchange import EqualParts
from ...ops.comm.mesh_groups import MeshGroups
from ...pipe.channel import JOINS, Channel, DirectionGroups
from ...pipe.cut.cutting import cut_model
from ...pipe.cut.part import Part
from ...pipe.cut.plain_models import EmbeddingAndHead
from ...pipe.schedules.actions import Placement, Table
from ...pipe.schedules.lowering import with_states
from ...pipe.schedules.plan import SchedulePlan
from ...pipe.weight_grads import WeightGrads
from ...utils.errors import UsageError
from ...zero.core.owners import find_owner
from ...zero.model.sharded_model import ShardedModel
from ..config.config import Config
from ..counters import Counters
from ..model.arguments import as_pipeline, existing_modules, is_part
from ..parts import LoopFactory, Parts
from ..steps.batch_loop import Loop
from ..steps.pipeline_loop import Pipeline, PipelineLoop, Sequences
from ..steps.training_step import TrainingStep


@final
@dataclass(frozen=True, eq=False)
class StageModules:
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


def cut(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    config: Config,
    mesh: MeshGroups,
) -> StageModules:
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
    params = [param for module in existing_modules(model) for param in module.parameters()]
    if any(find_owner(param) is not None for param in params):
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
    return StageModules(part, plan, rank)


def plan_schedule(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], config: Config
) -> SchedulePlan:
    """The schedule that the config asks for. `blocks`: found in the whole model.

    Raises:
        UsageError: there are more stages than layers, or the schedule cannot work with these numbers.
    """
    section = config.pipeline
    steps = config.gradient_accumulation_steps
    pipeline = as_pipeline(model)
    num_layers = len(blocks) if pipeline is None else len(pipeline.layers)
    most = len(list(model.modules())) if pipeline is None else num_layers
    chunks = section.chunks or 1
    if num_layers and chunks > 1 and section.stages * chunks > most:  # its table may be very large
        raise UsageError(
            f"pipeline.stages = {section.stages} x pipeline.chunks = {chunks} are more stages than the "
            f"model has layers ({num_layers}); lower one of them"
        )
    return SchedulePlan(section.schedule, section.stages, section.chunks or 0, steps, num_layers)


def partition_of(
    model: nn.Module, config: Config
) -> tuple[str | tuple[int, ...] | None, EmbeddingAndHead]:
    """Where the config cuts the layers, and what it says about the modules around them."""
    section = config.pipeline
    is_given = not is_part(model) or "partition" in section.model_fields_set
    partition = section.partition if is_given else None
    return partition, EmbeddingAndHead(section.first_stage_modules, section.last_stage_modules)


def _stages_text(stages: Sequence[int]) -> str:
    return ("stage " if len(stages) == 1 else "stages ") + " and ".join(map(str, stages))


def _ways(mesh: MeshGroups, kind: str, placement: Placement) -> DirectionGroups:
    """The groups of one kind of message; several chunks send it in both directions between two ranks."""
    up = mesh.along("pipe", kind)
    return DirectionGroups(
        up, mesh.along("pipe", f"{kind}, back") if placement.num_chunks > 1 else up
    )


def build_pipeline(
    found: StageModules,
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
    weight_grads = WeightGrads(deferred, sharded.backward_pass.add_gradient)

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


__all__ = ["StageModules", "build_pipeline", "cut", "partition_of", "plan_schedule"]
