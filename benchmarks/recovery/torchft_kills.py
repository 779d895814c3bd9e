"""The same kills with torchft: the time until the survivors' next commit, and until a new process takes part.

    python benchmarks/recovery/torchft_kills.py --kills 6 --heartbeat-seconds 1

It needs an environment with torch and torchft-nightly, which is no dependency of xds. Each replica is a process
with the model of train.py in a replica group of its own, over gloo. SIGKILL comes at a random instant. A new
process is started when the kill is known: cold, or one that has imported torch and torchft and built the model
(`--warm`). `--kills 0` measures the step alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

WIDTH, TOKENS, VOCABULARY = 64, 32, 256
NUM_FIRST = 20  # steps that do not count
LIMIT_SECONDS = 120.0
SPARE_SECONDS = float(os.environ.get("SPARE_SECONDS", "8"))  # to import, and then to wait


def replica(number: int, port: int, out: Path, rows: int) -> None:
    """Train for ever as one replica, and write a line for each step that is committed."""
    import socket
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch import nn
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
            hidden = 4 * WIDTH
            self.mlp = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            y = self.norm1(x)
            z = self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
            return x + z + self.mlp(self.norm2(x + z))

    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(3)))
    layers = nn.Embedding(VOCABULARY, WIDTH), blocks, nn.Linear(WIDTH, VOCABULARY)
    model = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(1 + number)
    data = torch.randint(0, VOCABULARY, (2000, TOKENS + 1), generator=generator)
    if sys.stdin.readline() == "":  # a place
        return
    with socket.socket() as free:
        free.bind(("localhost", 0))
        store_port = free.getsockname()[1]
    store = dist.TCPStore("localhost", store_port, is_master=True, wait_for_workers=False)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=f"http://localhost:{port}",
        replica_id=f"replica{number}_",
        hostname="localhost",
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    lines = open(out / f"replica{number}.jsonl", "a", buffering=1)
    lines.write(json.dumps({"seconds": time.time(), "start": os.getpid()}) + "\n")
    while True:
        for batch in data.split(rows):
            before = manager.current_step()
            optimizer.zero_grad()
            logits = wrapped(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            if manager.current_step() > before:
                found = {"step": manager.current_step(), "world": manager.num_participants()}
                found |= {"seconds": time.time(), "cpu": time.process_time()}
                lines.write(json.dumps(found) + "\n")


def start(args: argparse.Namespace, number: int, port: int, out: Path) -> subprocess.Popen[str]:
    words = [sys.executable, __file__, "--replica", str(number), "--port", str(port)]
    words += ["--out", str(out), "--rows", str(args.rows)]
    log = open(out / f"replica{number}.log", "a")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, env=environ, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True
    )


def give_place(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def lines_of(out: Path, number: int) -> list[Any]:
    path = out / f"replica{number}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_until_all_train(out: Path, count: int, since: float = 0.0) -> None:
    """Wait until each has committed a step with all others, after the time `since`."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        last = [lines_of(out, number)[-1:] for number in range(count)]
        rows = [row for found in last for row in found if row["seconds"] > since]
        if [row.get("world") for row in rows] == [count] * count:
            return
        time.sleep(0.1)
    raise TimeoutError(f"not all replicas train: {out}")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2, help="samples of a micro-batch")
    parser.add_argument("--heartbeat-seconds", type=float, default=5.0, help="torchft's default: 5")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--replica", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def kill_once(
    args: argparse.Namespace, port: int, out: Path, processes: list[subprocess.Popen[str]]
) -> tuple[float, float]:
    """Seconds from a kill to the next commit of another replica, and to the first of its new process."""
    number = random.randrange(args.replicas)
    new = start(args, number, port, out) if args.warm else None
    try:
        wait_until_all_train(out, args.replicas)
        time.sleep(SPARE_SECONDS if args.warm else 2.0)
        time.sleep(random.random() * 0.1)
        at = time.time()
        processes[number].send_signal(signal.SIGKILL)
        processes[number].wait()
        new = new or start(args, number, port, out)
        give_place(new)
        wait_until_all_train(out, args.replicas, since=at)
        processes[number], new = new, None
    finally:
        if new is not None:
            new.kill()
            new.wait()
    found = [line for other in range(args.replicas) for line in lines_of(out, other)]
    later = [line for line in found if "step" in line and line["seconds"] > at]
    without = [line["seconds"] for line in later if line["world"] < args.replicas]
    own = [line["seconds"] for line in lines_of(out, number) if "step" in line]
    return min(without) - at, min(seconds for seconds in own if seconds > at) - at


def main() -> None:
    args = options()
    if args.replica >= 0:
        replica(args.replica, args.port, args.out, args.rows)
        return
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=100,
        heartbeat_timeout_ms=int(1000 * args.heartbeat_seconds),
    )
    port = int(lighthouse.address().rpartition(":")[2])
    out, count = Path(tempfile.mkdtemp(prefix="torchft-")), args.replicas
    processes = [start(args, number, port, out) for number in range(count)]
    for process in processes:
        give_place(process)
    waited = []
    try:
        for _ in range(args.kills):
            waited.append(kill_once(args, port, out, processes))
        if not args.kills:
            wait_until_all_train(out, count)
            time.sleep(30.0)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        lighthouse.shutdown()
    rows = [line for line in lines_of(out, 0) if line.get("world") == count][NUM_FIRST:]
    wall = statistics.median(b["seconds"] - a["seconds"] for a, b in pairwise(rows))
    cpu = statistics.median(b["cpu"] - a["cpu"] for a, b in pairwise(rows))
    print(f"step {1000 * wall:.1f} ms, {1000 * cpu:.1f} ms of the processor")
    names = ("survivors' next commit", "new process's first")
    for name, seconds in zip(names, zip(*waited, strict=True), strict=False):
        listed = ", ".join(f"{each:.2f}" for each in sorted(seconds))
        print(f"{name}: p50 {statistics.median(seconds):.2f} s ({listed})")


if __name__ == "__main__":
    main()
