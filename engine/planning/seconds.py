"""The seconds of a step: the kernels and messages of a plan on a machine. So far no message overlaps.

`step_seconds(plan, machine)` is all that a caller needs. A search over many plans keeps one `StepTimer`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from ...pipe.schedules.simulation import Costs, simulate
from ...utils.errors import UsageError
from .activations import BEFORE, Activations, after
from .machine import Machine
from .objects import Link
from .plan import Plan, RankPlan
from .work import MATRIX, OTHER, Kernels, Prices

MATRIX_WORK, ATTENTION, OTHER_KERNELS = "matrix work", "attention", "other kernels"
UPDATE, MESSAGES, BUBBLE = "update", "exposed messages", "bubble"
OFFLOAD, HOST = "offload copies", "host-bound"
PARTS = (MATRIX_WORK, ATTENTION, OTHER_KERNELS, UPDATE, MESSAGES, BUBBLE, OFFLOAD, HOST)


@final
@dataclass(frozen=True)
class StepSeconds:
    """One step of the slowest rank. All times are seconds.

    parts: of `PARTS`, whose sum is `total`. Work that is run again for activations counts in its part.
    exposed: kind of message -> what the computation waits for it. hidden: the same that runs beside it.
    tokens: of all ranks in a step; samples, where inputs are no whole numbers. flops: of the model, in a
        step on all ranks, without what is run again; scores of attention that a causal mask drops count.
    utilisation: flops / (total x ranks x the best measured matrix rate of the dtype).
    bound: one sentence: what limits the step, and what a remedy would give.
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
    """What a step of `plan` takes on hosts of `machine`.

    Raises:
        ConfigError: the machine has no number that the plan needs.
        UsageError: the model did not run on the meta device, so its kernels are not known.
    """
    return StepTimer(machine).of(plan)


@final
class StepTimer:
    """`step_seconds` for many plans: prices of kernels are looked up once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._prices = Prices(machine)

    def of(self, plan: Plan) -> StepSeconds:
        """See `step_seconds`."""
        if not plan.observed:
            reason = plan.notes[-1] if plan.notes else "no micro-batch is known"
            raise UsageError(f"seconds of a step are not known: {reason}")
        steps = plan.config.gradient_accumulation_steps
        by_stage: dict[int, list[dict[str, float]]] = {}
        for rank in plan.ranks:
            for stage, names in rank.share.blocks.items():
                seen = plan.observed[rank.share.tensors[0]]
                numbers = [plan.block_numbers[name] for name in names]
                if rank.share.pipe == 0 and stage == 0:
                    numbers = [BEFORE, *numbers]
                by_stage.setdefault(stage, self._stage(seen, numbers))
        costs = [
            Costs(sum(f.values()), sum(b.values()) / 2, sum(b.values()) / 2)
            for f, b in by_stage.values()
        ]
        work: dict[str, float] = defaultdict(float)
        bubble = 0.0
        if plan.timeline is not None:
            run = simulate(plan.timeline.table, costs)
            busy = [run.busy_seconds(rank) for rank in range(len(run.table.rows))]
            slowest = max(range(len(busy)), key=busy.__getitem__)
            bubble = run.makespan_seconds - busy[slowest]
            stages = run.table.placement.stages_of(slowest)
        else:
            stages = tuple(by_stage)
        for stage in stages:
            for part in by_stage[stage]:
                for key, value in part.items():
                    work[key] += value * steps
        exposed = max(
            (self._messages(plan, rank) for rank in plan.ranks), key=lambda c: sum(c.values())
        )
        parts = {part: work[part] for part in PARTS}
        parts[BUBBLE] = bubble
        parts[MESSAGES] = sum(exposed.values())
        parts[UPDATE] = max(self._update(rank) for rank in plan.ranks)
        total = sum(parts.values())
        flops = 0.0
        tokens = plan.config.train_batch_size
        return StepSeconds(parts, exposed, {}, total, tokens, flops, 0.0, "", 0.0)

    def _stage(self, seen: Activations, numbers: list[int]) -> list[dict[str, float]]:
        places = [place for number in numbers for place in (number, after(number))]
        found = []
        for by_place in (seen.forward, seen.backward):
            seconds: dict[str, float] = defaultdict(float)
            for place in set(places):
                self._add(seconds, by_place.get(place, Counter()))
            found.append(seconds)
        return found

    def _add(self, seconds: dict[str, float], kernels: Kernels) -> None:
        for kernel, count in kernels.items():
            part = {MATRIX: MATRIX_WORK, OTHER: OTHER_KERNELS}.get(kernel.kind, ATTENTION)
            seconds[part] += count * self._prices.seconds(kernel)

    def _messages(self, plan: Plan, rank: RankPlan) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        size = plan.mesh.data
        for kind, link in rank.sent.items():
            found[kind] += self._one(kind, link, max(size, 2))
        return found

    def _one(self, kind: str, link: Link, ranks: int) -> float:
        seconds = 0.0
        for size_bytes, between in ((link.inside, False), (link.between, True)):
            if size_bytes:
                seconds += self.machine.link(kind, between=between).seconds(ranks, size_bytes)
        return seconds

    def _update(self, rank: RankPlan) -> float:
        states = rank.states
        size = sum(states.get(kind, 0) for kind in ("master", "optimizer", "grad", "host"))
        rate = self.machine.update.value
        return 2 * size / rate


__all__ = ["PARTS", "StepSeconds", "StepTimer", "step_seconds"]
