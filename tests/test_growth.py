"""The work of each call grows linearly with modules, parameters, units and layers: lines of code are counted.

From n to 2n and to 4n elements, a line that runs a + b*n times gains b*n and then 2*b*n runs. One that runs
c*n*n times gains 3*c*n*n and then 12*c*n*n. No clock is read; benchmarks/growth.py measures time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from helpers import run_ranks
from torch import Tensor, nn

import xds
import xds.pipe
from xds.zero.core.unit import Unit

ROOT = str(Path(xds.__file__).resolve().parent)
NOT_COUNTED = tuple(
    f"{ROOT}/{folder}/"  # the watch on waits runs by the clock
    for folder in ("tests", "benchmarks", "examples", "ops/watch")
)
Line = tuple[str, int]
WIDTH = 4
SMALLEST = 3
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
OWN_UNITS = {"unit_min_numel": 0, "param_persistence_threshold": 0, "max_reuse_distance": 0}
MEETS = {"groups": 2, "steps": 2, "fragments": 2, "bits": 4}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Deep(nn.Module):
    """`size` blocks."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(size))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Wide(nn.Module):
    """One module with `size` parameters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.many = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH)) for _ in range(size))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + torch.stack(list(self.many)).sum(0)).square().mean()


class Mixtures(nn.Module):
    """`size` blocks, each with two experts in a list."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixture(2) for _ in range(size))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Mixture(nn.Module):
    """A block with a list of `size` experts."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, size)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(size))

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).max(-1, keepdim=True)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, _ = torch.where(index == number)
            result = result.index_add(0, token, expert(x[token]) * weights[token])
        return result


class Lines:
    """Counts how often each line of the product runs inside of the context, in this thread."""

    def __init__(self) -> None:
        self.counts: Counter[Line] = Counter()

    def __enter__(self) -> Lines:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if not name.startswith(ROOT) or name.startswith(NOT_COUNTED):
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.counts[frame.f_code.co_filename, frame.f_lineno] += 1
        return self._line


def config_of(zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        "log_level": "error",
        **more,
    }


def train(
    kind: type[nn.Module],
    zero: dict[str, Any],
    more: dict[str, Any],
    size: int,
    folder: Path,
) -> Counter[Line]:
    """The lines that a rank runs to train, save and load a model of `size`. more: other sections."""
    x = torch.randn(2, WIDTH)
    with Lines() as lines:
        engine = xds.initialize(kind(size), config_of(zero, **more))
        for _ in range(2):
            engine.backward(engine(x))
            engine.step()
        engine.save_checkpoint(str(folder), tag=str(size))
        engine.load_checkpoint(str(folder), tag=str(size))
        engine.full_state_dict()
        engine.destroy()
    return lines.counts


def train_pipeline(size: int, folder: Path) -> Counter[Line]:
    """The same for a pipeline of `size` layers."""
    x = torch.randn(2, WIDTH)
    config = config_of({"stage": 1}, pipeline={"stages": 2}, gradient_accumulation_steps=2)
    with Lines() as lines:
        layers = [Block() for _ in range(size)]
        model = xds.pipe.PipelineModule(layers, loss_fn=lambda out, _: out.square().mean())
        engine = xds.initialize(model, config)
        engine.train_batch(iter([(x, x)] * 2))
        engine.destroy()
    return lines.counts


CASES: dict[str, Callable[[int, Path], Counter[Line]]] = {
    "a unit for each block": partial(train, Deep, {"stage": 3, **OWN_UNITS}, {}),
    "one unit of many blocks": partial(train, Deep, {"stage": 3}, {}),
    "one module of many parameters": partial(train, Wide, {"stage": 2}, {}),
    "many layers of experts": partial(train, Mixtures, {"stage": 2}, EXPERTS),
    "groups that meet": partial(train, Deep, {"stage": 3, **OWN_UNITS}, {"outer": MEETS}),
    "a pipeline of many layers": train_pipeline,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick("a unit for each block")
def test_no_line_runs_more_often_than_elements_grow(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0

    def count(unit: Unit, other: object) -> bool:
        nonlocal compared
        compared += 1
        return unit is other

    monkeypatch.setattr(Unit, "__eq__", count)  # a list that is searched runs no line of its own
    counts = []
    for size in (SMALLEST, SMALLEST, 2 * SMALLEST, 4 * SMALLEST):  # the first one fills caches
        compared = 0
        by_rank = run_ranks(CASES[case], 2, size, tmp_path / str(len(counts)))
        counts.append(sum(by_rank, Counter({("comparisons of units", 0): compared})))
    growing = []
    for line in counts[3]:
        first, second, third = (count[line] for count in counts[1:])
        if third - second > 2.2 * max(second - first, 0) + 20:
            growing.append(f"{line[0]}:{line[1]} ran {first}, {second}, {third} times")
    assert not growing
