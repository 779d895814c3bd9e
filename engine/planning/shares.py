"""The parts of a model that the ranks of a mesh have: one part for each pipeline stage and kind of slice.

All data ranks of a stage and slice have equal parts, so a plan of many ranks looks at few of them. Each part is
made as the engine makes it, with tensors on the meta device: cut, sliced, laid out in flat buffers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from ...ops.comm.collectives import Collectives
from ...ops.comm.fake import FakeGroups, backend_of, fake_collectives
from ...ops.mesh import Mesh
from ...pipe.cut.cutting import cut_model
from ...pipe.cut.meta_copies import ShapesOnly
from ...pipe.cut.outlines import outlined_part
from ...pipe.cut.part import Part
from ...pipe.cut.plain_models import ModelOutline, outline_model
from ...pipe.cut.surroundings import FIRST, LAST
from ...pipe.schedules.lowering import with_states
from ...pipe.schedules.plan import SchedulePlan
from ...tensor.plan import ParallelPlan
from ...tensor.slicing import Sliced, slice_model
from ...tensor.ties import cut_names
from ...zero.layout.discover import found_blocks
from ...zero.model.sharded_model import ShardedModel
from ...zero.model.stage_units import StageUnits
from ..config.config import Config
from ..model.arguments import BlockRuns, is_cut, is_part
from ..model.precision import Fp32Tensors, policy_of, splits_masters
from ..optim.optimizers import Groups, read_groups, split_by_kind
from ..parallel.division import stay_fp32
from ..parallel.flat_groups import (
    ALL_OF_A_STAGE,
    Division,
    RankHost,
    build_shard_groups,
    open_flat_groups,
)
from ..parallel.messages import Messages
from ..parallel.pipeline import StageModules, partition_of, plan_schedule
from ..parallel.slices import plan_slices, ways_here
from .activations import kind_of
from .models import ModelSource, meta_device
from .objects import FlatMessages, RankObjects, Sent
from .trace import Block, Trace, Tracer

if TYPE_CHECKING:
    from ...experts.cut import Cut, Found

Once = Callable[[tuple[Any, ...], Callable[[], Any]], Any]


def made_now(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Nothing is kept."""
    return make()


@final
@dataclass(frozen=True)
class UnitsOfStages:
    """What a plan reads of `StageUnits`."""

    holds_all: bool
    holds_one: bool
    stage_of: Mapping[str, int]


@final
@dataclass(frozen=True, eq=False)
class Share:
    """What the ranks of pipeline stage `pipe` and of the tensor coordinates `tensors` have.

    stages: the virtual stages. blocks: the names of the blocks of each of them.
    flats: the flat buffers in order. frozen: name -> elements of parameters that are in none.
    num_sliced: parameters of which these ranks have a slice.
    held, applied: see `RankObjects`. groups: those of the first rank.
    units: unit -> how often it is gathered for a micro-batch without a pipeline; the root is "".
    reduces_each: gradients are reduced after each micro-batch. stage_units: of a pipeline.
    trace: the order of a step, where it was asked for.
    """

    pipe: int
    tensors: tuple[int, ...]
    stages: tuple[int, ...]
    blocks: Mapping[int, tuple[str, ...]]
    flats: tuple[FlatMessages, ...]
    frozen: Mapping[str, int]
    num_sliced: int
    held: Counter[str]
    applied: Sent
    groups: FakeGroups
    units: Mapping[str, int]
    reduces_each: bool
    stage_units: UnitsOfStages | None
    trace: Trace | None = None

    @property
    def outside(self) -> tuple[str, ...]:
        """The modules outside of the blocks of which these ranks have parameters, by name.

        A parameter of the model itself is named alone.
        """
        names = [slot.name for flat in self.flats if not flat.unit for slot in flat.layout.slots]
        inside = tuple(f"{name}." for of_stage in self.blocks.values() for name in of_stage)
        names += [name for name in self.frozen if not name.startswith(inside)]
        return tuple(dict.fromkeys(name.rpartition(".")[0] or name for name in names))

    @property
    def numel(self) -> int:
        """Elements of the parameters that these ranks compute with."""
        return sum(flat.layout.payload_numel for flat in self.flats) + sum(self.frozen.values())


@final
class Shares:
    """Makes the parts of one model and config. The model is unchanged between two calls.

    Attributes:
        model: the whole model, on the meta device.
        blocks: name and module of its blocks.
        fp32: what stays fp32 of a model that is built as a whole.
        schedule: of the pipeline; None: the model is not cut.
        num_expert_ranks: that share the experts of a layer.
        ranks_per_host: hosts have consecutive ranks.
    """

    def __init__(
        self,
        source: ModelSource,
        model: nn.Module,
        config: Config,
        mesh: Mesh,
        ranks_per_host: int,
        *,
        traced: Collection[int] = (),
        once: Once = made_now,
    ) -> None:
        """`config` is resolved for the ranks of `mesh`. traced: pipeline stages with the order of a step.

        once: keeps what does not depend on the whole config.

        Raises:
            UsageError: the model cannot be divided as the config says.
        """
        self.model = model
        self._source = source
        self._config = config
        self._mesh = mesh
        self.ranks_per_host = ranks_per_host
        self._traced = traced
        self._shard_groups = build_shard_groups(config, mesh, self._hosts, is_first=False)
        self.blocks: list[tuple[str, nn.Module]] = (
            [] if is_part(model) else found_blocks(model, config.zero_optimization.units)
        )
        self.fp32 = Fp32Tensors() if is_part(model) else stay_fp32(model, config)
        self.schedule: SchedulePlan | None = None
        self._outline: ModelOutline | None = None
        self.num_expert_ranks = 1
        self._experts: list[Found] = []
        if config.expert_parallel.enabled:
            from ..parallel.experts import plan_experts

            self._experts, self.num_expert_ranks = plan_experts(model, config.expert_parallel, mesh)
        listed = {expert for f in self._experts for expert in f.experts or ()}
        self.blocks = [block for block in self.blocks if block[1] not in listed]
        names = tuple(name for name, _ in self.blocks)
        self._kinds: dict[str, Hashable] = once(
            ("kinds", names), lambda: {name: kind_of(block) for name, block in self.blocks}
        )
        whole = {f.experts_name for f in self._experts}
        is_sliced = config.tensor_parallel.size > 1
        self.ways = None
        if is_sliced:
            zero, section = config.zero_optimization, config.tensor_parallel
            key = ("slices", str(section), zero.units, zero.unit_min_numel, frozenset(whole))
            self.ways = once(key, lambda: plan_slices(model, self.blocks, config, whole))
        if is_cut(model, config):
            self.schedule = plan_schedule(model, self.blocks, config)
            if not (is_part(model) or isinstance(model, nn.Sequential)):
                where = partition_of(model, config)
                placement = self.schedule.placement
                self._outline = once(
                    ("outline", placement, len(self.blocks), where),
                    lambda: outline_model(model, self.blocks, placement, *where),
                )

    @property
    def depends_on_names(self) -> bool:
        """What changes layers is chosen by their names, or moves their experts: equal blocks may differ."""
        config = self._config
        named = config.float8.enabled or config.data_types.keep_in_fp32_modules
        return bool(named or self._experts)

    def _hosts(self) -> list[RankHost]:
        """Of each rank."""
        numbers = (rank // self.ranks_per_host for rank in range(self._mesh.size))
        return [RankHost(number, str(number)) for number in numbers]

    @property
    def sides(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules outside of the blocks that run before and after them, where the model is cut."""
        if self._outline is None:
            return [], []
        around = self._outline.around
        first, last = (
            [module for name, module in around.modules.items() if side in around.sides[name]]
            for side in (FIRST, LAST)
        )
        return first, last

    def all(self, known: Sequence[Share] = ()) -> list[Share]:
        """Every part that differs from the others, by pipeline stage and tensor coordinate.

        Stages of blocks that are alike are built once. known: the same without traces, which are added.
        """
        found: list[Share] = []
        by_kind: dict[Hashable, list[Share]] = {}
        for pipe in range(self._mesh.pipe):
            if known and pipe not in self._traced:
                found += [share for share in known if share.pipe == pipe]
                continue
            with self._part(pipe) as (module, runs, stage):
                kind = self._kind(module, runs, stage)
                if kind in by_kind and pipe not in self._traced:
                    found += [self._moved(share, pipe, stage) for share in by_kind[kind]]
                    continue
                same = {share.tensors[0]: share for share in known if share.pipe == pipe}
                shares = list(self._of_stage(pipe, module, runs, stage, same))
                by_kind |= {} if kind is None else {kind: shares}
                found += shares
        return found

    def _kind(self, module: nn.Module, runs: BlockRuns, stage: StageModules | None) -> Hashable:
        """Equal for pipeline stages whose ranks hold and send alike; None: like no other one."""
        config = self._config
        inside = {id(p) for run in runs for _, block in run for p in block.parameters()}
        if stage is None or stage.part.shared or self.depends_on_names:
            return None
        if config.zero_optimization.units:
            return None
        if any(id(param) not in inside for param in module.parameters()):
            return None
        if self._mesh.size // self._mesh.pipe % self.ranks_per_host:
            return None
        return tuple(
            (self.kind_of(name, block), place)
            for place, run in enumerate(runs)
            for name, block in run
        )

    def kind_of(self, name: str, block: nn.Module) -> Hashable:
        """Equal for whole blocks that keep and send the same, and whose layers are sliced alike."""
        kind = self._kinds[name] if name in self._kinds else kind_of(block)
        return kind, tuple(self._ways_inside.get(name, ()))

    @cached_property
    def _ways_inside(self) -> Mapping[str, list[tuple[str, str]]]:
        """Name of a block -> how layers in it are sliced."""
        names = {name for name, _ in self.blocks}
        found: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for key, way in ({} if self.ways is None else self.ways).items():
            parts = key.split(".")
            tops = (".".join(parts[:end]) for end in range(1, len(parts)))
            top = next((name for name in tops if name in names), None)
            if top is not None:
                found[top].append((key.removeprefix(top), str(way)))
        return found

    def _moved(self, share: Share, pipe: int, stage: StageModules | None) -> Share:
        """The share of an equal stage."""
        assert stage is not None and share.stage_units is not None
        stages = stage.plan.placement.stages_of(pipe)
        number = dict(zip(share.stages, stages, strict=True))
        units = share.stage_units
        stage_of = {name: number[old] for name, old in units.stage_of.items()}
        return replace(
            share,
            pipe=pipe,
            stages=stages,
            blocks=_block_names(self.blocks, stage),
            groups=self._at(pipe, share.tensors[0]),
            stage_units=replace(units, stage_of=stage_of),
            trace=None,
        )

    def _of_stage(
        self,
        pipe: int,
        module: nn.Module,
        runs: BlockRuns,
        found: StageModules | None,
        same: Mapping[int, Share],
    ) -> Iterator[Share]:
        """The shares of a pipeline stage. same: first tensor coordinate -> the one without a trace."""
        names = _block_names(self.blocks, found)
        stages = found.plan.placement.stages_of(pipe) if found is not None else (0,)
        left = list(range(self._mesh.tensor))
        while left:
            here = self._at(pipe, left[0])
            with sliced_here(module, runs, found, self.ways, self._config, here) as cut:
                cut.tokens.undo()  # stubs of blocks have no tokens to cut
                equal = [rank for rank in left if _widths(cut, rank) == _widths(cut, left[0])]
                experts = self.keep_experts(module, here)
                known = same.get(left[0])
                division = Division(found, cut, experts)
                built, trace = self._built(module, runs, division, here, is_sent=known is None)
                if known is not None:
                    left = [rank for rank in left if rank not in equal]
                    yield replace(known, trace=trace)
                    continue
                sharded = built.sharded
                units = None
                if found is not None:
                    made = self._stage_units(sharded, found)
                    units = UnitsOfStages(made.holds_all, made.holds_one, made.stage_of)
                yield Share(
                    pipe,
                    tuple(equal),
                    stages,
                    names,
                    built.flats,
                    {name: param.numel() for name, param in sharded.frozen.items()},
                    len(cut.slices),
                    built.held,
                    built.applied,
                    here,
                    _gathers(sharded),
                    sharded.reduces_each_backward,
                    units,
                    trace,
                )
            left = [rank for rank in left if rank not in equal]

    def keep_experts(self, module: nn.Module, groups: FakeGroups) -> Cut | None:
        """Keep the experts of a rank, of all in `module`; see `unchanged`. None: no rank has experts alone."""
        if self.num_expert_ranks == 1:
            return None
        from ...experts.adapters import add_adapters
        from ...experts.cut import keep_part, plan_cut
        from ..parallel.experts import found_in

        size = self.num_expert_ranks
        cut = plan_cut(found_in(module, self._experts), size)
        add_adapters(module, cut)
        for param in cut.params():
            keep_part(param, cut.slices[id(param)][groups.rank % size])
        return cut

    def group_of_experts(self, groups: FakeGroups) -> Collectives:
        """The ranks that share the experts of a layer with the rank of `groups`."""
        whole = groups.along(ALL_OF_A_STAGE)
        return groups.blocks(ALL_OF_A_STAGE, whole, self.num_expert_ranks).inside

    def _at(self, pipe: int, tensor: int) -> FakeGroups:
        return FakeGroups(
            self._mesh, self.ranks_per_host, pipe=pipe, tensor=tensor, device=torch.device("meta")
        )

    @contextmanager
    def _part(self, pipe: int) -> Iterator[tuple[nn.Module, BlockRuns, StageModules | None]]:
        """The module of a pipeline stage, its blocks, and the cut; see `divide`."""
        if self.schedule is None:
            yield self.model, [self.blocks], None
            return
        placement = self.schedule.placement
        if self._outline is not None:
            with outlined_part(self.model, self._outline, placement, pipe) as outlined:
                yield self._found(outlined, self.schedule, pipe)
            return
        model = self._source.on_meta()
        blocks = [] if is_part(model) else found_blocks(model, self._config.zero_optimization.units)
        with meta_device():  # a PipelineModule builds its layers now
            part = cut_model(model, blocks, placement, pipe, *partition_of(model, self._config))
        yield self._found(part, self.schedule, pipe)

    def _found(
        self, part: Part, schedule: SchedulePlan, pipe: int
    ) -> tuple[nn.Module, BlockRuns, StageModules | None]:
        found = StageModules(part, schedule, pipe)
        return part.module, found.runs, found

    def _stage_units(self, sharded: ShardedModel, found: StageModules) -> StageUnits:
        stage_of = {block.module: block.stage for block in found.part.blocks}
        return StageUnits(sharded, stage_of, self._config.zero_optimization.max_live_parameters)

    def _built(
        self,
        module: nn.Module,
        runs: BlockRuns,
        division: Division,
        groups: FakeGroups,
        *,
        is_sent: bool,
    ) -> tuple[RankObjects, Trace | None]:
        """The objects of a rank, and the order of its step. is_sent: their messages are counted."""
        zero = self._config.zero_optimization
        hosts = [rank // self.ranks_per_host for rank in range(self._mesh.size)]
        messages = Messages(self._config, groups.world, hosts)
        build_policy = partial(policy_of, self._config, splits_masters(self._config))
        # ranks agree by values, which tensors of the meta device do not have
        alike = backend_of(groups.world)
        world = fake_collectives(groups.rank, self._mesh.size, alike.axes, alike.num_near)
        is_one = division.stages is None and self._mesh.tensor == 1
        if self._mesh.tensor == 1:
            division = replace(division, sliced=None)
        flat_groups = open_flat_groups(
            groups,
            groups.world if is_one else world,
            build_policy,
            zero.stage,
            division,
            messages.scheme,
            self._shard_groups,
        )
        fp32 = stay_fp32(module, self._config, flat_groups.names)
        flat_groups = replace(flat_groups, world=world, fp32=fp32.params)
        if self._config.float8.enabled:
            from ..model.float8 import layers_of, with_casts

            experts = () if division.experts is None else map(id, division.experts.params())
            layers = layers_of(module, self._config, flat_groups, frozenset(experts))
            flat_groups = with_casts(flat_groups, self._config, layers)
        trained = trained_groups(module, self._config)
        with ShapesOnly(copies_zeros=True):
            built = RankObjects(module, runs, flat_groups, groups, trained, messages, self._config)
            if is_sent:
                built.count()
            is_traced = groups.mesh.coordinates(groups.rank).pipe in self._traced
            trace = self._trace(built, module, division.stages, groups) if is_traced else None
            built.end()
        return built, trace

    def _trace(
        self,
        built: RankObjects,
        module: nn.Module,
        found: StageModules | None,
        groups: FakeGroups,
    ) -> Trace:
        """The order of a step of one rank."""
        objects = built.sharded, built.updater, groups.opened
        if found is None:
            blocks = [Block(name, 0, block) for name, block in self.blocks]
            tracer = Tracer(module, blocks, *objects)
        else:
            blocks = [Block(b.name, b.stage, b.module) for b in found.part.blocks]
            placement = found.plan.placement
            last, stages = placement.num_stages - 1, placement.stages_of(found.rank)
            is_head = last in stages and all(block.stage != last for block in blocks)
            tracer = Tracer(module, blocks, *objects, stages, last if is_head else None)
        recomputes = self._config.activation_checkpointing.enabled
        steps = self._config.gradient_accumulation_steps
        if found is None or self.schedule is None:
            return tracer.micro_batches(steps, recomputes=recomputes)
        units = self._stage_units(built.sharded, found)
        is_each = built.sharded.reduces_each_backward
        each = is_each and self._config.pipeline.reduce == "micro_batch"
        table = self.schedule.table(steps)
        own = replace(table, rows=(table.rows[found.rank],))
        row = with_states(own, gathers_each=not units.holds_all, reduces_each=each).rows[0]
        return tracer.row(row, units, recomputes=recomputes)


def _gathers(sharded: ShardedModel) -> dict[str, int]:
    """How often each unit is gathered for a micro-batch; the root runs from the first call of a forward on."""
    return {
        "" if unit.is_root else unit.name: 1 if unit.is_root or unit.is_kept_until_backward else 2
        for unit in sharded.units
    }


def trained_groups(model: nn.Module, config: Config) -> Groups:
    """The hyperparameter groups where the script gives neither parameters nor an optimizer."""
    return split_by_kind(config.optimizer, model, read_groups(model, None))


@contextmanager
def sliced_here(
    model: nn.Module,
    runs: BlockRuns,
    found: StageModules | None,
    ways: ParallelPlan | None,
    config: Config,
    groups: FakeGroups,
) -> Iterator[Sliced]:
    """Slice the layers of `model` for one rank, and afterwards make them whole again."""
    with unchanged(model):
        if groups.mesh.tensor == 1:
            yield Sliced()
            return
        own = ways_here(model, runs, ways, config, found)
        with ShapesOnly():
            overlaps = config.tensor_parallel.tp_overlap_comm
            group = groups.along("tensor")
            sliced = slice_model(model, own, group, overlaps=overlaps, blocks=runs)
        if ways is not None and found is not None:
            sliced.names = cut_names(ways, found.part.aliases)
        if sliced.check is not None:
            sliced.check.remove()  # there are no values to compare
        yield sliced


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Inside, modules and parameters of `model` may be changed; afterwards they are what they were before."""
    attributes = {
        module: (
            type(module),
            {key: x.copy() if isinstance(x, dict) else x for key, x in module.__dict__.items()},
        )
        for module in model.modules()
    }
    values = [(param, param.data) for param in model.parameters()]
    try:
        yield
    finally:
        for module, (kind, before) in attributes.items():
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(before)
        for param, value in values:
            param.data = value


def _block_names(
    blocks: Sequence[tuple[str, nn.Module]], found: StageModules | None
) -> dict[int, tuple[str, ...]]:
    if found is None:
        return {0: tuple(name for name, _ in blocks)}
    names: dict[int, list[str]] = {
        stage: [] for stage in found.plan.placement.stages_of(found.rank)
    }
    for block in found.part.blocks:
        names[block.stage].append(block.name)
    return {stage: tuple(of_stage) for stage, of_stage in names.items()}


def _widths(sliced: Sliced, rank: int) -> tuple[int, ...]:
    """The widths of all slices of a tensor rank: ranks with equal ones have equal parts."""
    return tuple(boxes[rank].length for boxes in sliced.slices.values())


__all__ = ["Share", "Shares", "sliced_here", "trained_groups", "unchanged"]
