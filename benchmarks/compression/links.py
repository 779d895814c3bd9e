"""Measure steps and runs of 1-bit Adam over slow links: four hosts of one rank each, at 100 Mb/s.

    python benchmarks/compression/links.py [--only PATTERN] [--megabits 100] [--pairs 2] [--quick]

Hosts are namespaces (tests/real_hosts.py), whose links are limited with tc.
Where that cannot be, rows are skipped.

- `step`: time of an exact AdamW step over that of a compressed step of the same stage.
- `run`: time of 40 exact steps over that of 40 steps with 8 of warm-up.
- `run, bytes`: bytes of the same runs, exact over compressed, against 1 / (w + (1 - w) / 16), in fp32 / 32.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT / "examples" / "gpt"), str(ROOT / "tests")]
from harness import ONE_THREAD, Plan, Row, Watch, alternate, finish, ratio_row  # noqa: E402
from main import config_of  # noqa: E402
from real_hosts import Hosts, why_not  # noqa: E402

HOSTS, RUN_STEPS, FREEZE = 4, 40, 8
TIMES_FEWER = {"bf16": 16, "fp32": 32}
STEP_MUST, RUN_MUST, BYTES_MUST = 5.0, 2.5, 0.02
WAIT_SECONDS = 1800.0


@dataclass(frozen=True)
class Task:
    """What the ranks do. kind: "step" or "run". pairs: so many turns of exact and compressed."""

    kind: str
    stage: int
    precision: str
    pairs: int
    width: int = 320
    layers: int = 3
    tokens: int = 16

    @property
    def name(self) -> str:
        return f"{self.kind}, stage {self.stage}, {self.precision}"


@dataclass
class Found:
    """Of one rank. seconds: of each turn, by optimizer. sent: bytes of a step or of a run, by optimizer."""

    numel: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)


# -- a rank ----------------------------------------------------------------------------------------------


class Trained:
    """An engine with its micro-batches, few tokens each: messages take most of the time."""

    def __init__(self, task: Task, optimizer: str, freeze: int, rank: int) -> None:
        import torch
        from model import GPT, Shape

        import xds

        torch.manual_seed(1)
        model = GPT(Shape(task.layers, task.width, heads=4, context=task.tokens))
        self.numel = sum(p.numel() for p in model.parameters())
        self.engine = xds.initialize(
            model, config_of(task.stage, optimizer, freeze, task.precision)
        )
        self._tokens = task.tokens
        self._generator = torch.Generator().manual_seed(rank)

    def step(self, _: int = 0) -> Any:
        import torch

        ids = torch.randint(256, (1, self._tokens + 1), generator=self._generator)
        loss = self.engine(ids[:, :-1], ids[:, 1:])
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def sent(self) -> int:
        return sum(self.engine.bytes_sent().values())


def time_steps(task: Task, rank: int) -> Found:
    """Turns of one exact and one compressed step, in one pair of engines."""
    found = Found()
    pair = {name: Trained(task, name, 1, rank) for name in ("AdamW", "OneBitAdam")}
    plan = Plan(rounds=task.pairs, block=1, warmup=3)
    found.seconds, _ = alternate({name: one.step for name, one in pair.items()}, plan)
    for name, one in pair.items():
        before = one.sent()
        one.step()
        found.sent[name], found.numel = one.sent() - before, one.numel
        one.engine.destroy()
    return found


def time_runs(task: Task, rank: int) -> Found:
    """Turns of whole runs, an engine each."""
    import torch.distributed as dist

    found = Found(seconds={"AdamW": [], "OneBitAdam": []})
    for turn in range(task.pairs):
        names = list(found.seconds)
        for name in names if turn % 2 == 0 else reversed(names):
            one = Trained(task, name, FREEZE, rank)
            before = one.sent()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(RUN_STEPS):
                one.step()
            dist.barrier()
            found.seconds[name].append(time.perf_counter() - start)
            found.sent[name], found.numel = one.sent() - before, one.numel
            one.engine.destroy()
    return found


def rank_main(rank: int, folder: str, task: Task) -> None:
    """A rank on its host: writes what it found."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(HOSTS))
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=HOSTS)
    found = (time_steps if task.kind == "step" else time_runs)(task, rank)
    Path(folder, f"rank{rank}").write_text(json.dumps(vars(found)))
    dist.destroy_process_group()


# -- the hosts -------------------------------------------------------------------------------------------


def on_hosts(hosts: Hosts, task: Task) -> list[Found]:
    """What each rank found, one on each host."""
    number = len(list(hosts.folder.glob("task*")))
    folder = hosts.folder / f"task{number}"
    folder.mkdir()
    env = {**ONE_THREAD, "GLOO_SOCKET_IFNAME": "eth0", "PYTHONWARNINGS": "ignore"}
    started = []
    for rank, name in enumerate(hosts.names):
        words = [sys.executable, str(Path(__file__).resolve())]
        words += ["--rank", json.dumps([rank, str(folder), vars(task)])]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(hosts.popen(words, env, place=name, cwd=folder, **pipes))
    for rank, process in enumerate(started):
        told, _ = process.communicate(timeout=WAIT_SECONDS)
        if process.returncode:
            raise RuntimeError(f"{task.name}, rank {rank}: {told}")
    return [
        Found(**json.loads((folder / f"rank{rank}").read_text())) for rank in range(len(started))
    ]


def rows_of(task: Task, hosts: Hosts, free: dict[str, float]) -> Iterator[Row]:
    """The rows of one task. free: seconds of a step where links have no limit."""
    with Watch() as watch:
        ranks = on_hosts(hosts, task)
    first = ranks[0]
    slow = {
        name: [max(each) for each in zip(*(rank.seconds[name] for rank in ranks), strict=True)]
        for name in first.seconds
    }
    exact, compressed = slow["AdamW"], slow["OneBitAdam"]
    note = (
        f"{first.numel / 1e6:.1f}M parameters, {task.tokens} tokens a rank; medians "
        f"{statistics.median(exact):.2f} s and {statistics.median(compressed):.2f} s; bytes "
        f"{first.sent['AdamW']} and {first.sent['OneBitAdam']}"
    )
    if free:
        note += f"; without a limit {free['AdamW']:.2f} s and {free['OneBitAdam']:.2f} s"
    measured = ratio_row(f"{task.name}: time, exact over compressed", exact, compressed)
    measured.more_is_better = True
    measured.must = STEP_MUST if task.kind == "step" else RUN_MUST
    measured.note, measured.samples, measured.others_busy = note, slow, watch.others
    yield measured
    if task.kind == "run":
        share = FREEZE / RUN_STEPS
        formula = 1 / (share + (1 - share) / TIMES_FEWER[task.precision])
        fewer = first.sent["AdamW"] / first.sent["OneBitAdam"]
        yield Row(
            f"{task.name}: bytes, off the formula",
            abs(fewer / formula - 1),
            must=BYTES_MUST,
            unit="",
            note=f"{fewer:.3f}x fewer; formula {formula:.3f}x at w = {share:.2f}",
        )


def measure(tasks: list[Task], megabits: float) -> list[Row]:
    """The rows of all tasks, or one with the reason why there are none."""
    reason = why_not(False)
    if reason:
        return [Row("slow links", void=f"SKIP: {reason}")]
    with Hosts(HOSTS, has_ssh=False) as hosts:
        free = {}
        for task in [task for task in tasks if task.kind == "step"]:
            found = on_hosts(hosts, task)
            free[task.name] = {
                name: statistics.median(found[0].seconds[name]) for name in found[0].seconds
            }
        for name in hosts.names:
            reason = reason or hosts.limit(name, megabits)
        if reason:
            return [Row("slow links", void=f"SKIP: {reason}")]
        rows: list[Row] = []
        for task in tasks:
            rows += rows_of(task, hosts, free.get(task.name, {}))
            print(rows[-1].cells(), file=sys.stderr, flush=True)
        return rows


def main() -> int:
    """Run the chosen tasks; 1 if a row misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", default="*", help="tasks whose name matches, e.g. 'run, stage 1*'"
    )
    parser.add_argument("--megabits", type=float, default=100.0, help="of each link, per second")
    parser.add_argument("--pairs", type=int, default=0, help="turns; default: 7 steps, 2 runs")
    parser.add_argument("--quick", action="store_true", help="a small model; keeps nothing")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, folder, task = json.loads(options.rank)
        rank_main(rank, folder, Task(**task))
        return 0
    small = {"width": 64, "layers": 2} if options.quick else {}
    turns = {"step": options.pairs or 7, "run": options.pairs or 2}
    tasks = [
        Task(kind, stage, precision, turns[kind], **small)
        for kind in ("step", "run")
        for precision in ("bf16", "fp32")
        for stage in (0, 1, 2)
    ]
    tasks = [task for task in tasks if fnmatch.fnmatch(task.name, options.only)]
    rows = measure(tasks, options.megabits)
    if options.quick:  # too small for a claim
        rows = [row for row in rows if row.unit == "" or row.void]
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
