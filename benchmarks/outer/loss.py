"""The loss of groups that meet every H steps, over that of plain data parallelism at equal tokens.

    python benchmarks/outer/loss.py [--seeds 0 1 2] [--groups 2 4] [--steps 600] [--ways "H 10" ...]
    python benchmarks/outer/loss.py --real --steps 60      with processes and engines: the same numbers
    python benchmarks/outer/loss.py --wide 2               groups of two ranks each

The example's GPT of 1.1 M parameters trains on the sources of Python's standard library. A model is trained
without groups first (`--before`), as in DiLoCo, section 3. All runs go on from it. Those of a seed take the
same windows of 32 bytes in each step, 4 for each rank. The learning rate falls to zero. The loss is that of
1,024 windows that were not trained, of the outer parameters: the runs end with a meeting. `own` is that of the
parameters of group 0, which differ from them where a meeting has not taken effect, or is mixed in.

The groups are models of one process here, which take their steps in turn. Fragments, the mean in few bits and
the outer optimizer are those of outer/; `InProcess` carries the messages between threads. --keep: a file with
one line of JSON for each run; runs that are in it are not repeated.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "examples" / "gpt")]
from data import load_text  # noqa: E402
from harness import run_ranks  # noqa: E402
from model import GPT, Shape  # noqa: E402

import xds  # noqa: E402
from xds.outer.config import Outer  # noqa: E402
from xds.outer.fragment import DONE, Fragment, Meeting, OuterSgd  # noqa: E402
from xds.outer.mean import bytes_of_mean, mean_of  # noqa: E402
from xds.outer.schedule import MeetingSchedule, fragment_of  # noqa: E402

CONTEXT, BATCH = 32, 4
SHAPES = {
    "1M": Shape(layers=4, width=144, heads=4, context=CONTEXT),
    "11M": Shape(layers=6, width=384, heads=6, context=CONTEXT),
}
RATES = {"1M": 2e-3, "11M": 1e-3}
WARMUP, DECAY, CLIP = 40, 0.1, 1.0
BETAS, EPS = (0.9, 0.999), 1e-8
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "H 10": {"steps": 10},
    "H 30": {"steps": 30},
    "H 100": {"steps": 100},
    "H 30, 8 bits": {"steps": 30, "bits": 8},
    "H 30, 4 bits": {"steps": 30, "bits": 4},
    "H 30, 2 bits": {"steps": 30, "bits": 2},
    "H 30, streamed": {"steps": 30, "fragments": 3, "delay": 3, "mix": 0.5, "bits": 4},
    "one group, H 10": {"steps": 10, "groups": 1},
    "one group, H 30": {"steps": 30, "groups": 1},
}


class InProcess:
    """The messages between the groups of one process: each is a thread while it meets."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._here = threading.local()
        self._barrier = threading.Barrier(world_size)
        self._slots: list[Any] = [None] * world_size

    @property
    def rank(self) -> int:
        return int(self._here.rank)

    def enter(self, rank: int) -> None:
        self._here.rank = rank

    def _all(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def gather_small(self, mine: Tensor, what: str = "") -> Tensor:
        return torch.stack(self._all(mine))

    def all_reduce(self, values: Tensor, **_: Any) -> Any:
        found = self._all(values.clone())
        values.copy_(found[0])
        for each in found[1:]:
            values.add_(each)
        return self

    def all_to_all(self, theirs: list[Tensor], mine: list[Tensor], **_: Any) -> Any:
        for out, packets in zip(theirs, self._all(mine), strict=True):
            out.copy_(packets[self.rank])
        self._barrier.wait()
        return self

    def all_gather(self, flat: Tensor, mine: Tensor, **_: Any) -> Any:
        flat.copy_(torch.cat(self._all(mine.clone())))
        return self

    def count_exact(self, *_: Any) -> None: ...

    def wait(self) -> None: ...


class SimulatedGroups:
    """Groups of one process, each with a model and AdamW of its own."""

    def __init__(self, model: nn.Module, section: Outer, rate: float) -> None:
        self.models = [copy.deepcopy(model) for _ in range(section.groups)]
        self._optimizers = [adam(each, rate) for each in self.models]
        self._section = section
        self._schedule = MeetingSchedule(section.steps, section.fragments, section.delay)
        optimizer = OuterSgd(section.optimizer)
        self._groups = InProcess(section.groups)
        self._meeting = Meeting(self._groups, mean_of(self._groups, section.bits), optimizer)  # type: ignore[arg-type]
        self._names = fragments_of(model, section.fragments)
        self._held = [
            [
                Fragment(
                    number,
                    len(values),
                    section.groups,
                    momentum=optimizer.has_momentum,
                    error=section.bits < 32,
                )
                for number, values in enumerate(map(self._read(each), range(section.fragments)))
            ]
            for each in range(section.groups)
        ]
        for group in range(section.groups):
            for number, fragment in enumerate(self._held[group]):
                fragment.outer[: fragment.numel] = self._read(group)(number)
        self.bytes = 0

    def _params(self, group: int, number: int) -> Iterator[Tensor]:
        named = dict(self.models[group].named_parameters())
        return (named[name].data for name in self._names[number])

    def _read(self, group: int) -> Any:
        return lambda number: torch.cat([p.flatten() for p in self._params(group, number)])

    def step(self, step: int, batches: list[tuple[Tensor, Tensor]], rate: float) -> None:
        """Step `step`, from 1, of all groups. batches: of all ranks; equally many for each group."""
        each = len(batches) // len(self.models)
        for group, (model, optimizer) in enumerate(zip(self.models, self._optimizers, strict=True)):
            mine = batches[group * each : (group + 1) * each]
            take_step(model, optimizer, mine, rate)
            for fragment in self._held[group]:
                fragment.weight += 1
        delay, due = self._section.delay, self._schedule.due(step)
        if delay:
            self._take(due)
        for number in self._schedule.starts(step):
            self._meet(number)
        if not delay:
            self._take(due)

    def _meet(self, number: int) -> None:
        def hold(group: int) -> None:
            self._groups.enter(group)
            fragment, values = self._held[group][number], self._read(group)(number)

            def run(job: Any) -> Any:
                job()
                return DONE

            fragment.start(values, self._meeting, run)

        with ThreadPoolExecutor(len(self.models)) as threads:
            list(threads.map(hold, range(len(self.models))))
        self.bytes += bytes_of_mean(
            self._held[0][number].size, len(self.models), self._section.bits
        )

    @torch.no_grad()
    def _take(self, numbers: list[int]) -> None:
        for number in numbers:
            for group, held in enumerate(self._held):
                mixed = held[number].mixed(self._read(group)(number), self._section.mix)
                self._write(self.models[group], number, mixed)

    def _write(self, model: nn.Module, number: int, values: Tensor) -> None:
        named, at = dict(model.named_parameters()), 0
        for name in self._names[number]:
            numel = named[name].numel()
            named[name].data.view(-1).copy_(values[at : at + numel])
            at += numel

    def outer(self) -> nn.Module:
        """A model with the outer parameters."""
        model = copy.deepcopy(self.models[0])
        for number, fragment in enumerate(self._held[0]):
            self._write(model, number, fragment.outer[: fragment.numel])
        return model


def fragments_of(model: nn.Module, count: int) -> list[list[str]]:
    """The names of the parameters of each fragment."""
    if count == 1:
        return [[name for name, _ in model.named_parameters()]]
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    config |= {"zero_optimization": {"stage": 2, "unit_min_numel": 1}, "log_level": "error"}
    engine = xds.initialize(copy.deepcopy(model), config)
    found: list[list[str]] = [[] for _ in range(count)]
    for number, unit in enumerate(engine._parts.sharded.units):
        names = [slot.name for flat in unit.params for slot in flat.layout.slots]
        found[fragment_of(number, count)] += names
    engine.destroy()
    return found


def adam(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), rate, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor]],
    rate: float,
) -> None:
    tokens, targets = (torch.cat(part) for part in zip(*batches, strict=True))
    F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


def rate_of(step: int, steps: int, peak: float, *, falls: bool = True) -> float:
    """The learning rate of a step, from 0: a warm-up, then a cosine to zero."""
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    share = (step - WARMUP) / max(1, steps - WARMUP)
    return peak * (0.5 * (1 + math.cos(math.pi * share)) if falls else 1.0)


class Batches:
    """The windows of all ranks in each step; the same for each run of a seed."""

    def __init__(self, seed: int) -> None:
        self._train, self._held = load_text(None, CONTEXT)
        self._seed = seed
        self._order = torch.Generator().manual_seed(seed)

    def next(self, ranks: int) -> list[tuple[Tensor, Tensor]]:
        rows = torch.randint(len(self._train), (ranks, BATCH), generator=self._order).tolist()
        return [self._stack(self._train, row) for row in rows]

    def of(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Those of one rank in any step, which are others than those of `next`."""
        order = torch.Generator().manual_seed((self._seed * 1_000_003 + step) * 64 + rank)
        return self._stack(
            self._train, torch.randint(len(self._train), (BATCH,), generator=order).tolist()
        )

    @staticmethod
    def _stack(windows: Any, row: list[int]) -> tuple[Tensor, Tensor]:
        tokens, targets = zip(*(windows[i] for i in row), strict=True)
        return torch.stack(tokens), torch.stack(targets)

    @torch.no_grad()
    def loss(self, model: Any) -> float:
        """Of 1,024 windows that are not trained."""
        losses = []
        for part in torch.linspace(0, len(self._held) - 1, 1024).long().split(64):
            tokens, targets = self._stack(self._held, part.tolist())
            losses.append(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item())
        return sum(losses) / len(losses)


def trained_before(size: str, seed: int, steps: int) -> nn.Module:
    """A model that was trained without groups, 8 micro-batches in each step."""
    torch.manual_seed(seed)
    model = GPT(SHAPES[size])
    path = Path(tempfile.gettempdir()) / f"xds-outer-{size}-{seed}-{steps}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model
    optimizer, batches = adam(model, RATES[size]), Batches(1000 + seed)
    for step in range(steps):
        rate = rate_of(step, steps, RATES[size], falls=False)
        take_step(model, optimizer, batches.next(8), rate)
    torch.save(model.state_dict(), path)
    return model


def section_of(way: str, groups: int, rates: tuple[float, float]) -> dict[str, Any]:
    """The section outer. rates: learning rate and momentum of the outer optimizer."""
    optimizer = {"type": "Nesterov", "params": {"lr": rates[0], "momentum": rates[1]}}
    return {"groups": groups, "optimizer": optimizer} | (WAYS[way] or {})


def simulated(
    way: str, num_groups: int, seed: int, options: argparse.Namespace, rates: tuple[float, float]
) -> dict[str, Any]:
    """A run in this process."""
    torch.set_num_threads(1)
    ranks = num_groups * options.wide
    model, batches = trained_before(options.size, options.begin, options.before), Batches(seed)
    peak, steps = RATES[options.size] * options.rate, options.steps
    begin_seconds = time.monotonic()
    sent = 0
    if WAYS[way] is None:
        optimizer = adam(model, peak)
        for step in range(steps):
            take_step(model, optimizer, batches.next(ranks), rate_of(step, steps, peak))
        own = model
        sent = bytes_of_mean(sum(p.numel() for p in model.parameters()), ranks, 32) * steps
    else:
        section = Outer.model_validate(section_of(way, num_groups, rates))
        groups = SimulatedGroups(model, section, peak)
        for step in range(steps):
            groups.step(step + 1, batches.next(ranks), rate_of(step, steps, peak))
        model, sent, own = groups.outer(), groups.bytes, groups.models[0]
    seconds = time.monotonic() - begin_seconds
    found = {"loss": batches.loss(model), "own": batches.loss(own)}
    return found | {"bytes": sent, "seconds": round(seconds, 1)}


def real(
    rank: int,
    ranks: int,
    way: str,
    seed: int,
    options: argparse.Namespace,
    rates: tuple[float, float],
) -> dict[str, Any]:
    """The same run on one of `ranks` processes, at stage 2."""
    model, batches = trained_before(options.size, options.begin, options.before), Batches(seed)
    peak, steps = RATES[options.size] * options.rate, options.steps
    params = {"lr": peak, "weight_decay": DECAY, "betas": BETAS, "eps": EPS}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": params},
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 2, "unit_min_numel": 1},  # as many units as blocks
        "log_level": "warning",
    }
    if WAYS[way] is not None:
        config["outer"] = section_of(way, ranks // options.wide, rates)
    engine = xds.initialize(model, config)
    begin_seconds = time.monotonic()
    for step in range(steps):
        tokens, targets = batches.next(ranks)[rank]
        for group in engine.optimizer.param_groups:
            group["lr"] = rate_of(step, steps, peak)
        engine.backward(F.cross_entropy(engine(tokens).flatten(0, 1), targets.flatten()))
        engine.step()
    seconds = time.monotonic() - begin_seconds
    engine.eval()
    loss = own = batches.loss(engine)
    if "outer" in config:
        loop = engine._parts.outer
        loop._write(range(len(loop._fragments)), mix=0.0)  # waits for meetings that run
        loss = batches.loss(engine)
    sent = engine.bytes_sent()
    engine.destroy()
    total = sent["outer"] if "outer" in config else sum(sent.values())
    return {"loss": loss, "own": own, "bytes": total, "seconds": round(seconds, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--groups", type=int, nargs="+", default=[2])
    parser.add_argument("--wide", type=int, default=1, help="ranks of a group")
    parser.add_argument("--size", choices=SHAPES, default="1M")
    parser.add_argument("--before", type=int, default=1000, help="steps without groups")
    parser.add_argument("--begin", type=int, default=0, help="the seed of the steps without groups")
    parser.add_argument("--steps", type=int, default=600, help="a multiple of all H")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rate", type=float, default=1.0, help="multiplies the learning rate")
    parser.add_argument("--lr", type=float, default=1.0, help="of the outer optimizer")
    parser.add_argument("--momentum", type=float, default=0.0, help="of the outer optimizer")
    parser.add_argument("--real", action="store_true", help="with processes and engines")
    parser.add_argument("--keep", type=Path, help="a file of found runs")
    options = parser.parse_args()
    keep: Path | None = options.keep
    known: dict[str, dict[str, Any]] = {}
    if keep is not None and keep.exists():
        known = {json.loads(line)["key"]: json.loads(line) for line in keep.open()}
    for seed in options.seeds:
        for num_groups in options.groups:
            first, ranks = None, num_groups * options.wide
            for way in options.ways:
                rates = (options.lr, options.momentum)
                about = [
                    options.size,
                    options.begin,
                    options.before,
                    options.steps,
                    options.rate,
                    num_groups,
                    seed,
                ]
                about += [f"{options.wide} ranks"] if options.wide > 1 else []
                about += [way, *(() if WAYS[way] is None else rates), options.real]
                key = json.dumps(about)
                found = known.get(key)
                if found is None:
                    if options.real:
                        found = run_ranks(
                            real, ranks, way, seed, options, rates, timeout_seconds=7200
                        )[0]
                    else:
                        found = simulated(way, num_groups, seed, options, rates)
                    found = {
                        "key": key,
                        "way": way,
                        "ranks": ranks,
                        "seed": seed,
                        "outer": rates,
                    } | found
                    if keep is not None:
                        with keep.open("a") as file:
                            file.write(json.dumps(found) + "\n")
                first = first or found["loss"]
                percent = round(100 * (found["loss"] / first - 1), 2)
                print(
                    json.dumps(
                        {k: v for k, v in found.items() if k != "key"} | {"percent": percent}
                    ),
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
