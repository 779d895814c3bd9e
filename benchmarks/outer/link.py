"""The share of the time that two sites compute over a link of 100 Mbit/s.

    python benchmarks/outer/link.py [--megabits 100] [--seconds 0.3] [--steps 60]

Two hosts made of namespaces (tests/real_hosts.py, needs root), one rank on each, `tc tbf` between them. The
model has 11 M parameters. Forward is a sleep, so that the ranks do not compete for processors; the optimizer
updates all parameters. Share: the median step of a rank that trains alone, over the mean step. Meeting: the
time that the training thread spends in meetings, over that of all steps; `cpu`: what it computes of it. Where
the kernel has netem, the link also delays packets by 50 ms; else the output says that it does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DELAY_MILLISECONDS = 50
ALONE = "alone"
WAYS: dict[str, dict[str, Any] | None] = {
    ALONE: None,
    "H 30, 4 bits, fragments 3, delay 5": {"steps": 30, "bits": 4, "fragments": 3, "delay": 5},
    "H 30, 4 bits": {"steps": 30, "bits": 4},
    "H 30, 32 bits": {"steps": 30},
    "plain": None,
}


def train(way: str, steps: int, seconds: float, alone: float) -> None:
    import torch
    from torch import nn

    import xds

    torch.set_num_threads(1)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(1350, 1350) for _ in range(6))

        def forward(self, scale: float) -> Any:
            time.sleep(seconds)
            return sum(part.bias.sum() + part.weight.view(-1)[0] for part in self.parts) * scale

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"unit_min_numel": 1},
        "log_level": "error",
    }
    if WAYS[way] is not None:
        config["outer"] = {"groups": 2, "mix": 0.5} | (WAYS[way] or {})
    engine = xds.initialize(Wide(), config)
    loop, advance, meeting = engine._parts.outer, engine._parts.outer.advance, [0.0, 0.0]

    def timed(weight: float) -> None:
        begin = time.perf_counter(), time.thread_time()
        advance(weight)
        meeting[0] += time.perf_counter() - begin[0]
        meeting[1] += time.thread_time() - begin[1]

    loop.advance = timed  # type: ignore[method-assign]
    every = []
    for _ in range(steps if way != "plain" else min(steps, 5)):
        begin_seconds = time.perf_counter()
        engine.backward(engine(1.0))
        engine.step()
        every.append(time.perf_counter() - begin_seconds)
    if engine.global_rank == 0:
        total = sum(every)
        taken = statistics.median(every) if way == ALONE else total / len(every)
        found = {"way": way, "step_seconds": round(taken, 4)}
        if way != ALONE:
            found |= {"share": round(alone / taken, 4), "meeting": round(meeting[0] / total, 4)}
            found |= {"cpu": round(meeting[1] / total, 4), "bytes": engine.bytes_sent()}
        print(json.dumps(found), flush=True)
    engine.destroy()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabits", type=float, default=100)
    parser.add_argument("--seconds", type=float, default=0.3, help="of the sleep of a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS)[1:])
    parser.add_argument("--way", choices=WAYS, help="on a rank: train")
    parser.add_argument("--alone", type=float, default=1.0, help="on a rank: the step of one alone")
    options = parser.parse_args()
    if options.way:
        train(options.way, options.steps, options.seconds, options.alone)
        return 0
    sys.path.insert(0, str(HERE.parents[1] / "tests"))
    from real_hosts import Hosts, why_not

    if reason := why_not(needs_ssh=False):
        print(f"skipped: {reason}")
        return 0
    with Hosts(2, has_ssh=False) as hosts:
        for place in hosts.names:
            if reason := hosts.limit(place, options.megabits):
                print(f"no limit: {reason}")
            words = f"parent 1:1 netem delay {DELAY_MILLISECONDS / 2}ms"
            if reason := hosts._tc(place, "add", "eth0", words):
                print(f"no delay on {place}: {reason}")
        alone = options.alone
        for way in (ALONE, *options.ways):
            ranks, places = [], hosts.names[:1] if way == ALONE else hosts.names
            for rank, place in enumerate(places):
                env = {"RANK": str(rank), "WORLD_SIZE": str(len(places)), "LOCAL_RANK": "0"}
                env |= {"MASTER_ADDR": hosts.address("host0"), "MASTER_PORT": "29511"}
                env |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
                words = [sys.executable, str(Path(__file__).resolve()), "--way", way]
                words += ["--steps", str(options.steps), "--seconds", str(options.seconds)]
                words += ["--alone", str(alone)]
                ranks.append(hosts.popen(words, env, place=place, stdout=subprocess.PIPE))
            for text in [process.communicate()[0] for process in ranks][:1]:
                print(text, end="", flush=True)
                alone = json.loads(text.splitlines()[-1])["step_seconds"] if way == ALONE else alone
    return 0


if __name__ == "__main__":
    sys.exit(main())
