"""The seconds of a step: the trace of each rank, walked with the prices of a machine.

`step_seconds(plan, machine)` is all that a caller needs. A search over many plans keeps one `StepTimer`.

A rank has one clock for its computation, one for each of its two links and one for jobs of its host. A message
starts when those before it on its links have ended: each group has a stream of its own, so one between hosts
does not hold up one inside. The computation waits for it where the trace says so. Actions of a pipeline begin
when the real simulation of its table lets them (docs/design/time.md).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from ...ops.comm.fake import Message, Start, Wait
from ...pipe.schedules.actions import Action
from ...pipe.schedules.simulation import Costs, Simulation, simulate
from ...utils.errors import UsageError
from .activations import Activations
from .machine import Dtype, Machine
from .plan import Plan, RankPlan
from .trace import HEAD, OUTSIDE, Event, Run, Sums, Update
from .work import MATRIX, OTHER, Kernels, Prices

MATRIX_WORK, ATTENTION, OTHER_KERNELS = "matrix work", "attention", "other kernels"
UPDATE, MESSAGES, BUBBLE = "update", "exposed messages", "bubble"
OFFLOAD, HOST = "offload copies", "host-bound"
PARTS = (MATRIX_WORK, ATTENTION, OTHER_KERNELS, UPDATE, MESSAGES, BUBBLE, OFFLOAD, HOST)
PIPELINE = "activations"  # the kind of the messages between stages
WAITS = (MESSAGES, BUBBLE, OFFLOAD, HOST, UPDATE)  # parts in which a device computes no model
SHOWN = 0.05  # part of a step from which on the largest of them is named


@final
@dataclass(frozen=True)
class StepSeconds:
    """One step of the slowest rank. All times are seconds.

    parts: of `PARTS`, whose sum is `total`. Work that is run again for activations counts in its part.
    exposed: kind of message -> what the computation waits for it. hidden: the same that runs beside it.
    tokens: of all ranks in a step; samples, where inputs are no whole numbers. flops: of the model, in a
        step on all ranks, without what is run again; scores of attention that a causal mask drops count.
    utilisation: flops / (total x ranks x the best matrix rate of the dtype).
    bound: one or two lines: what limits the step, and what a remedy would give.
    error: relative, of `total`, from the errors in the machine file.
    """

    parts: Mapping[str, float]
    exposed: Mapping[str, float]
    hidden: Mapping[str, float]
    total: float
    tokens: int
    flops: float
    utilisation: float
    bound: str
    error: float

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.tokens / self.total


def step_seconds(plan: Plan, machine: Machine) -> StepSeconds:
    """What a step of `plan` takes on hosts of `machine`. The plan was made with `traces`.

    Raises:
        ConfigError: the machine has no number that the plan needs.
        UsageError: the model did not run on the meta device, so its kernels are not known.
    """
    return StepTimer(machine).of(plan)


class Work(NamedTuple):
    """Kernels in a row: seconds by part, their sum, and how many there are."""

    parts: Mapping[str, float]
    seconds: float
    launches: int


class Sent(NamedTuple):
    """Seconds of a message, those in which its rank is busy with it, and those in a host and between hosts."""

    seconds: float
    busy: float
    links: tuple[float, float]


@final
class StepTimer:
    """`step_seconds` for many plans: prices of kernels and of blocks are computed once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._prices = Prices(machine)
        # of a block's events, which a search finds in many plans: they are kept alive with it
        self._blocks: dict[int, tuple[list[object], list[Event]]] = {}

    def of(self, plan: Plan) -> StepSeconds:
        """See `step_seconds`."""
        walks = self._walks(plan, gathers_inside=False)
        slowest = max(walks, key=lambda walk: walk.now)
        total = slowest.now
        flops, dtypes = self._flops(plan)
        dtype: Dtype = max(dtypes, key=dtypes.__getitem__) if dtypes else "fp32"
        best = max(point[-1] for point in self.machine.matrix_table(dtype).points)
        parts = {part: slowest.parts[part] for part in PARTS}
        parts[MESSAGES] = sum(slowest.exposed.values())
        hidden = {
            kind: max(seconds - slowest.exposed[kind], 0.0)
            for kind, seconds in slowest.sent.items()
        }
        steps = plan.config.gradient_accumulation_steps
        seen = next(iter(plan.observed.values()))
        return StepSeconds(
            parts=parts,
            exposed=dict(slowest.exposed),
            hidden=hidden,
            total=total,
            tokens=seen.tokens * steps * (plan.mesh.data or 1),
            flops=flops,
            utilisation=flops / (total * plan.mesh.size * best),
            bound=self._bound(plan, parts, slowest, total),
            error=sum(seconds * self._error(part, dtype) for part, seconds in parts.items())
            / total,
        )

    def _walks(self, plan: Plan, *, gathers_inside: bool) -> list[Walk]:
        """One for each share with a trace."""
        if not plan.observed:
            reason = next((note for note in plan.notes if "not counted" in note), "it did not run")
            raise UsageError(f"seconds of a step need the kernels of the model: {reason}")
        run, free = None, None
        if plan.timeline is not None:
            costs = self._stage_costs(plan)
            run = simulate(plan.timeline.table, costs)
            free = simulate(plan.timeline.table, [replace(cost, message=0.0) for cost in costs])
        walks = []
        for rank in plan.ranks:
            if rank.share.trace is None:
                continue
            walk = Walk(self, plan, rank, run, gathers_inside=gathers_inside)
            walk.follow(rank.share.trace)
            walk.end(
                0.0 if run is None or free is None else run.makespan_seconds - free.makespan_seconds
            )
            walks.append(walk)
        assert walks, "the plan was made without traces"
        return walks

    # -- prices -----------------------------------------------------------------------------------------

    def work(self, kernels: Kernels) -> Work:
        """What these kernels take one after the other."""
        parts: dict[str, float] = defaultdict(float)
        for kernel, count in kernels.items():
            part = {MATRIX: MATRIX_WORK, OTHER: OTHER_KERNELS}.get(kernel.kind, ATTENTION)
            parts[part] += count * self._prices.seconds(kernel)
        return Work(parts, sum(parts.values()), sum(kernels.values()))

    def work_at(
        self,
        seen: Activations,
        places: Sequence[int],
        *,
        is_backward: bool,
        is_again: bool = False,
    ) -> list[Event]:
        """The events at these keys of `seen`: `Work`, `Start` and `Wait`, in order. is_again: see `Run`."""
        by_place = seen.again if is_again else seen.backward if is_backward else seen.forward
        found: list[Event] = []
        for place in reversed(places) if is_backward else places:
            found += self._priced(by_place.get(place, []))
        return found

    def _priced(self, events: list[object]) -> list[Event]:
        known = self._blocks.get(id(events))
        if known is None or known[0] is not events:
            priced = [self.work(each) if isinstance(each, Counter) else each for each in events]
            known = self._blocks[id(events)] = events, priced
        return known[1]

    def message(self, message: Message, *, inside: bool = False) -> Sent:
        """One operation of a group.

        Ranks of one host share its way out evenly: each of them carries a part of what leaves the host.
        inside: as if the other ranks were on this host.
        """
        operation, _, size_bytes, ranks, num_near = message
        if inside or num_near >= ranks - 1:
            link = self.machine.link(operation, between=False)
            near, far = link.seconds(ranks, size_bytes), 0.0
        else:
            link = self.machine.link(operation, between=True)
            sent = size_bytes * (ranks - 1 - num_near) / (ranks - 1)
            if operation != "all_to_all":
                sent = size_bytes / (num_near + 1)  # each byte enters a host once
            near, far = 0.0, link.seconds(ranks, sent)
            if num_near:
                near = self.machine.link(operation, between=False).seconds(num_near + 1, size_bytes)
        seconds = max(near, far)
        return Sent(seconds, seconds * (1 - link.overlap), (near, far))

    def _stage_costs(self, plan: Plan) -> list[Costs]:
        """Of each virtual stage."""
        assert plan.timeline is not None
        found: dict[int, Costs] = {}
        last = plan.timeline.table.placement.num_stages - 1
        for rank in plan.ranks:
            for stage, names in rank.share.blocks.items():
                if stage in found:
                    continue
                head = [HEAD] if stage == last and not names else []
                both = []
                for is_backward in (False, True):
                    walk = Walk(self, plan, rank, None, gathers_inside=False)
                    outside = [OUTSIDE] if stage == 0 else []
                    runs: list[Event] = [
                        Run(name, is_backward) for name in [*outside, *names, *head]
                    ]
                    if is_backward and plan.config.activation_checkpointing.enabled:
                        runs += [Run(name, False, is_again=True) for name in names]
                    walk.follow(runs)
                    both.append(walk.now)
                message = self._flow_seconds(plan, rank, stage)
                found[stage] = Costs(both[0], both[1] / 2, both[1] / 2, message)
        return [found[stage] for stage in sorted(found)]

    def _flow_seconds(self, plan: Plan, rank: RankPlan, stage: int) -> float:
        """A message of activations between `stage` and the next one, or the one before for the last."""
        assert plan.timeline is not None
        placement, share = plan.timeline.table.placement, rank.share
        other = stage + 1 if stage < placement.num_stages - 1 else stage - 1
        peer = plan.mesh.rank_at(pipe=placement.rank_of(other), tensor=share.tensors[0])
        if peer == rank.rank:
            return 0.0
        size = plan.observed[share.tensors[0]].flows[plan.flows[max(stage, other)]]
        if plan.config.pipeline.pipe_partitioned:
            size //= plan.mesh.tensor
        between = peer // plan.ranks_per_host != rank.rank // plan.ranks_per_host
        return self.machine.link("send", between=between).seconds(2, size)

    # -- what is derived --------------------------------------------------------------------------------

    def _flops(self, plan: Plan) -> tuple[float, Counter[Dtype]]:
        """Of the model in a step on all ranks, and by dtype on one."""
        seen = next(iter(plan.observed.values()))
        by_dtype: Counter[Dtype] = Counter()
        for by_place in (seen.forward, seen.backward):
            for events in by_place.values():
                for kernels in events:
                    if isinstance(kernels, Counter):
                        for kernel, count in kernels.items():
                            by_dtype[kernel.dtype] += count * kernel.model_flops
        mesh = plan.mesh
        times = plan.config.gradient_accumulation_steps * mesh.size / mesh.pipe
        return sum(by_dtype.values()) * times, +by_dtype

    def _error(self, part: str, dtype: Dtype) -> float:
        machine = self.machine
        links = [link.rate.error for by_name in machine.links.values() for link in by_name.values()]
        attention = machine.attention.get(dtype, machine.matrix_table(dtype)).error
        by_part = {
            MATRIX_WORK: machine.matrix_table(dtype).error,
            ATTENTION: attention,
            UPDATE: machine.update.error,
            MESSAGES: max(links, default=0.0),
            BUBBLE: machine.matrix_table(dtype).error,
            HOST: machine.launch.error,
        }
        return by_part.get(part, machine.memory.error)

    def _bound(self, plan: Plan, parts: Mapping[str, float], walk: Walk, total: float) -> str:
        """What takes most of the step, then the largest part that computes nothing; each with a remedy."""
        first = max(parts, key=parts.__getitem__)
        waits = {part: parts[part] for part in WAITS if part != first}
        text = self._remedy(first, plan, parts, walk, total)
        then = max(waits, key=waits.__getitem__)
        if waits[then] < SHOWN * total:
            return text
        return f"{text}\n  then {self._remedy(then, plan, parts, walk, total)}"

    def _remedy(
        self, part: str, plan: Plan, parts: Mapping[str, float], walk: Walk, total: float
    ) -> str:
        share = f"{parts[part] / total:.0%}"
        if part == MESSAGES:
            kind = max(walk.exposed, key=walk.exposed.__getitem__)
            most = f"{kind} ({walk.exposed[kind] / total:.0%})"
            return f"exposed messages: {share} of the step, most of it {most}; {self._sent_less(kind, plan)}"
        halved = parts[BUBBLE] / (2 * total - parts[BUBBLE])
        remedies = {
            MATRIX_WORK: f"the best rate of the machine would take {self._at_best(plan) / total:.0%}",
            ATTENTION: "shorter samples, or sequence ranks, lower it",
            OTHER_KERNELS: "compile fuses them; a larger micro-batch raises small kernels' rate",
            UPDATE: "a stage that shards the optimizer divides it by the data ranks; so do larger steps",
            BUBBLE: f"twice as many micro-batches leave about {halved:.0%}",
            OFFLOAD: "more micro-batches in a step, or a smaller ratio of the offload, lower it",
            HOST: "a larger micro-batch, or compile, launches fewer kernels for a token",
        }
        return f"{part}: {share} of the step; {remedies[part]}"

    def _sent_less(self, kind: str, plan: Plan) -> str:
        """What lowers the messages that a step waits for most."""
        zero, axes = plan.config.zero_optimization, kind.partition(" ")[0].split("+")
        second = zero.zero_hpz_partition_size
        if kind == "all_gather" and zero.stage == 3 and second <= 1 < plan.ranks_per_host:
            inside = max(self._walks(plan, gathers_inside=True), key=lambda each: each.now)
            left = inside.exposed[kind] / inside.now
            return f"with gathers inside of a host (zero_hpz_partition_size) {left:.0%}"
        if kind == PIPELINE:
            return "fewer chunks of a stage send less"
        if "data" in axes and plan.mesh.experts > 1:
            return "expert_parallel.chunks sends tokens beside experts; expert ranks of one host send less far"
        if "tensor" in axes:
            return "fewer tensor ranks, or tp_overlap_comm, lower it"
        if "sequence" in axes:
            return "fewer sequence ranks, or a larger micro-batch, lower it"
        return "more micro-batches in a step send less for a token"

    def _at_best(self, plan: Plan) -> float:
        """Seconds of one rank's FLOPs at the best measured rate of their dtype."""
        flops, dtypes = self._flops(plan)
        table = self.machine.matrix_table(max(dtypes, key=dtypes.__getitem__))
        return flops / plan.mesh.size / max(point[-1] for point in table.points)


@final
class Walk:
    """The clocks of one rank.

    now: of the computation. parts: seconds by part of the step, without messages. exposed: kind of message ->
    what the computation waited for it. sent: kind -> seconds of its messages.
    """

    def __init__(
        self,
        timer: StepTimer,
        plan: Plan,
        rank: RankPlan,
        run: Simulation | None,
        *,
        gathers_inside: bool,
    ) -> None:
        """run: of the pipeline's table. gathers_inside: as if gathers were inside of a host."""
        self.now = 0.0
        self.parts: dict[str, float] = defaultdict(float)
        self.exposed: dict[str, float] = defaultdict(float)
        self.sent: dict[str, float] = defaultdict(float)
        self._timer, self._machine = timer, timer.machine
        self._seen = plan.observed[rank.share.tensors[0]]
        self._places = plan.places
        self._gathers_inside = gathers_inside
        self._runs_ahead = timer.machine.device != "cpu"
        self._launch = timer.machine.launch.value
        self._launched = self._host_free = self._copied = 0.0
        self._free = [0.0, 0.0]  # when each link is, as in `Sent.links`
        self._backward_seconds = 0.0
        self._messages: dict[object, tuple[float, float, str]] = {}  # ends, busy seconds, kind
        self._starts: dict[Action, float] = {}
        self._begin: float | None = None  # of the first action
        if run is not None:
            row = zip(run.table.rows[rank.share.pipe], run.starts[rank.share.pipe], strict=True)
            self._starts = dict(row)

    def follow(self, events: Iterable[Event], within: str = "", share: float = 1.0) -> None:
        """Run `events`. within: they are those of a block, whose messages have other numbers."""
        for event in events:
            if isinstance(event, Work):
                self._compute(event, share)
            elif isinstance(event, Counter):
                self._compute(self._timer.work(event), share)
            elif isinstance(event, Run):
                before, name = self.now, event.name
                inner = self._timer.work_at(
                    self._seen,
                    self._places[name][: 1 if event.is_again else None],
                    is_backward=event.is_backward,
                    is_again=event.is_again,
                )
                self.follow(inner, f"{name} {event.is_backward}", event.share)
                self._backward_seconds += (self.now - before) * event.is_backward
            elif isinstance(event, Start):
                self._start((within, event.number), event.message, is_of_block=bool(within))
            elif isinstance(event, Wait):
                self._wait((within, event.number))
            elif isinstance(event, Action):
                self._act(event)
            elif isinstance(event, Update):
                self._update(event)
            elif isinstance(event, Sums):
                self._copied += self._copy_seconds(event.size_bytes, "to_host")

    def end(self, waited_for_flows: float) -> None:
        """The step is over. waited_for_flows: by messages between stages; it is no bubble."""
        shown = min(waited_for_flows, self.parts[BUBBLE])
        if shown > 0:
            self.exposed[PIPELINE] += shown
            self.sent[PIPELINE] += shown
            self.parts[BUBBLE] -= shown
        beside = self._backward_seconds if self._runs_ahead else 0.0
        self._spend(OFFLOAD, max(self._copied - beside, 0.0))
        self._spend(UPDATE, max(self._host_free - self.now, 0.0))

    def _spend(self, part: str, seconds: float) -> None:
        self.parts[part] += seconds
        self.now += seconds

    def _compute(self, work: Work, share: float) -> None:
        for part, seconds in work.parts.items():
            self._spend(part, seconds * share)
        launched = work.launches * self._launch * share
        if self._runs_ahead:
            self._launched += launched
            launched = max(self._launched - self.now, 0.0)
        self._spend(HOST, launched)

    def _start(self, key: object, message: Message, *, is_of_block: bool) -> None:
        kind = message.operation
        if is_of_block:
            kind = f"{'+'.join(message.axes)} {kind}"
        inside = self._gathers_inside and kind == "all_gather"
        sent = self._timer.message(message, inside=inside)
        used = [place for place, seconds in enumerate(sent.links) if seconds]
        start = max([self.now, *(self._free[place] for place in used)])
        for place in used:
            self._free[place] = start + sent.links[place]
        self.sent[kind] += sent.seconds
        self._messages[key] = start + sent.seconds, sent.busy, kind

    def _wait(self, key: object) -> None:
        if key not in self._messages:
            return  # of the step before
        end, busy, kind = self._messages.pop(key)
        waited = max(end - self.now, busy)
        self.exposed[kind] += waited
        self.now += waited

    def _act(self, action: Action) -> None:
        """An action of the pipeline begins when the simulation lets it."""
        if self._begin is None:
            self._begin = self.now
        self._spend(BUBBLE, max(self._begin + self._starts.get(action, 0.0) - self.now, 0.0))

    def _update(self, update: Update) -> None:
        machine = self._machine
        self._launched = max(self._launched, self.now)  # the host has read the norm
        if not update.is_on_host:
            rate = (
                machine.update.value
                if not self._runs_ahead
                else machine.memory.at(update.size_bytes)
            )
            if machine.device_update is not None:
                rate = machine.device_update.value
            self._spend(UPDATE, update.size_bytes / rate)
            return
        self._host_free = max(self._host_free, self.now) + update.size_bytes / machine.update.value
        if update.is_on_disk:
            for key in ("disk_read", "disk_write"):
                self._host_free += update.size_bytes / 2 / machine.number(key).value
        copied = self._copy_seconds(update.copied_bytes, "to_device")
        if update.is_awaited or not self._runs_ahead:  # a CPU has no free cores
            self._spend(UPDATE, max(self._host_free - self.now, 0.0))
            self._spend(OFFLOAD, copied)

    def _copy_seconds(self, size_bytes: int, key: str) -> float:
        if self._runs_ahead or getattr(self._machine, key) is not None:
            return size_bytes / self._machine.number(key).value
        return 2 * size_bytes / self._machine.memory.at(2 * size_bytes)


__all__ = ["PARTS", "StepSeconds", "StepTimer", "step_seconds"]
