"""The plan of a run: what each rank holds and sends, and the schedule, from shapes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import final

from torch import nn

from ...compression.config import ONE_BIT_OPTIMIZERS
from ...ops.mesh import Mesh
from ...ops.optim.config import REGISTERED
from ...ops.optim.whole_params import WholeParamOptimizer
from ...pipe.channel import JOINS
from ...pipe.module import PipelineModule
from ...pipe.schedules.actions import Op
from ...pipe.schedules.lowering import with_states
from ...pipe.schedules.plan import SchedulePlan
from ..config.batch import mesh_of
from ..config.config import Config
from ..model.arguments import is_part, with_model
from ..parallel.features import check_features
from ..parallel.slices import check_tokens
from .activations import BEFORE, Activations, after, held_by, places_of, sent_by
from .cache import PlanCache
from .models import ModelSource
from .objects import Link, spread
from .shares import Share, Shares
from .timeline import Timeline, operations, peak_bytes, timeline
from .trace import HEAD, OUTSIDE


@final
@dataclass(frozen=True, eq=False)
class RankPlan:
    """What each rank of a share holds between two steps and sends in one.

    states: bytes by kind, see `RankObjects.held`. activations: at most, in a step; None: not known.
    sent: bytes by kind of `engine.bytes_sent()`.
    """

    share: Share
    rank: int
    states: Mapping[str, int]
    activations: int | None
    sent: Mapping[str, Link]

    @property
    def total_bytes(self) -> int:
        """States and activations."""
        return sum(self.states.values()) + (self.activations or 0)


@final
@dataclass(frozen=True, eq=False)
class Plan:
    """A whole run. ranks: one for each share. notes: what is not counted, and why.

    observed: first tensor coordinate of a share -> its kernels and activations; {}: the model did not run.
    places: what a `Run` of a trace computes: its name -> keys in `observed`.
    flows: virtual stage -> the block whose inputs it gets.
    """

    name: str
    config: Config
    mesh: Mesh
    ranks_per_host: int
    num_parameters: int
    ranks: tuple[RankPlan, ...]
    timeline: Timeline | None
    notes: tuple[str, ...]
    observed: Mapping[int, Activations] = field(default_factory=dict)
    places: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    flows: Mapping[int, int] = field(default_factory=dict)


def make_plan(
    source: ModelSource,
    config: Config,
    world_size: int,
    ranks_per_host: int,
    cache: PlanCache | None = None,
    *,
    traces: bool | Collection[int] = False,
) -> Plan:
    """Plan a run of `world_size` ranks.

    Args:
        cache: of this source, for plans of several configs.
        traces: shares have the order of a step, which its seconds need; or those of these pipeline stages.

    Raises:
        ConfigError: the config does not allow this number of ranks.
        UsageError: the model cannot be divided as the config says.
    """
    cache = cache or PlanCache(source)
    config = with_model(config, cache.model()).resolve(world_size)
    sequence = config.sequence_parallel_size
    num_ranks = world_size // config.num_groups
    mesh = mesh_of(config.pipeline, config.tensor_parallel, num_ranks, sequence)
    if isinstance(traces, bool):
        traces = range(mesh.pipe if traces else 0)
    ranks_per_host = min(ranks_per_host, num_ranks)
    config = with_features(cache.model(), config)
    shares, make_parts = cache.shares(config, mesh, ranks_per_host, traced=traces)
    check_tokens(shares.ways, config)  # of a cache, whose config may have differed
    return _Planner(source, cache, config, mesh, shares).plan(make_parts())


def with_features(model: nn.Module, config: Config) -> Config:
    """The config with the units that its features need.

    Raises:
        ConfigError, UsageError: the engine would refuse the config for this model.
    """
    check_features(model, config)
    sections = config.progressive_layer_drop, config.curriculum_learning
    if config.data_efficiency.drops_tokens or any(section.enabled for section in sections):
        from ..dropping.plan import Schedules

        config = Schedules(model, config, 0, 1).with_units(config)
    return config


@final
class _Planner:
    def __init__(
        self, source: ModelSource, cache: PlanCache, config: Config, mesh: Mesh, shares: Shares
    ) -> None:
        self._source, self._cache, self._config = source, cache, config
        self._mesh, self._ranks_per_host = mesh, shares.ranks_per_host
        self._notes: list[str] = []
        self._shares = shares
        self._number = {name: number for number, (name, _) in enumerate(shares.blocks)}
        self._steps = config.gradient_accumulation_steps

    def plan(self, shares: list[Share]) -> Plan:
        self._note_what_is_estimated()
        firsts = sorted({share.tensors[0] for share in shares})
        seen, notes = self._cache.observed(self._shares, self._config, self._mesh, firsts)
        self._notes += [seen] if isinstance(seen, str) else []
        self._notes += notes
        by_tensor = {} if isinstance(seen, str) else seen
        line = self._timeline(shares)
        self._blocks = {
            stage: [self._number[name] for name in names if name in self._number]
            for share in shares
            for stage, names in share.blocks.items()
        }
        self._places = places_of(self._blocks)
        ranks = [self._rank(share, by_tensor.get(share.tensors[0]), line) for share in shares]
        model = self._shares.model
        whole = model.outline() if isinstance(model, PipelineModule) else model
        numel = sum(param.numel() for param in whole.parameters())
        return Plan(
            name=self._source.name,
            config=self._config,
            mesh=replace(self._mesh, experts=self._shares.num_expert_ranks),
            ranks_per_host=self._ranks_per_host,
            num_parameters=numel,
            ranks=tuple(ranks),
            timeline=line,
            notes=tuple(self._notes),
            observed=by_tensor,
            places=self._places_of_runs(),
            flows={stage: self._flow(stage) for stage in self._blocks} if self._number else {},
        )

    def _note_what_is_estimated(self) -> None:
        section, zero = self._config.optimizer, self._config.zero_optimization
        if section is None:
            self._notes.append("optimizer: the script passes one; states are those of Adam")
        elif section.type in ONE_BIT_OPTIMIZERS:
            self._notes.append(
                f"optimizer = {section.type}: the figures are those of exact steps. After the freeze a message "
                "has 0.129 bytes an element, a rank keeps 4 bytes more for each of its elements, at stage 0 "
                "4 / (data-parallel ranks) more"
            )
        elif section.type in REGISTERED and issubclass(
            REGISTERED[section.type].load(), WholeParamOptimizer
        ):
            self._notes.append(
                f"optimizer = {section.type}: the figures are those of the first data rank. Parameters have "
                "states of different sizes, and other ranks have more or fewer of each"
            )
        if self._config.outer is not None:
            self._notes.append(
                f"outer: the figures are those of one of {self._config.num_groups} groups. What a rank sends "
                f"to other groups is a mean over {self._config.outer.steps} steps. A meeting publishes the "
                "parameters inside its group once more"
            )
        if zero.shared_parameters:
            self._notes.append(
                "zero_optimization.shared_parameters: the figures are those of CPUs. On GPUs each rank has a "
                "copy of the parameters"
            )
        if {zero.offload_optimizer.device, zero.offload_param.device} != {"none"}:
            self._notes.append(
                "offload: buffers for copies and gradients on the host are not counted"
            )

    # -- activations and the schedule -------------------------------------------------------------------

    def _timeline(self, shares: list[Share]) -> Timeline | None:
        schedule = self._shares.schedule
        if schedule is None:
            return None
        return self._cache.timeline(self._shares, lambda: self._run(schedule, shares))

    def _run(self, schedule: SchedulePlan, shares: list[Share]) -> Timeline:
        table = schedule.table(self._steps)
        modules = dict(self._shares.blocks)
        costs = [1.0] * table.placement.num_stages
        if modules and not is_part(self._shares.model):
            by_stage = {
                stage: [modules[name] for name in names if name in modules]
                for share in shares
                for stage, names in share.blocks.items()
            }
            first, last = self._shares.sides
            costs = operations(by_stage, first, last)
        return timeline(table, costs)

    # -- one rank ---------------------------------------------------------------------------------------

    def _rank(self, share: Share, seen: Activations | None, line: Timeline | None) -> RankPlan:
        rank = self._mesh.rank_at(pipe=share.pipe, tensor=share.tensors[0])
        sent = self._flat_messages(share, line)
        activations = None
        if seen is not None:
            recomputes = self._config.activation_checkpointing.enabled
            held = held_by(seen, self._places, recomputes=recomputes)
            own = [place for stage in share.blocks for place in self._places[stage]]
            kept = (seen.kept[place] for place in own if place >= 0)
            activations = max(kept, default=0) if recomputes else 0
            if line is None:
                activations += sum(held.values())
            else:
                activations += peak_bytes(line.table, share.pipe, held)
                sent.update(self._flow_messages(share, rank, seen))
            sums = sent_by(seen, own, recomputes=recomputes)
            for kind, size in sums.items():
                axes, num_ranks = seen.groups[kind]
                whole = share.groups.along(axes)
                group = share.groups.blocks(axes, whole, num_ranks).inside
                sent[kind] = spread(size * self._steps, group)
        return RankPlan(share, rank, share.held, activations, sent)

    def _repeats(self, share: Share, line: Timeline | None) -> tuple[int, Mapping[str, int]]:
        """How often gradients of a block are reduced in a step, and parameters of each unit gathered."""
        times = self._steps if share.reduces_each else 1
        if line is None:
            return times, {name: self._steps * count for name, count in share.units.items()}
        assert share.stage_units is not None
        each = share.reduces_each and self._config.pipeline.reduce == "micro_batch"
        times = self._steps if each else 1
        if not share.stage_units.holds_all:
            self._note_gathers(share)
        if not share.stage_units.holds_one:
            return times, dict.fromkeys(share.units, 2 * self._steps)
        own = replace(line.table, rows=(line.table.rows[share.pipe],))
        table = with_states(own, gathers_each=not share.stage_units.holds_all, reduces_each=each)
        gathered = Counter(a.stage for a in table.rows[0] if a.op is Op.GATHER)
        found = {name: gathered[stage] for name, stage in share.stage_units.stage_of.items()}
        return times, found | {"": 1}

    def _note_gathers(self, share: Share) -> None:
        if self._config.zero_optimization.stage == 3:
            self._notes.append(
                f"gathers of stage {share.pipe} are estimated: it has more parameters than "
                "zero_optimization.max_live_parameters"
            )

    def _flat_messages(self, share: Share, line: Timeline | None) -> dict[str, Link]:
        reductions, gathers = self._repeats(share, line)
        found = dict(share.applied)
        for flat in share.flats:
            is_once = flat.is_shared or (line is not None and not flat.unit)
            for sent, times in (
                (flat.reduced, 1 if is_once else reductions),
                (flat.summed, 1),
                (flat.published, 1),
                (flat.gathered, min(gathers[flat.unit], 1)),
                (flat.again, max(gathers[flat.unit] - 1, 0)),
            ):
                for kind, link in sent.items():
                    found[kind] = found.get(kind, Link()) + link * times
        return found

    def _places_of_runs(self) -> dict[str, tuple[int, ...]]:
        """See `Plan.places`."""
        found: dict[str, tuple[int, ...]] = {OUTSIDE: (BEFORE,)}
        found |= {name: (number, after(number)) for name, number in self._number.items()}
        if self._number and not self._blocks[max(self._blocks)]:
            last = max(self._number, key=self._number.__getitem__)
            number, head = found[last]
            found |= {last: (number,), HEAD: (head,)}
        return found

    def _flow(self, stage: int) -> int:
        """The block whose inputs arrive at a stage; a head's are as large as those of the last block."""
        later = [n for other, own in self._blocks.items() if other >= stage for n in own]
        return min(later, default=len(self._number) - 1)

    def _flow_messages(self, share: Share, rank: int, seen: Activations) -> dict[str, Link]:
        """What goes to the next stages, and the gradients that go back."""
        assert self._shares.schedule is not None
        placement = self._shares.schedule.placement
        found: dict[str, Link] = {}
        for stage in share.stages:
            for kind, other, boundary in (
                ("activations", stage + 1, stage + 1),
                ("gradients", stage - 1, stage),
            ):
                if not 0 <= other < placement.num_stages or placement.rank_of(other) == share.pipe:
                    continue
                size = seen.flows[self._flow(boundary)] * self._steps
                if self._is_in_parts(kind):
                    size //= self._mesh.tensor  # activations that the tensor ranks divide evenly
                peer = self._mesh.rank_at(pipe=placement.rank_of(other), tensor=share.tensors[0])
                near = peer // self._ranks_per_host == rank // self._ranks_per_host
                link = Link(size, 0) if near else Link(0, size)
                found[kind] = found.get(kind, Link()) + link
            for kind, other, boundary in (
                ("activations", stage - 1, stage),
                ("gradients", stage + 1, stage + 1),
            ):
                is_own = not 0 <= other < placement.num_stages
                if is_own or placement.rank_of(other) == share.pipe or not self._is_in_parts(kind):
                    continue
                part = seen.flows[self._flow(boundary)] * self._steps // self._mesh.tensor
                joins = spread(part * (self._mesh.tensor - 1), share.groups.along("tensor"))
                found[JOINS] = found.get(JOINS, Link()) + joins
        return found

    def _is_in_parts(self, kind: str) -> bool:
        section = self._config.pipeline
        is_on = section.pipe_partitioned if kind == "activations" else section.grad_partitioned
        return is_on and self._mesh.tensor > 1


__all__ = ["Plan", "RankPlan", "make_plan"]
