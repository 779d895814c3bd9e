"""Goodput of long runs whose ranks fail, failure by failure: of published ones first, then of recovery.

    python benchmarks/recovery/simulate.py

    python benchmarks/recovery/simulate.py --gpus 1024 --stall-seconds 5

The published figures must come out within 3 points, else the exit code is 1 and nothing is predicted. No torch
is needed. Failures come at random (exponential times, also while the ranks restart).

Sources of the published runs, and what they do not say:

- Llama 3 (2024, section 3.3.4): 419 unplanned stops in 54 days on 16,384 GPUs, above 90 % effective.
  Assumed: saves of 12 s at the best interval, 10 minutes from a failure to the next step.
- FT-HSDP (arXiv 2602.00277, abstract): on about 100,000 GPUs the stall after a failure falls from 10 to 3
  minutes, effective time rises from 44 to 80 %. The rate of failures is that of Kokolis et al. (HPCA 2025), 14
  minutes at 131,072 GPUs. Fitted to the 44 %: saves of 30 s at the best interval. Assumed for the 80 %: 16
  replicas, one is away for 10 minutes after a failure, the same saves once an hour.
- DLRover's Flash Checkpoint (its blog): GLM-65B on 1,536 GPUs. Before: a save of 120 s every 1.5 hours, 90 %.
  After: a copy to memory in 0.2 s every 10 steps (216 s), which outlives 75 % of the failures, 95 %. The rate
  of failures is that of Kokolis et al. at 16,384 GPUs (1.8 hours). Fitted to the 90 %: 45 minutes of a restart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from random import Random

from xds.engine.planning.goodput import best_interval_seconds

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
LLAMA_GPU_HOURS = 16_384 * 54 * 24 / 419  # between two failures
TOLERANCE = 0.03
SEEDS = 20


@dataclass(frozen=True)
class Job:
    """A run.

    failure_seconds: mean time between failures of all ranks. save_seconds: for which a save stops training.
    interval_seconds: of training between two saves; 0: the best one. restart_seconds: from a failure to the
    next step.
    memory_*: the same of copies in memory, which outlive memory_share of the failures.
    replicas: with more than one a failure stops all for restart_seconds and loses lost_seconds, and then one of
    the replicas is away for absence_seconds. No other work is lost while one is left.
    """

    failure_seconds: float
    save_seconds: float
    restart_seconds: float
    interval_seconds: float = 0.0
    memory_interval_seconds: float = 0.0
    memory_save_seconds: float = 0.0
    memory_share: float = 0.0
    replicas: int = 1
    absence_seconds: float = 0.0
    lost_seconds: float = 0.0

    @cached_property
    def interval(self) -> float:
        """Seconds of training between two saves."""
        best = best_interval_seconds(self.failure_seconds, self.save_seconds)
        return self.interval_seconds or best


def goodput(job: Job, seconds: float, seed: int) -> float:
    """The share of `seconds`, of all replicas, in which steps were trained that count."""
    random = Random(seed)
    now = useful = 0.0
    away: list[float] = []  # when each replica that is away is there again
    while now < seconds:
        failure = now + random.expovariate(1 / job.failure_seconds)
        end = min(failure, seconds)
        is_failure = failure < seconds
        begin = min(end, now + (job.restart_seconds if now else 0.0))
        if job.replicas == 1:
            useful += _kept(job, end - begin, random, is_failure=is_failure)
        else:
            useful += _of_replicas(job, begin, end, away)
            if is_failure and len(away) < job.replicas - 1:
                heappush(away, end + job.restart_seconds + job.absence_seconds)
        now = end
    return useful / seconds


def _kept(job: Job, spent: float, random: Random, *, is_failure: bool) -> float:
    """Seconds of training that count, of `spent` until a failure, or until the end."""
    pace = job.interval / (job.interval + job.save_seconds)
    if job.memory_interval_seconds:
        pace *= job.memory_interval_seconds / (
            job.memory_interval_seconds + job.memory_save_seconds
        )
    trained = spent * pace
    if not is_failure:
        return trained
    is_in_memory = random.random() < job.memory_share
    interval = job.memory_interval_seconds if is_in_memory else job.interval
    return trained // interval * interval


def _of_replicas(job: Job, begin: float, end: float, away: list[float]) -> float:
    """Seconds of training times the share of the replicas that are there."""
    at, useful = min(end, begin + job.lost_seconds), 0.0
    while away and away[0] <= at:
        heappop(away)
    while at < end:
        until = min(end, away[0]) if away else end
        useful += (until - at) * (job.replicas - len(away)) / job.replicas
        at = until
        while away and away[0] <= at:
            heappop(away)
    return useful * job.interval / (job.interval + job.save_seconds)


def mean(job: Job, seconds: float = 54 * DAY) -> float:
    """Of some runs of 54 days."""
    return statistics.mean(goodput(job, seconds, seed) for seed in range(SEEDS))


def published() -> list[tuple[str, Job, float]]:
    """Runs, and their published goodput."""
    llama = Job(LLAMA_GPU_HOURS * HOUR / 16_384, 12.0, 10 * MINUTE)
    at_100k = 14 * MINUTE * 131_072 / 100_000
    synchronous = Job(at_100k, 30.0, 10 * MINUTE)
    replicas = Job(
        at_100k, 30.0, 3 * MINUTE, HOUR, replicas=16, absence_seconds=7 * MINUTE, lost_seconds=10.0
    )
    before = Job(1.8 * HOUR * 16_384 / 1536, 120.0, 45 * MINUTE, 1.5 * HOUR)
    after = replace(
        before,
        save_seconds=0.2,
        memory_interval_seconds=216.0,
        memory_save_seconds=0.2,
        memory_share=0.75,
    )
    return [
        ("Llama 3, 16,384 GPUs", llama, 0.90),
        ("FT-HSDP, 100,000 GPUs: synchronous", synchronous, 0.44),
        ("FT-HSDP, 100,000 GPUs: replicas", replicas, 0.80),
        ("DLRover, 1,536 GPUs: saves", before, 0.90),
        ("DLRover, 1,536 GPUs: Flash Checkpoint", after, 0.95),
    ]


def predicted(gpus: int, stall_seconds: float) -> list[tuple[str, Job]]:
    """What recovery in live processes would give at Llama's rate of failures."""
    restart = Job(LLAMA_GPU_HOURS * HOUR / gpus, 12.0, 10 * MINUTE)
    live = replace(
        restart,
        restart_seconds=stall_seconds,
        interval_seconds=HOUR,
        replicas=16,
        lost_seconds=10.0,
    )
    return [
        ("restart of all, 10 minutes, saves at the best interval", restart),
        (
            "recovery, 16 units, a new process after 10 minutes",
            replace(live, absence_seconds=10 * MINUTE),
        ),
        (
            "recovery, 16 units, a spare that waits, after 30 s",
            replace(live, absence_seconds=30.0),
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=16_384, help="of the prediction")
    parser.add_argument("--stall-seconds", type=float, default=30.0, help="groups open again")
    args = parser.parse_args()
    differs = False
    for name, job, wanted in published():
        found = mean(job)
        differs |= abs(found - wanted) > TOLERANCE
        print(f"{name:56} {found:6.1%}   published {wanted:.0%}")
    if differs:
        sys.exit(1)
    hours = LLAMA_GPU_HOURS / args.gpus
    print(f"\nPredicted for {args.gpus:,} GPUs, a failure every {hours:.2f} h, steps of 20 s,")
    print(f"{args.stall_seconds:g} s until groups are open again, saves of 12 s every hour:")
    for name, job in predicted(args.gpus, args.stall_seconds):
        print(f"{name:56} {mean(job):6.1%}")


if __name__ == "__main__":
    main()
