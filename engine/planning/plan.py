"""The plan of a run: what each rank holds and sends, and the schedule, from shapes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from ...compression.config import ONE_BIT_OPTIMIZERS
from ...compression.replicas import ACROSS
from ...ops.comm.collectives import Collectives
from ...ops.comm.on_paper import PaperCollectives
from ...ops.mesh import Mesh
from ...pipe.channel import JOINS
from ...pipe.module import PipelineModule
from ...pipe.schedules.actions import Op
from ...pipe.schedules.lowering import with_states
from ...zero.core.building import PlannedFlat
from ...zero.core.reuse import num_kept
from ..config.config import Config
from ..config.ranks import mesh_of
from ..model.offloading import host_ratio
from ..model.pipelining import is_part, with_model
from ..optim.state_count import count_states
from .activations import Activations, held_by, sent_by
from .messages import (
    GATHER,
    REDUCE,
    Link,
    Repeats,
    crossed_bytes,
    gathered_bytes,
    gathers,
    peers_on_host,
    published_bytes,
    reduced_bytes,
    spread,
)
from .models import ModelSource
from .observing import Observations
from .shares import Share, Shares
from .states import OptimizerStates, Places, flat_bytes
from .timeline import Timeline, operations, peak_bytes, timeline

EXACT = ("Adam", "AdamW", "Lamb", "Lion", "SGD")
WITH_STEP_COUNT = ("Adam", "AdamW", "Lamb", *ONE_BIT_OPTIMIZERS)  # 4 bytes for each flat buffer


@final
@dataclass(frozen=True, eq=False)
class RankPlan:
    """What each rank of a share holds between two steps and sends in one.

    states: bytes by kind, see `states.py`. activations: at most, in a step; None: not known.
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
    """A whole run. ranks: one for each share. notes: what is not counted, and why."""

    name: str
    config: Config
    mesh: Mesh
    ranks_per_host: int
    num_parameters: int
    ranks: tuple[RankPlan, ...]
    timeline: Timeline | None
    notes: tuple[str, ...]


def make_plan(source: ModelSource, config: Config, world_size: int, ranks_per_host: int) -> Plan:
    """Plan a run of `world_size` ranks.

    Raises:
        ConfigError: the config does not allow this number of ranks.
        UsageError: the model cannot be divided as the config says.
    """
    model = source.on_meta()
    config = with_model(config, model).resolve(world_size)
    sequence = config.sequence_parallel_size
    mesh = mesh_of(config.pipeline, config.tensor_parallel, world_size, sequence)
    if is_part(model):
        model = source.on_meta()
    shares = Shares(source, model, config, mesh, ranks_per_host)
    planner = _Planner(source, shares, config, mesh, ranks_per_host)
    return planner.plan(world_size)


@final
class _Planner:
    def __init__(
        self, source: ModelSource, shares: Shares, config: Config, mesh: Mesh, ranks_per_host: int
    ) -> None:
        self._source, self._shares, self._config = source, shares, config
        self._mesh, self._ranks_per_host = mesh, ranks_per_host
        self._notes: list[str] = []
        self._number = {name: number for number, (name, _) in enumerate(shares.blocks)}
        self._steps = config.gradient_accumulation_steps
        self._on_host: dict[tuple[Any, ...], int] = {}

    def plan(self, world_size: int) -> Plan:
        self._note_what_is_estimated()
        shares = self._shares.all()
        firsts = sorted({share.tensors[0] for share in shares})
        seen = Observations(self._source, self._shares, self._config, self._mesh).of(firsts)
        self._notes += [seen] if isinstance(seen, str) else []
        by_tensor = {} if isinstance(seen, str) else seen
        line = self._timeline(shares)
        ranks = [
            self._rank(share, shares, by_tensor.get(share.tensors[0]), line) for share in shares
        ]
        model = self._shares.model
        whole = model.outline() if isinstance(model, PipelineModule) else model
        numel = sum(param.numel() for param in whole.parameters())
        return Plan(
            name=self._source.name,
            config=self._config,
            mesh=self._mesh,
            ranks_per_host=self._ranks_per_host,
            num_parameters=numel,
            ranks=tuple(ranks),
            timeline=line,
            notes=tuple(self._notes),
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
        elif section.type not in EXACT:
            self._notes.append(
                f"optimizer = {section.type}: its states are estimated, and messages of its own are not counted"
            )
        if zero.compresses:
            self._notes.append(
                "ZeRO++: the figures are those of exact messages, without second shards and errors"
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

    def _rank(
        self, share: Share, shares: list[Share], seen: Activations | None, line: Timeline | None
    ) -> RankPlan:
        rank = self._mesh.rank_at(pipe=share.pipe, tensor=share.tensors[0])
        sent = self._flat_messages(share, rank, line)
        activations = None
        if seen is not None:
            recomputes = self._config.activation_checkpointing.enabled
            numbers = {s: [self._number[n] for n in names] for s, names in share.blocks.items()}
            all_numbers = {
                s: [self._number[n] for n in names]
                for each in shares
                for s, names in each.blocks.items()
            }
            held = held_by(seen, all_numbers, recomputes=recomputes)
            own = [number for of_stage in numbers.values() for number in of_stage]
            activations = max((seen.kept[n] for n in own), default=0) if recomputes else 0
            if line is None:
                activations += sum(held.values())
            else:
                activations += peak_bytes(line.table, share.pipe, held)
                sent.update(self._flow_messages(share, rank, seen, all_numbers))
            sums = sent_by(seen, own, is_first=0 in share.stages)
            for kind, size in sums.items():
                sent[kind] = self._spread(rank, size * self._steps, seen.axes[kind])
        return RankPlan(share, rank, self._states(share, rank), activations, sent)

    def _states(self, share: Share, rank: int) -> Counter[str]:
        zero = self._config.zero_optimization
        optimizer = _optimizer_states(self._config)
        threshold = zero.param_persistence_threshold
        ratio = host_ratio(self._config)
        trained = sum(flat.layout.payload_numel for flat in share.flats if flat.trains)
        left = round((1 - ratio) * trained)
        found: Counter[str] = Counter()
        for flat in share.flats:
            away = False
            if ratio and flat.trains:  # the order and the rule of `Homes`
                away = flat.layout.numel > left
                left = 0 if away else left - flat.layout.numel
            places = Places(
                _place(zero.offload_param.device),
                _place(zero.offload_optimizer.device) if away else "",
            )
            holders = self._num_holders(flat, rank)
            found.update(flat_bytes(flat, optimizer, places, threshold, holders))
        return found

    def _num_holders(self, flat: PlannedFlat, rank: int) -> int:
        """The ranks of a host that have one copy of a buffer's parameters."""
        group = flat.group.collectives
        if not self._config.zero_optimization.shared_parameters or flat.is_single:
            return 1
        assert isinstance(group, PaperCollectives)
        return 1 + self._peers_on_host(rank, group.axes, group)

    def _repeats(self, share: Share, line: Timeline | None) -> dict[str, Repeats]:
        """How often the buffers of each unit are sent."""
        config, zero = self._config, self._config.zero_optimization
        shards = share.policy.shards_grads
        names = list(dict.fromkeys(flat.unit for flat in share.flats if flat.unit))
        numel = {flat.unit: flat.unit_numel for flat in share.flats}
        if line is None:
            times = self._steps if shards else 1
            numels = [numel[name] for name in names]
            distance = zero.max_reuse_distance
            if (
                zero.offload_param.device != "none"
                and "max_reuse_distance" not in zero.model_fields_set
            ):
                distance = 0
            kept = num_kept(numels, distance, zero.max_live_parameters)
            stays = set(names[len(names) - kept :])
            stays.add("")  # the root unit runs from the first call of a forward to its end
            gathers = {name: self._steps * (1 if name in stays else 2) for name in [*names, ""]}
            return {name: Repeats(times, times, gathers[name]) for name in gathers}
        each = shards and config.pipeline.reduce == "micro_batch"
        times = self._steps if each else 1
        stage_of = _stage_of_units(share, names)
        of_stage = Counter({stage: 0 for stage in share.stages})
        for name in names:
            of_stage[stage_of[name]] += numel[name]
        if numel.get("", 0) + max(of_stage.values()) > zero.max_live_parameters:  # see StageUnits
            self._note_gathers(share)
            return {name: Repeats(times, 1, 2 * self._steps) for name in [*names, ""]}
        holds_all = sum(numel.values()) <= zero.max_live_parameters
        if not holds_all:
            self._note_gathers(share)
        own = replace(line.table, rows=(line.table.rows[share.pipe],))
        table = with_states(own, gathers_each=not holds_all, reduces_each=each)
        gathered = Counter(a.stage for a in table.rows[0] if a.op is Op.GATHER)
        found = {name: Repeats(times, 1, gathered[stage_of[name]]) for name in names}
        return found | {"": Repeats(times, 1, 1)}

    def _note_gathers(self, share: Share) -> None:
        if self._config.zero_optimization.stage == 3:
            self._notes.append(
                f"gathers of stage {share.pipe} are estimated: it has more parameters than "
                "zero_optimization.max_live_parameters"
            )

    def _flat_messages(self, share: Share, rank: int, line: Timeline | None) -> dict[str, Link]:
        repeats = self._repeats(share, line)
        threshold = self._config.zero_optimization.param_persistence_threshold
        found: dict[str, Link] = {}

        def add(kind: str, size: int, group: Collectives) -> None:
            assert isinstance(group, PaperCollectives)
            if size:
                found[kind] = found.get(kind, Link()) + self._spread(rank, size, group.axes, group)

        for flat in share.flats:
            times = repeats[flat.unit]
            add(REDUCE, reduced_bytes(flat, times), flat.group.collectives)
            if flat.group.levels is not None:
                leaves = host_ratio(self._config) > 0  # a sum crosses before it leaves for the host
                crossed = times.of(flat.unit) if leaves else 1
                add(ACROSS, crossed_bytes(flat, crossed), flat.group.levels.across)
            num_holders = self._num_holders(flat, rank)
            if num_holders > 1:
                size = published_bytes(flat, num_holders)
                found[GATHER] = found.get(GATHER, Link()) + Link(0, size)
                continue
            size = gathered_bytes(flat, times, threshold)
            parts = gathers(flat, share.opened) if size else []
            whole = sum(part for _, part in parts)
            for group, part in parts:
                add(GATHER, size * part // whole, group)
        return found

    def _flow_messages(
        self, share: Share, rank: int, seen: Activations, blocks: Mapping[int, list[int]]
    ) -> dict[str, Link]:
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
                size = seen.flows[blocks[boundary][0]] * self._steps
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
                part = seen.flows[blocks[boundary][0]] * self._steps // self._mesh.tensor
                joins = self._spread(rank, part * (self._mesh.tensor - 1), ("tensor",))
                found[JOINS] = found.get(JOINS, Link()) + joins
        return found

    def _is_in_parts(self, kind: str) -> bool:
        section = self._config.pipeline
        is_on = section.pipe_partitioned if kind == "activations" else section.grad_partitioned
        return is_on and self._mesh.tensor > 1

    def _spread(
        self,
        rank: int,
        size: int,
        axes: tuple[Any, ...],
        group: PaperCollectives | None = None,
    ) -> Link:
        """`group`: of some of the ranks along `axes`; None: all of them."""
        count = self._mesh.length(axes) if group is None else group.world_size
        return spread(size, count - 1, self._peers_on_host(rank, axes, group))

    def _peers_on_host(
        self, rank: int, axes: tuple[Any, ...], group: PaperCollectives | None
    ) -> int:
        some = () if group is None else (group.stages, group.tensors, group.places)
        key: tuple[Any, ...] = (rank, axes, *some)
        if key not in self._on_host:
            self._on_host[key] = peers_on_host(self._mesh, rank, axes, self._ranks_per_host, *some)
        return self._on_host[key]


def _stage_of_units(share: Share, names: list[str]) -> dict[str, int]:
    """Unit -> its virtual stage. A unit of several blocks has the name of the first one, then dots."""
    stage_of = {name: stage for stage, blocks in share.blocks.items() for name in blocks}
    return {name: stage_of[name.split("..")[0]] for name in names}


def _place(device: str) -> str:
    return {"none": "", "nvme": "disk"}.get(device, "host")


def _optimizer_states(config: Config) -> OptimizerStates:
    section = config.optimizer
    if section is None:  # the script passes one: as many as Adam
        return OptimizerStates(2, 4)
    return OptimizerStates(count_states(section, None), 4 * (section.type in WITH_STEP_COUNT))


__all__ = ["Plan", "RankPlan", "make_plan"]
