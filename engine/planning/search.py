"""Searches the layouts of a run: which fit the memory of a machine, and which of these are fast.

A point is a division of the ranks, a ZeRO stage, a micro-batch and an order of the pipeline. All points get an
estimate from one forward and backward: kernels, bubble, messages. In its order they are planned as `xds plan`
does, and what fits is timed as a whole. The search ends when estimates are well above the last row of the
result, or after `Goal.seconds`; the result says which.
"""

from __future__ import annotations

import gc
import math
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, final

from ...ops.comm.fake import Message, Start
from ...ops.mesh import AXES, Axis
from ...pipe.config import NUMBERS, Pipeline
from ...pipe.cut.plain_models import most_stages
from ...pipe.schedules.actions import ScheduleError
from ...tensor.plan import plan_with_tokens
from ...utils.errors import ConfigError, UsageError
from ...utils.schema.section import is_auto
from ...utils.schema.values import shown
from ...zero.layout.discover import found_blocks
from ..config.auto import trainer_values
from ..config.batch import MICRO, STEPS, TRAIN
from ..config.config import Config, canonical_path, parse_config
from ..model.arguments import is_part
from .activations import BEFORE, after
from .cache import PlanCache
from .machine import Machine
from .models import ModelSource
from .plan import Plan, RankPlan, make_plan
from .seconds import StepSeconds, StepTimer, Work

TENSOR, PIPE, SEQUENCE = "tensor_parallel.tp_size", "pipeline.stages", "sequence_parallel_size"
EXPERTS, HAS_EXPERTS = "expert_parallel.autoep_size", "expert_parallel.enabled"
SLICES, VOCABULARY = "tensor_parallel.plan", "tensor_parallel.vocab_parallel_lm_head"
OVERLAP = "tensor_parallel.tp_overlap_comm"
NO_TOKENS = (  # of activations that tensor ranks share, if a file gives them
    *("tensor_parallel.partition_config", "compile.enabled"),
    "activation_checkpointing.partition_activations",
)
STAGE, SHARD = "zero_optimization.stage", "zero_optimization.mics_shard_size"
SCHEDULE, CHUNKS = "pipeline.schedule", "pipeline.chunks"
RECOMPUTE = "activation_checkpointing.enabled"
OPTIMIZER = "zero_optimization.offload_optimizer.device"
RATIO = "zero_optimization.offload_optimizer.ratio"
PARAMS = "zero_optimization.offload_param.device"
SECOND_SHARD = "zero_optimization.zero_hpz_partition_size"
WEIGHTS_8 = "zero_optimization.zero_quantized_weights"
GRADS_4 = "zero_optimization.zero_quantized_gradients"
# what saves memory for time, each with what it includes; tried where nothing that it includes fits
RELIEFS: tuple[dict[str, Any], ...] = (
    {},
    {RECOMPUTE: True},
    {OPTIMIZER: "cpu"},
    {RECOMPUTE: True, OPTIMIZER: "cpu"},
    {OPTIMIZER: "cpu", PARAMS: "cpu"},
    {RECOMPUTE: True, OPTIMIZER: "cpu", PARAMS: "cpu"},
)
RESERVE = 0.08  # of a device: buffers of messages and what an allocator leaves between blocks
MOST_MICRO = 64
MOST_CHUNKS = 8
OVERLAPPED = (
    0.7  # part of the computation beside which messages of data ranks travel, for estimates
)
STATES_BYTES = 28  # that an update of one parameter reads and writes, for estimates
MARGIN = 1.15  # what is estimated above so many times the last row is not tried
MOST_COMPRESSED = 3  # of the best rows, with messages of few bits
STAGE_MICRO_BATCHES = 4  # of each pipeline stage, where no batch size is given
MOST_VARIANTS = 2  # of a division of the ranks, below its best row
SLOW_ORDERS = (
    "zbv",
    "dualpipev",
)  # their tables take seconds where they are long, and have no formula
MOST_ORDERED = 1024  # stages x micro-batches of such a table
DATA_MESSAGES = ("reduce_scatter", "all_gather", "all_reduce")
LEAST_EXPOSED = 0.02  # part of a step that compressed messages could save


class Point(NamedTuple):
    """One point of the search. shard: of MiCS, 0: none. steps: micro-batches of a step."""

    tensor: int
    pipe: int
    sequence: int
    experts: int
    stage: int
    shard: int
    micro_batch: int
    steps: int
    schedule: str
    chunks: int


@final
@dataclass(frozen=True)
class Goal:
    """What is searched for.

    tokens: of a step; 0: the file's batch size, or any. top: rows. seconds: of a processor, after which no
    other point is tried.
    """

    world_size: int
    ranks_per_host: int
    tokens: int = 0
    top: int = 10
    seconds: float = 25.0


@final
@dataclass(frozen=True, eq=False)
class Row:
    """A layout that fits.

    source: its config, as JSON values. more: path -> value of what the point does not say.
    device_bytes: of the rank that needs most.
    """

    point: Point
    source: dict[str, Any]
    more: dict[str, Any]
    plan: Plan
    seconds: StepSeconds
    device_bytes: int

    @property
    def sample_seconds(self) -> float:
        """By this rows are ranked."""
        return self.seconds.total / self.plan.config.train_batch_size

    @property
    def name(self) -> str:
        """The division of the ranks."""
        return division_text(self.plan)

    @property
    def is_lossy(self) -> bool:
        """Its messages have 8 and 4 bits."""
        zero = self.plan.config.zero_optimization
        return zero.zero_quantized_weights or zero.zero_quantized_gradients

    @property
    def layout(self) -> tuple[Any, ...]:
        """Rows with equal ones differ in settings alone; the best of them counts."""
        return (*self.point[:6], self.is_lossy)


@final
@dataclass
class Found:
    """The result.

    rows: the fastest of each division of the ranks, the fastest first. variants: its name -> others of it,
        whose stage or settings differ. fastest: of all divisions together, as many as rows are shown.
    tried: (bytes, tokens/s, division of the ranks) of what was planned; 0 tokens/s: it does not fit.
    num_points: in the space. num_left: not tried, as the time was over. too_large: do not fit.
    refused: why the engine does not take a point -> how many.
    """

    rows: list[Row] = field(default_factory=list)
    variants: dict[str, list[Row]] = field(default_factory=dict)
    fastest: list[Row] = field(default_factory=list)
    tried: list[tuple[int, float, str]] = field(default_factory=list)
    num_points: int = 0
    num_left: int = 0
    too_large: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    limit_bytes: int = 0


def search(source: ModelSource, data: Mapping[str, Any], machine: Machine, goal: Goal) -> Found:
    """The layouts of `data`, a config's JSON values, on hosts of `machine`. What the file gives stays.

    Raises:
        ConfigError: the file is wrong, or the machine lacks a number.
        UsageError: the model does not run on the meta device; or nothing fits.
    """
    found = _Search(source, data, machine, goal)
    gc.collect()
    gc.freeze()  # plans collect garbage often, and none is in the model
    try:
        return found.run()
    finally:
        gc.unfreeze()


# -- what is free ------------------------------------------------------------------------------------------


@final
class Space:
    """The points of a config file: a key that it gives is fixed, and one that is absent or "auto" is free."""

    def __init__(
        self,
        data: Mapping[str, Any],
        goal: Goal,
        sample_tokens: int,
        most_stages: int,
        *,
        has_experts: bool,
    ) -> None:
        """sample_tokens: of one sample; 0: not known. most_stages: of a pipeline, with chunks.

        Raises UsageError: goal.tokens is no whole number of samples.
        """
        self._data, self._goal, self._has_experts = data, goal, has_experts
        self._most_stages = most_stages
        self.given = dict(_leaves(data))
        # (tensor ranks, sequence ranks) -> path -> value
        self.sliced: dict[tuple[int, int], dict[str, Any]] = {}
        self._samples = self._given_number(TRAIN)
        if goal.tokens:
            self._samples = goal.tokens // max(sample_tokens, 1)
            if not sample_tokens or self._samples * sample_tokens != goal.tokens:
                raise UsageError(
                    f"--tokens-per-step {goal.tokens}: must be a multiple of the tokens of a sample "
                    f"({sample_tokens or 'not known'}); set it to a multiple, or give train_batch_size"
                )

    def points(self) -> Iterator[Point]:
        """All points, also those that the engine refuses."""
        world, host = self._goal.world_size, self._goal.ranks_per_host
        near = [n for n in range(1, min(host, world) + 1) if world % n == 0 and host % n == 0]
        tensors = self._sizes(TENSOR, near)
        most = max(self._most_stages, 1)
        pipes = self._sizes(PIPE, [n for n in range(1, most + 1) if world % n == 0])
        sequences = self._sizes(SEQUENCE, near)
        experts = self._sizes(EXPERTS, near) if self._has_experts else [1]
        for each in product(tensors, pipes, sequences):
            tensor, pipe, sequence = (max(size, 1) for size in each)  # 0 is 1 where it is allowed
            model_ranks = tensor * pipe * sequence
            if world % model_ranks:
                continue
            ranks = world // model_ranks
            inside = host // (tensor * sequence)
            shards = [0, inside] if 1 < inside < ranks and ranks % inside == 0 else [0]
            for stage, shard in product(self._sizes(STAGE, range(4)), self._sizes(SHARD, shards)):
                if shard > 0 and stage == 0 and SHARD not in self.given:
                    continue
                for batch, order in product(self._batches(ranks, pipe), self._orders(pipe)):
                    numbers = NUMBERS.get(order[0])
                    least = pipe * numbers.micro_batches if numbers is not None else 1
                    short = pipe > 1 and batch[1] < max(1, least)
                    # where 1F1B runs, GPipe is as fast and needs more memory
                    idle = order[0] == "gpipe" and batch[1] >= pipe and SCHEDULE not in self.given
                    long = order[0] in SLOW_ORDERS and pipe * batch[1] > MOST_ORDERED
                    many = pipe > 1 and pipe * max(order[1], 1) > self._most_stages
                    if not (short or idle or long or many):
                        for size in experts:
                            key = (tensor, pipe, sequence, size, stage, max(shard, 0))
                            yield Point(*key, *batch, *order)

    def why_empty(self) -> str:
        """There is no point."""
        sizes = (
            TENSOR,
            PIPE,
            SEQUENCE,
            EXPERTS,
            STAGE,
            SHARD,
            SCHEDULE,
            CHUNKS,
            MICRO,
            STEPS,
            TRAIN,
        )
        given = [f"{path} = {self.given[path]}" for path in sizes if path in self.given]
        return (
            f"no layout of {self._goal.world_size} ranks has {', '.join(given) or 'this batch'}: tensor x "
            "pipeline x sequence ranks must divide the ranks, micro-batches the samples of a data rank, and a "
            f"pipeline of this model has at most {self._most_stages} stages; change one of these, or "
            "--world-size"
        )

    def source(self, point: Point, more: Mapping[str, Any]) -> dict[str, Any]:
        """The config of a point, as JSON values. more: path -> value of further free keys."""
        values: dict[str, Any] = {STAGE: point.stage, MICRO: point.micro_batch, STEPS: point.steps}
        values |= {TENSOR: point.tensor} if point.tensor > 1 else {}
        values |= {SEQUENCE: point.sequence} if point.sequence > 1 else {}
        values |= {SHARD: point.shard} if point.shard else {}
        if self._has_experts and point.experts > 1:
            values |= {EXPERTS: point.experts, HAS_EXPERTS: True}
        if point.pipe > 1:
            values |= {PIPE: point.pipe, SCHEDULE: point.schedule, CHUNKS: point.chunks or None}
        values |= self.sliced.get((point.tensor, point.sequence), {})
        data = deepcopy(dict(self._data))
        for path, value in {**values, **more}.items():
            if self.is_free(path) and value is not None:
                _set(data, path, value)
        if self._samples:
            data[TRAIN] = self._samples
        return data

    def is_free(self, path: str) -> bool:
        """The file does not give the key, or the object that it stands for."""
        return path not in self.given and not any(key.startswith(f"{path}.") for key in self.given)

    def ways_to_slice(self, plan: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Values for layers in slices, the best first: tensor ranks share tokens between layers, and logits.

        plan: with which they share tokens; {}: there is none.
        """
        tokens = bool(plan) and self.is_free(SLICES) and not any(map(self.given.get, NO_TOKENS))
        always = {OVERLAP: True} if self.is_free(OVERLAP) else {}  # it changes no number
        for more in [{SLICES: dict(plan), **always}] * tokens + [always]:
            if self.is_free(VOCABULARY):
                yield {**more, VOCABULARY: True}
            yield more

    def _sizes(self, path: str, free: Sequence[int]) -> Sequence[int]:
        return [self._given_number(path)] if path in self.given else free

    def _given_number(self, path: str) -> int:
        """0: it is not given. Raises ConfigError: it is no whole number."""
        value = self.given.get(path, 0)
        if not isinstance(value, int) or isinstance(value, bool):
            text = f'{path} = {shown(value)}: must be a whole number; "auto" or no value frees it'
            raise ConfigError([text])
        return value

    def _batches(self, ranks: int, pipe: int) -> list[tuple[int, int]]:
        """(micro-batch, accumulation steps) of a data-parallel rank."""
        micro, steps = self._given_number(MICRO), self._given_number(STEPS)
        sizes = [micro] if micro else [1 << n for n in range(MOST_MICRO.bit_length())]
        if not self._samples:
            alone = STAGE_MICRO_BATCHES * pipe if pipe > 1 else 1
            return [(size, steps or alone) for size in sizes]
        share, rest = divmod(self._samples, ranks)
        return [
            (size, share // size)
            for size in sizes
            if not rest and share % size == 0 and steps in (0, share // size)
        ]

    def _orders(self, pipe: int) -> list[tuple[str, int]]:
        """(schedule, chunks of a rank) of a pipeline."""
        if pipe == 1:
            return [("1f1b", 0)]
        names = [str(self.given[SCHEDULE])] if SCHEDULE in self.given else list(NUMBERS)
        found = []
        for name in names:
            numbers = NUMBERS.get(name)
            several = [2, 4, MOST_CHUNKS] if numbers is not None and numbers.any_more else [0]
            found += [(name, chunks) for chunks in self._sizes(CHUNKS, several)]
        return found


def _leaves(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of the keys that a file gives, by their own names; sections that it opens are fixed too."""
    for key, value in data.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            if canonical_path(here) == "activation_checkpointing":
                yield RECOMPUTE, value.get("enabled", True)
            yield from _leaves(value, here)
        elif value is not None and not is_auto(value):
            yield canonical_path(here), value


def _set(data: dict[str, Any], path: str, value: Any) -> None:
    """Set a key, which may be there as "auto" under another name."""
    *sections, last = path.split(".")
    section = data
    for name in sections:
        if not isinstance(section.get(name), dict):
            section[name] = {}
        section = section[name]
    prefix = ".".join(sections)
    for key in list(section):
        if canonical_path(f"{prefix}.{key}" if prefix else key) == path:
            del section[key]
    section[last] = value


# -- the search --------------------------------------------------------------------------------------------


@final
class _Search:
    def __init__(
        self, source: ModelSource, data: Mapping[str, Any], machine: Machine, goal: Goal
    ) -> None:
        self._source, self._machine, self._goal = source, machine, goal
        self._cache = PlanCache(source)
        self._timer = StepTimer(machine)
        model = self._cache.model()
        self._numel = sum(param.numel() for param in model.parameters())
        batch = source.batch_on_meta(1)
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        tokens = 0 if ids is None else int(ids.shape[-1])
        has_experts = hasattr(getattr(model, "config", None), "num_experts_per_tok")
        blocks = found_blocks(model, ())
        most = len(blocks) if is_part(model) else most_stages(model, blocks)
        self._space = Space(data, goal, tokens, most, has_experts=has_experts)
        self._plan_of_slices = plan_with_tokens(model, blocks)
        self._busy: dict[tuple[int, int], float | None] = {}
        self._larger: float | None = None
        self._num_blocks, self._most_live = 1, 0
        self._bubbles: dict[tuple[Any, ...], float] = {}
        self._end = math.inf
        self._found = Found(limit_bytes=int(machine.device_bytes.value * (1 - RESERVE)))
        self._best: dict[tuple[Any, ...], Row] = {}

    def run(self) -> Found:
        found = self._found
        points = list(self._space.points())
        found.num_points = len(points)
        estimates = ((self._estimate(point), number) for number, point in enumerate(points))
        queue = [(seconds, number) for seconds, number in estimates if seconds is not None]
        queue.sort(key=lambda pair: (pair[0], -points[pair[1]].stage))
        self._end = time.process_time() + self._goal.seconds
        done = [False] * len(points)
        fitting: set[tuple[Any, ...]] = set()  # divisions and layouts
        worst = math.inf
        # each division of the ranks has its turn, then each layout, then all points
        for length in (4, 6, 10):
            for estimate, number in queue:
                point = points[number]
                if estimate > MARGIN * worst:
                    break
                if done[number] or point[:length] in fitting:
                    continue
                if self._is_over():
                    found.num_left = sum(
                        not done[each] for value, each in queue if value <= MARGIN * worst
                    )
                    return self._finished()
                done[number] = True
                rows = list(self._rows(point))
                for row in rows:
                    self._take(row)
                fitting |= {point[:4], point[:6]} if rows else set()
                self._rank()
                if len(found.fastest) == self._goal.top:
                    worst = found.fastest[-1].sample_seconds
        return self._finished()

    def _is_over(self) -> bool:
        """The time of the search, where it has found something."""
        return bool(self._found.rows) and time.process_time() > self._end

    def _finished(self) -> Found:
        """The result, with layouts whose messages are smaller. Raises UsageError: there is none."""
        found = self._found
        if not found.num_points:
            raise UsageError(self._space.why_empty())
        if not found.rows:
            why = f"; {found.refused.most_common(1)[0][0]}" if found.refused else ""
            raise UsageError(
                f"none of {found.num_points} layouts fits into {found.limit_bytes:,} bytes of a device "
                f"({found.too_large} are too large, {found.refused.total()} are refused{why}); free more keys "
                "of the config, or take more ranks"
            )
        for row in found.rows[:MOST_COMPRESSED]:
            for smaller in self._compressed(row):
                self._take(smaller)
        self._rank()
        return found

    def _take(self, row: Row) -> None:
        old = self._best.get(row.layout)
        if old is None or row.sample_seconds < old.sample_seconds:
            self._best[row.layout] = row

    def _rank(self) -> None:
        """Sort what fits: the best of each division of the ranks, and its variants."""
        found, top = self._found, self._goal.top
        found.fastest = sorted(self._best.values(), key=lambda row: row.sample_seconds)[:top]
        divisions: dict[str, list[Row]] = {}
        for row in sorted(self._best.values(), key=lambda row: row.sample_seconds):
            divisions.setdefault(row.name, []).append(row)
        found.rows = [rows[0] for rows in divisions.values()][:top]
        found.variants = {
            row.name: divisions[row.name][1 : 1 + MOST_VARIANTS] for row in found.rows
        }

    def _rows(self, point: Point) -> Iterator[Row]:
        """What fits of a point: as it is, else with what saves memory."""
        fitting: list[set[str]] = []
        # is it recomputed -> bytes that are too many with the states on the device, and those of the states
        large: dict[bool, tuple[int, int]] = {}
        for relief in RELIEFS:
            if self._is_over():
                return
            paths = set(relief)
            recomputes = RECOMPUTE in paths
            is_idle = any(fits <= paths for fits in fitting)
            is_idle = is_idle or (PARAMS in paths and point.stage < 3)
            if is_idle or not all(map(self._space.is_free, paths)):
                continue
            for more in self._ways(relief, *large.get(recomputes, (0, 0))):
                plan = self._plan(point, more)
                if plan is None:
                    if not paths:
                        return  # refused as it is
                    continue
                size, movable = self._needs(plan)
                if OPTIMIZER not in paths:
                    large[recomputes] = size - self._found.limit_bytes, movable
                row = self._fitting(point, more, plan, size)
                if row is not None:
                    fitting.append(paths)
                    yield row
                    break

    def _ways(
        self, relief: dict[str, Any], too_many_bytes: int, movable_bytes: int
    ) -> Iterator[dict[str, Any]]:
        """A relief. One that moves the optimizer's states moves as many as are too many, else all.

        The bytes are those of the layout with its states on the device; 0, 0: it was not planned.
        """
        if OPTIMIZER not in relief or PARAMS in relief:
            yield relief
        elif too_many_bytes <= movable_bytes:
            share = (
                math.ceil(100 * too_many_bytes / movable_bytes + 1) / 100 if movable_bytes else 1
            )
            if 0 < share < 1 and self._space.is_free(RATIO):
                yield {**relief, RATIO: share}
            yield relief

    def _fitting(self, point: Point, more: Mapping[str, Any], plan: Plan, size: int) -> Row | None:
        """The row; None: its bytes are too many."""
        if size <= self._found.limit_bytes:
            return self._timed(point, more)
        self._found.too_large += 1
        self._found.tried.append((size, 0.0, division_text(plan)))
        return None

    def _compressed(self, row: Row) -> Iterator[Row]:
        """The row with fewer bytes in messages, where the step waits for them."""
        point, zero = row.point, row.plan.config.zero_optimization
        sent = sum(row.seconds.exposed.get(kind, 0.0) for kind in DATA_MESSAGES)
        if sent < LEAST_EXPOSED * row.seconds.total or row.is_lossy or point.stage == 0:
            return
        near = self._goal.ranks_per_host // (point.tensor * point.sequence)
        near = math.gcd(near, row.plan.mesh.data * point.sequence)
        second = {SECOND_SHARD: near} if point.stage == 3 and near > 1 and not point.shard else {}
        lossy = {GRADS_4: True} | ({WEIGHTS_8: True} if point.stage == 3 else {})
        for more in [second] * bool(second) + [{**lossy, **second}]:
            if not all(map(self._space.is_free, more)) or zero.divergent_graphs:
                continue
            found = self._timed(point, {**row.more, **more})
            if found is None or found.device_bytes > self._found.limit_bytes:
                continue
            if found.sample_seconds < row.sample_seconds:
                yield found

    def _plan(
        self, point: Point, more: Mapping[str, Any], traces: Collection[int] = ()
    ) -> Plan | None:
        """The plan of a point; None: the engine refuses it, by its own checks."""
        goal = self._goal
        try:
            config = parsed(self._space.source(point, more))
            ranks = goal.world_size, goal.ranks_per_host
            return make_plan(self._source, config, *ranks, self._cache, traces=traces)
        except (ConfigError, UsageError, ScheduleError) as error:
            self._found.refused[_reason(error)] += 1
            return None

    def _needs(self, plan: Plan) -> tuple[int, int]:
        """Bytes of a device, and those of them that the optimizer's states on the host would free."""
        is_host = self._machine.device == "cpu"
        needs = [(_device_bytes(rank, is_host=is_host), rank) for rank in plan.ranks]
        size, rank = max(needs, key=lambda pair: pair[0])
        hosted = max(rank.states.get("host", 0) for rank in plan.ranks) * plan.ranks_per_host
        if hosted > self._machine.host_bytes.value:
            size = max(size, self._found.limit_bytes + 1)
        movable = sum(rank.states.get(kind, 0) for kind in ("grad", "master", "optimizer"))
        return size, movable

    def _timed(self, point: Point, more: Mapping[str, Any]) -> Row | None:
        """The row with its seconds, by the first, a middle and the last stage of a pipeline."""
        plan = self._plan(point, more, sorted({0, point.pipe // 2, point.pipe - 1}))
        if plan is None:
            return None
        size, _ = self._needs(plan)
        seconds = self._timer.of(plan)
        self._found.tried.append((size, seconds.tokens_per_second, division_text(plan)))
        return Row(point, self._space.source(point, more), dict(more), plan, seconds, size)

    # -- estimates ------------------------------------------------------------------------------------------

    def _estimate(self, point: Point) -> float | None:
        """About the seconds of a sample; None: it cannot run, or cannot fit."""
        data = self._goal.world_size // (point.tensor * point.pipe * point.sequence)
        own = 2 * self._numel / (point.tensor * point.pipe * point.experts)  # bytes in 16 bits
        group = point.shard or data * point.sequence
        may_move = point.stage == 3 and self._space.is_free(PARAMS)
        if own / (group if point.stage == 3 else 1) > self._found.limit_bytes and not may_move:
            self._found.too_large += 1
            return None
        work = self._sample_seconds(point)
        if work is None:
            return None
        samples = point.micro_batch * point.steps
        busy = work * samples / point.pipe
        if point.micro_batch > 1:
            busy *= self._of_larger(point)
        near = max(min(self._goal.ranks_per_host // point.tensor, group), 1)  # sequence ranks share
        sent, beside = 0.0, busy
        if group > 1:
            parts = max(self._num_blocks // point.pipe, 1)
            size = int(own / parts * (group - 1) / group)
            axes: tuple[Axis, ...] = ("data",)
            one = parts * self._timer.message(Message("all_gather", axes, size, group, near - 1))[0]
            # a rank gathers where it changes between its parts of the model
            order = NUMBERS.get(point.schedule)
            changes = point.pipe == 1 or order is None or order.chunks > 1
            changes |= own / 2 > self._most_live  # not held from one micro-batch to the next
            gathers = 2 * point.steps if point.stage == 3 and changes else 1
            sent = one * (1 + gathers)
            # values arrive in the first micro-batch, and gradients leave in the last one
            if gathers == 1:
                beside = busy / point.steps
        exposed = max(sent - OVERLAPPED * beside, LEAST_EXPOSED * sent)
        updated = STATES_BYTES / 2 * own / (group if point.stage else 1)
        rate = self._machine.device_update or self._machine.update
        if self._machine.device != "cpu" and self._machine.device_update is None:
            exposed += updated / self._machine.memory.at(updated)
        else:
            exposed += updated / rate.value
        return (busy / (1 - self._bubble(point)) + exposed) / (samples * data)

    def _bubble(self, point: Point) -> float:
        """Of stages with equal work, where forward and the two parts of backward take equal times."""
        key = point.pipe, point.schedule, point.chunks, point.steps
        if point.pipe == 1 or point.schedule not in NUMBERS:
            return 0.0
        if key not in self._bubbles:
            name = "zero_bubble" if point.schedule in SLOW_ORDERS else point.schedule
            section = Pipeline.model_construct(
                stages=point.pipe, schedule=name, chunks=point.chunks or None
            )
            self._bubbles[key] = section.bubble(point.steps) or 0.0
        return self._bubbles[key]

    def _sample_seconds(self, point: Point) -> float | None:
        """Kernels of one sample on the ranks of a model, from one forward and backward."""
        key = (point.tensor, point.sequence)
        if key not in self._busy:
            self._busy[key] = self._observe(point)
        return self._busy[key]

    def _observe(self, point: Point) -> float | None:
        """The first way to slice that the engine takes is that of all points with these tensor ranks."""
        if point.tensor == 1:
            return self._kernels(point)
        for values in self._space.ways_to_slice(self._plan_of_slices):
            self._space.sliced[point.tensor, point.sequence] = values
            refused = self._found.refused.copy()
            seconds = self._kernels(point)
            if seconds is not None:
                return seconds
            if values:
                self._found.refused = refused
        return None

    def _of_larger(self, point: Point) -> float:
        """Time of a sample in a larger micro-batch relative to that alone; from the first point that asks."""
        if self._larger is None:
            one, two = self._sample_seconds(point), self._kernels(point, 2)
            self._larger = min(two / one, 1.0) if one and two else 1.0
        return self._larger

    def _kernels(self, point: Point, micro_batch: int = 1) -> float | None:
        """Seconds of one sample in such a micro-batch."""
        alone = point._replace(
            pipe=1, experts=1, stage=0, shard=0, micro_batch=micro_batch, steps=1
        )
        data = self._space.source(alone, {})
        data.pop(TRAIN, None)
        data.pop("pipeline", None)  # one micro-batch may be too few for the stages of the file
        goal = self._goal
        try:
            seen, config = self._cache.forward(parsed(data), goal.world_size, goal.ranks_per_host)
        except (ConfigError, UsageError) as error:
            self._found.refused[_reason(error)] += 1
            return None
        if isinstance(seen, str):
            self._found.refused[f"seconds of a step are not known: {seen}"] += 1
            return None
        self._most_live = config.zero_optimization.max_live_parameters
        self._num_blocks = max([number + 1 for number in seen[0].forward if number >= 0], default=1)
        seconds, launch = 0.0, self._machine.launch.value
        for places in [(BEFORE,), *((n, after(n)) for n in range(self._num_blocks))]:
            for is_backward in (False, True):
                for event in self._timer.work_at(seen[0], places, is_backward=is_backward):
                    if isinstance(event, Start):
                        seconds += self._timer.message(event.message)[0]
                    elif isinstance(event, Work):
                        launched = event.launches * launch
                        is_beside = self._machine.device != "cpu"
                        seconds += (
                            max(event.seconds, launched) if is_beside else event.seconds + launched
                        )
        return seconds / config.train_micro_batch_size_per_gpu


def parsed(data: Mapping[str, Any]) -> Config:
    """The config of a file's values. "auto" that only a script can fill has the values of a Trainer."""
    return parse_config(dict(data), auto=trainer_values(data, canonical_path))


def division_text(plan: Plan) -> str:
    """Such as "pipe 16 x data 128 x tensor 8"."""
    lengths = dict(zip(AXES, plan.mesh.shape, strict=True)) | {"experts": plan.mesh.experts}
    return " x ".join(f"{axis} {n}" for axis, n in lengths.items() if n > 1) or "1 rank"


def _device_bytes(rank: RankPlan, *, is_host: bool) -> int:
    """Of the memory that limits: the device's, which is the host's on a CPU."""
    away = ("disk",) if is_host else ("host", "disk")
    return rank.total_bytes - sum(rank.states.get(kind, 0) for kind in away)


def _reason(error: Exception) -> str:
    """The first complaint, without its values: equal for many points."""
    text = error.complaints[0] if isinstance(error, ConfigError) else str(error)
    return re.sub(r"\d+", "N", text).split("\n")[0]


__all__ = [
    "Found",
    "Goal",
    "Point",
    "Row",
    "Space",
    "division_text",
    "parsed",
    "search",
]
