"""Measure the collectives of two hosts with two ranks each, whose links carry 1 Gb/s.

    python benchmarks/comm/two_hosts.py [--only PATTERN] [--megabits 1000] [--rounds 9] [--tokens 64] [--quick]

Hosts are namespaces (tests/real_hosts.py), whose links are limited with tc; where that cannot be, rows are
skipped. As with a network card, the kernel hands over 15 kB at a time. Three engines of one model take turns:
`communication: {}` has two levels, `hierarchical: false` sends each shard to each rank of the other host, and
`shared_memory: false` sends messages through gloo to every rank.

- `step`: time of a step with two levels over that of messages; the same for `hierarchical: false`.
- `bytes`: what a host sends to the other in a step, two levels over messages, as xds counts it. In the note the
  formula's bytes: passes * padded elements * bytes of an element * (ranks there / all ranks).
- `kernel`: bytes that left eth0 over those that xds counts.
- `losses`: for equal and unequal numbers of ranks, the distance to the losses of messages; and whether stages
  1, 2 and 3 have equal losses in fp32.

At stage 3 every unit but the last is gathered again for backward, as in models that need stage 3.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDERS = (HERE.parent, HERE.parent / "step_time", HERE.parent / "bytes", ROOT / "tests")
sys.path[:0] = [str(HERE), *map(str, FOLDERS)]
from harness import ONE_THREAD, Plan, Row, Watch, alternate, finish, ratio_row  # noqa: E402
from real_hosts import Hosts, why_not  # noqa: E402

LEVELS, PAIRS, MESSAGES = "two levels", "to each rank", "messages"
VARIANTS: dict[str, dict[str, Any]] = {
    LEVELS: {},
    PAIRS: {"hierarchical": False},
    MESSAGES: {"shared_memory": False},
}
STEP_MUST, BYTES_MUST, WIRE_MUST, WIRE_STEPS = 0.65, 0.5, 1.05, 3
LOSS_MUST = {"fp32": 1e-5, "bf16": 1e-2}  # relative: sums are taken in another order
SMALL = ("control", "broadcast")  # kinds of messages with a few numbers: norms, flags
CARD_BYTES = "15000"  # that the kernel hands over at a time: less than a burst of the link
WAIT_SECONDS = 900.0


@dataclass(frozen=True)
class Task:
    """What the ranks do. slots: how many ranks each host has. rounds: turns; 0: `steps` steps, for losses."""

    stage: int
    precision: str
    slots: tuple[int, ...] = (2, 2)
    rounds: int = 9
    steps: int = 2
    width: int = 384
    layers: int = 6
    tokens: int = 64

    @property
    def name(self) -> str:
        return f"stage {self.stage}, {self.precision}"


@dataclass
class Found:
    """Of one rank, by variant. seconds: of each turn. across: bytes of a step to the other host, by kind.
    wire: bytes of a step that this rank's host sent. formula: what this rank sends across with messages."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    across: dict[str, dict[str, int]] = field(default_factory=dict)
    wire: dict[str, float] = field(default_factory=dict)
    formula: float = 0.0
    numel: int = 0


# -- a rank ----------------------------------------------------------------------------------------------


def config_of(task: Task, communication: dict[str, Any]) -> dict[str, Any]:
    """The JSON of an engine."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "bf16": {"enabled": task.precision == "bf16"},
        "zero_optimization": {"stage": task.stage, "stage3_max_reuse_distance": 0},
        "communication": communication,
    }


class Trained:
    """An engine with its micro-batches."""

    def __init__(self, task: Task, communication: dict[str, Any], rank: int) -> None:
        import torch
        from model import GPT, Shape

        import xds

        torch.manual_seed(1)
        model = GPT(Shape(task.width, task.layers, heads=task.width // 64, context=task.tokens))
        self.numel = sum(p.numel() for p in model.parameters())
        self.formula = _formula(model, task)
        self.engine = xds.initialize(model, config_of(task, communication))
        self._tokens = task.tokens
        self._generator = torch.Generator().manual_seed(rank)
        hosts = [host for host, slots in enumerate(task.slots) for _ in range(slots)]
        for group in self.engine._parts.opened:
            group.set_hosts(hosts)

    def step(self, _: int = 0) -> Any:
        import torch

        tokens = torch.randint(256, (1, self._tokens + 1), generator=self._generator)
        loss = self.engine(tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def across(self) -> Counter[str]:
        """Bytes to other hosts, by kind."""
        total: Counter[str] = Counter()
        for group in self.engine._parts.opened:
            total.update(group.sent_across_bytes)
        return total


def _formula(model: Any, task: Task) -> float:
    """Bytes that one rank sends in a step to the ranks of other hosts, each of them its shard."""
    from theory import UnitSize, bytes_per_step

    from xds.zero.config import ZeroConfig
    from xds.zero.core.discover import find_units
    from xds.zero.core.layout import Entry, plan_flat

    world_size = sum(task.slots)
    blocks, root = find_units(model, (), ZeroConfig().unit_min_numel)
    units = []
    for unit in (*blocks, root):
        entries = [Entry(name, tuple(param.shape), 0) for name, param in unit.params]
        numel = plan_flat(entries, world_size).numel
        units.append(UnitSize(numel, kept=unit is root or unit is blocks[-1]))
    element_bytes = 2 if task.precision == "bf16" else 4
    to_all = bytes_per_step(units, task.stage, world_size, 1, element_bytes)
    return to_all * task.slots[-1] / (world_size - 1)


def sent_by_host() -> int:
    """Bytes that left this host since it was made."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise OSError("/proc/net/dev has no eth0")


def count_bytes(one: Trained) -> tuple[dict[str, int], float]:
    """Bytes of a step across: of this rank by kind, and of its host."""
    import torch.distributed as dist

    one.step()
    dist.barrier()
    start, before = sent_by_host(), one.across()
    dist.barrier()
    for _ in range(WIRE_STEPS):
        one.step()
    dist.barrier()
    wire, after = sent_by_host() - start, one.across()
    dist.barrier()
    sent = {kind: (size - before[kind]) // WIRE_STEPS for kind, size in after.items()}
    return sent, wire / WIRE_STEPS


def work(task: Task, rank: int) -> Found:
    """What one rank does and finds."""
    found = Found()
    engines = {
        name: Trained(task, section, rank)
        for name, section in VARIANTS.items()
        if task.rounds or name != PAIRS
    }
    found.formula, found.numel = engines[LEVELS].formula, engines[LEVELS].numel
    if not task.rounds:
        for name, one in engines.items():
            found.losses[name] = [float(one.step().detach()) for _ in range(task.steps)]
            one.engine.destroy()
        return found
    plan = Plan(rounds=task.rounds, block=task.steps, warmup=3)
    steps: dict[str, Callable[[int], Any]] = {name: one.step for name, one in engines.items()}
    found.seconds, found.losses = alternate(steps, plan)
    for name, one in engines.items():
        found.across[name], found.wire[name] = count_bytes(one)
        one.engine.destroy()
    return found


def rank_main(rank: int, folder: str, tasks: list[Task]) -> None:
    """A rank on its host: writes what it found."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    world_size = sum(tasks[0].slots)
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    found = [vars(work(task, rank)) for task in tasks]
    Path(folder, f"rank{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


# -- the hosts -------------------------------------------------------------------------------------------


def on_hosts(hosts: Hosts, tasks: list[Task]) -> list[list[Found]]:
    """For each task, of one layout, what each rank found."""
    folder = hosts.folder / f"task{len(list(hosts.folder.glob('task*')))}"
    folder.mkdir()
    env = {**ONE_THREAD, "GLOO_SOCKET_IFNAME": "eth0", "PYTHONWARNINGS": "ignore"}
    env |= {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))}
    slots = zip(hosts.names, tasks[0].slots, strict=True)
    started = []
    for rank, name in enumerate(name for name, number in slots for _ in range(number)):
        words = [sys.executable, str(Path(__file__).resolve())]
        words += ["--rank", json.dumps([rank, str(folder), [vars(task) for task in tasks]])]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(hosts.popen(words, env, place=name, cwd=folder, **pipes))
    try:
        for rank, process in enumerate(started):
            told, _ = process.communicate(timeout=WAIT_SECONDS)
            if process.returncode:
                raise RuntimeError(f"{tasks[0].name}, rank {rank}: {told}")
    finally:
        for process in started:
            process.kill()
    ranks = [json.loads((folder / f"rank{rank}").read_text()) for rank in range(len(started))]
    return [[Found(**found) for found in of_task] for of_task in zip(*ranks, strict=True)]


def step_rows(hosts: Hosts, task: Task, has_target: bool) -> Iterator[Row]:
    """The rows of one stage and precision. has_target: the model is large enough for a claim of time."""
    with Watch() as watch:
        (ranks,) = on_hosts(hosts, [task])
    first = ranks[0]
    slow = {
        name: [max(each) for each in zip(*(rank.seconds[name] for rank in ranks), strict=True)]
        for name in first.seconds
    }
    middles = {name: statistics.median(seconds) for name, seconds in slow.items()}
    for name, must in ((LEVELS, STEP_MUST if has_target else None), (PAIRS, None)):
        row = ratio_row(f"step, {task.name}: {name} over messages", slow[name], slow[MESSAGES])
        row.must, row.others_busy, row.samples = must, watch.others, slow
        row.note = (
            f"{first.numel / 1e6:.1f}M, {task.tokens} tokens a rank, medians {middles[name]:.3f} s "
        )
        row.note += f"and {middles[MESSAGES]:.3f} s"
        yield row
    sent = {}
    for name in VARIANTS:
        kinds: Counter[str] = Counter()
        for rank in ranks[: task.slots[0]]:  # those of the first host
            kinds.update({kind: size for kind, size in rank.across[name].items()})
        sent[name] = sum(size for kind, size in kinds.items() if kind not in SMALL)
    formula = round(first.formula * task.slots[0])
    row = Row(f"bytes, {task.name}: {LEVELS} over messages", sent[LEVELS] / sent[MESSAGES])
    row.must = BYTES_MUST
    row.note = f"{sent[LEVELS]} of {sent[MESSAGES]}; formula {formula // 2} of {formula}; "
    row.note += f"to each rank {sent[PAIRS]}"
    if (sent[LEVELS], sent[MESSAGES]) != (formula // 2, formula):
        row.void = "FAIL: not the formula"
    yield row
    wire = first.wire
    row = Row(f"kernel, {task.name}: eth0 over xds's count", wire[LEVELS] / sent[LEVELS])
    row.must = WIRE_MUST
    row.note = f"{wire[LEVELS]:.0f} bytes, of messages {wire[MESSAGES]:.0f}"
    row.note += f": {wire[LEVELS] / wire[MESSAGES]:.3f}x"
    yield row


def loss_rows(hosts: Hosts, slots: tuple[int, ...]) -> Iterator[Row]:
    """The rows `losses` of one layout."""
    layout = " + ".join(map(str, slots))
    small = {"rounds": 0, "steps": 4, "width": 128, "layers": 2}
    tasks = [Task(stage, kind, slots, **small) for kind in LOSS_MUST for stage in (0, 1, 2, 3)]
    found = dict(zip(tasks, on_hosts(hosts, tasks), strict=True))
    for precision, must in LOSS_MUST.items():
        worst = 0.0
        for rank in (rank for task in tasks if task.precision == precision for rank in found[task]):
            pairs = zip(rank.losses[LEVELS], rank.losses[MESSAGES], strict=True)
            worst = max(worst, *(abs(ours / theirs - 1) for ours, theirs in pairs))
        name = f"losses, {layout}, {precision}: relative distance to messages"
        yield Row(name, worst, must=must, unit="", note=f"{worst:.1e}; stages 0 to 3")
    by_stage = {
        task.stage: [rank.losses[LEVELS] for rank in found[task]]
        for task in tasks
        if task.precision == "fp32"
    }
    differ = sum(by_stage[stage] != by_stage[1] for stage in (2, 3))
    name = f"losses, {layout}, fp32: stages that differ from stage 1"
    yield Row(name, differ, must=0, unit="", note="of stages 2 and 3")


def measure(options: argparse.Namespace) -> list[Row]:
    """The chosen rows, or one with the reason why there are none."""
    reason = why_not(False)
    if reason:
        return [Row("two hosts", void=f"SKIP: {reason}")]
    small = {"width": 128, "layers": 2} if options.quick else {}
    with Hosts(2, has_ssh=False) as hosts:
        rows: list[Row] = []
        for slots in ((2, 1), (3, 1), (2, 2)):
            if fnmatch.fnmatch(f"losses, {' + '.join(map(str, slots))}", options.only):
                rows += loss_rows(hosts, slots)
        for name in hosts.names:
            hosts.run(["ip", "link", "set", "eth0", "gso_max_size", CARD_BYTES], place=name)
            reason = reason or hosts.limit(name, options.megabits)
        if reason:
            return [*rows, Row("two hosts", void=f"SKIP: {reason}")]
        for precision in ("fp32", "bf16"):
            for stage in (0, 1, 2, 3):
                task = Task(stage, precision, rounds=options.rounds, tokens=options.tokens, **small)
                if fnmatch.fnmatch(task.name, options.only):
                    rows += step_rows(hosts, task, has_target=not options.quick)
                    print(rows[-4].cells(), file=sys.stderr, flush=True)
        return rows


def main() -> int:
    """Run the chosen rows; 1 if one misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", default="*", help="names that match, e.g. 'stage 1*', 'losses, 3 + 1'"
    )
    parser.add_argument("--megabits", type=float, default=1000.0, help="of each link, per second")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each variant")
    parser.add_argument("--tokens", type=int, default=64, help="of a rank in a step")
    parser.add_argument("--quick", action="store_true", help="a small model; keeps nothing")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, folder, tasks = json.loads(options.rank)
        rank_main(rank, folder, [Task(**{**each, "slots": tuple(each["slots"])}) for each in tasks])
        return 0
    return finish(HERE, measure(options), keeps=False)


if __name__ == "__main__":
    raise SystemExit(main())
