"""Measure how much of the work on the host is hidden behind the device's, with sleeps in place of both.

    python benchmarks/offload/overlap/main.py [--rounds 9] [--quick]

Forward, backward, copies and updates of each unit sleep for given times, so no processor is shared and the
result shows the order of the work alone. Stage 3 on one rank, parameters and optimizer on the host.

    serial     forward + backward + copies + updates
    lower      the least time of a step. If updates wait for the norm (the default): backward + max(forward,
               updates). If they run during backward (super_offload): max(forward + backward, updates).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import xds
from xds.offload import lanes
from xds.ops.optim.adam import Adam

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1])]
from harness import Row, finish  # noqa: E402

WIDTH, DEPTH, MS = 16, 24, 1e-3


class Case(NamedTuple):
    """Seconds of a unit: forward, backward, one copy, one update. guesses: updates run during backward."""

    forward: float
    backward: float
    copy: float
    update: float
    guesses: bool = False

    @property
    def lower(self) -> float:
        if self.guesses:
            return max(self.forward + self.backward, self.update)
        return self.backward + max(self.forward, self.update)

    @property
    def serial(self) -> float:
        return (
            self.forward + self.backward + 3 * self.copy + self.update
        )  # two fetches, one gradient


CASES = {
    "updates = forward": Case(20 * MS, 40 * MS, 4 * MS, 20 * MS),
    "updates = forward / 2": Case(20 * MS, 40 * MS, 4 * MS, 10 * MS),
    "updates = 2 forward": Case(20 * MS, 40 * MS, 4 * MS, 40 * MS),
    "updates = 2 forward, during backward": Case(20 * MS, 40 * MS, 4 * MS, 40 * MS, guesses=True),
    "updates = 3 forward, during backward": Case(20 * MS, 40 * MS, 4 * MS, 60 * MS, guesses=True),
}


class Sleep(torch.autograd.Function):
    """Sleeps in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None


class Block(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Sleep.apply(self.linear(x), *self.seconds)  # type: ignore[no-untyped-call]
        return found


def build(case: Case) -> xds.Engine:
    model = nn.Sequential(*(Block(case.forward, case.backward) for _ in range(DEPTH)))
    zero = {
        "stage": 3,
        "units": ["Block"],
        "unit_min_numel": 0,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "cpu", "super_offload": case.guesses},
        "offload_param": {"device": "cpu"},
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1e6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    return xds.initialize(model, config)


@contextmanager
def sleeping(copy_seconds: float, update_seconds: float) -> Iterator[None]:
    """Copies and updates sleep."""
    run, update = lanes.ThreadLane.run, Adam.update

    def slow_run(lane: lanes.ThreadLane, job: Callable[[], Any], after: Any = None) -> Any:
        def slow() -> None:
            if "update" not in lane.name:
                time.sleep(copy_seconds)
            job()

        return run(lane, slow, after)

    def slow_update(self: Adam, updates: Any, *args: Any) -> None:
        time.sleep(update_seconds)
        update(self, updates, *args)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(lanes.ThreadLane, "run", slow_run))
        stack.enter_context(mock.patch.object(Adam, "update", slow_update))
        yield


def step_seconds(case: Case, steps: int) -> list[float]:
    with sleeping(case.copy, case.update):
        engine = build(case)
        batch = torch.ones(2, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        times = []
        for _ in range(steps + 2):
            begin = time.monotonic()
            engine.backward(engine(batch).float().square().mean())
            engine.step()
            times.append(time.monotonic() - begin)
        engine.destroy()
    return times[2:]


def rows(rounds: int) -> Iterator[Row]:
    for name, case in CASES.items():
        times = step_seconds(case, rounds)
        serial, lower = DEPTH * case.serial, DEPTH * case.lower
        note = f"step {statistics.median(times) / MS:.0f} ms, serial {serial / MS:.0f} ms"
        shares = [(serial - seconds) / (serial - lower) for seconds in times]
        bars = {"aim": 0.95, "more_is_better": True, "note": note, "samples": {"step": times}}
        yield _row(f"hidden share of what can be hidden, {name}", shares, must=0.80, **bars)
        ratios = [lower / seconds for seconds in times]
        must = 0.80 if case.guesses else 0.90
        yield _row(f"lower bound / step, {name}", ratios, must=must, **bars)


def _row(name: str, values: list[float], **rest: Any) -> Row:
    return Row(name, statistics.median(values), min(values), max(values), **rest)


def main() -> int:
    """Run every case; 1 if a row misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="three rounds; nothing is kept")
    options = parser.parse_args()
    found = list(rows(3 if options.quick else options.rounds))
    return finish(HERE, found, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
