"""The share of the time that two sites compute over a link of 100 Mbit/s.

    python benchmarks/outer/link.py [--megabits 100] [--seconds 0.3] [--steps 60]

Two hosts made of namespaces (tests/real_hosts.py, needs root), one rank on each, `tc tbf` between them. The
model has 11 M parameters. A step is a sleep, so that the ranks do not compete for processors. Share: the
sleeps, over the time of all steps. Where the kernel has netem, the link also delays packets by 50 ms; else the
output says that it does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DELAY_MILLISECONDS = 50
WAYS: dict[str, dict[str, Any] | None] = {
    "H 30, 4 bits, fragments 3, delay 5": {"steps": 30, "bits": 4, "fragments": 3, "delay": 5},
    "H 30, 4 bits": {"steps": 30, "bits": 4},
    "H 30, 32 bits": {"steps": 30},
    "plain": None,
}


def train(way: str, steps: int, seconds: float) -> None:
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
            return sum(part.bias.sum() for part in self.parts) * scale

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"unit_min_numel": 1},
        "log_level": "error",
    }
    if WAYS[way] is not None:
        config["outer"] = {"groups": 2, "mix": 0.5} | (WAYS[way] or {})
    engine = xds.initialize(Wide(), config)
    begin_seconds = time.monotonic()
    for _ in range(steps if WAYS[way] is not None else min(steps, 5)):
        engine.backward(engine(1.0))
        engine.step()
    taken = (time.monotonic() - begin_seconds) / engine.global_steps
    if engine.global_rank == 0:
        found = {"way": way, "step_seconds": round(taken, 3), "share": round(seconds / taken, 3)}
        numel = sum(param.numel() for param in engine.module.parameters())
        print(json.dumps(found | {"numel": numel, "bytes": engine.bytes_sent()}), flush=True)
    engine.destroy()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabits", type=float, default=100)
    parser.add_argument("--seconds", type=float, default=0.3, help="of the sleep of a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--way", choices=WAYS, help="on a rank: train")
    options = parser.parse_args()
    if options.way:
        train(options.way, options.steps, options.seconds)
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
        for way in WAYS:
            ranks = []
            for rank, place in enumerate(hosts.names):
                env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
                env |= {"MASTER_ADDR": hosts.address("host0"), "MASTER_PORT": "29511"}
                env |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
                words = [sys.executable, str(Path(__file__).resolve()), "--way", way]
                words += ["--steps", str(options.steps), "--seconds", str(options.seconds)]
                ranks.append(hosts.popen(words, env, place=place))
            for process in ranks:
                process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
