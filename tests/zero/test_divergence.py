"""Ranks whose graphs differ: they train as plain PyTorch does, or every rank reports the difference."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from divergent_models import Route, build, config_of, plain_run, route_of, samples
from helpers import on_busy_machines, run_new_ranks, run_processes, run_ranks
from runs import Step, mean_over_ranks
from torch import nn

import xds

TIMEOUT_SECONDS = on_busy_machines(5.0)  # of the groups that are meant to fail
NUM_STEPS = 3

# -- models that train ----------------------------------------------------------------------------------

# The settings with which stage 3 works although ranks would gather different units.
TOGETHER: dict[str, dict[str, Any]] = {
    "unused experts": {},  # a block with all its experts is one unit
    "unused experts, checkpointed": {"stage3_max_reuse_distance": 0, "overlap_comm": False},
    "images and zeros": {},  # every rank calls the tower, for nothing where there is no image
    "stochastic depth": {"unit_min_numel": 10_000},  # all blocks are one unit
    "unused experts, reentrant": {},
    "layers of one unit": {  # two of three, and nothing hides when it is gathered
        "unit_min_numel": 300,
        "overlap_comm": False,
        "stage3_max_reuse_distance": 0,
    },
}


def train(kind: str, cases: list[tuple[int, dict[str, Any]]]) -> list[Any]:
    results = []
    rank = dist.get_rank()
    for stage, zero in cases:
        engine = xds.initialize(build(kind), config_of(stage, **zero))
        steps = []
        for step in range(NUM_STEPS):
            loss = engine(samples(rank, step), route_of(kind, rank, step))
            engine.backward(loss)
            engine.step()
            steps.append(Step(mean_over_ranks(loss), engine.get_global_grad_norm()))
        engine.destroy()
        results.append(steps)
    return results


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [(kind, 3 if number % 3 == 0 else 2) for number, kind in enumerate(TOGETHER)],
)
@pytest.mark.quick(
    "images and zeros-2", "layers of one unit-2", "stochastic depth-3", "unused experts-3"
)
def test_ranks_with_different_graphs_train_as_plain_pytorch(kind: str, world_size: int) -> None:
    apart = {"stage3_max_reuse_distance": 0, "divergent_graphs": True}
    if kind.startswith("unused experts"):
        apart["units"] = ["Expert"]
    cases: list[tuple[int, dict[str, Any]]] = [
        (3, apart),  # every layer, or expert, is a unit, and nothing hides when it is gathered
    ]
    if kind != "unused experts, reentrant":
        cases += [(world_size - 2, {}), (2, {}), (3, TOGETHER[kind])]
    wanted = [pytest.approx(step, rel=1e-5) for step in plain_run(kind, world_size, NUM_STEPS)]
    for of_rank in run_ranks(train, world_size, kind, cases):
        for case, steps in zip(cases, of_rank, strict=True):
            assert steps == wanted, case


class TwoHeads(nn.Module):
    """Two units, of which a forward uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(160, 160) for _ in range(2)])

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return sum(self.heads[at](x).float().square().mean() for at in used)


def hold_back_a_part() -> list[float]:
    torch.manual_seed(0)
    config = config_of(0, unit_min_numel=0) | {"bf16": {"enabled": True}}
    engine = xds.initialize(TwoHeads(), config)
    norms = []
    for step in range(3):
        x = torch.ones(2, 160, dtype=torch.bfloat16)
        with (
            engine.no_sync()
        ):  # fp32 sums of what is held back, of which rank 1 has none for one unit
            engine.backward(engine(x, [0] if dist.get_rank() == 1 or step == 2 else [0, 1]))
        engine.backward(engine(x, [0, 1]))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return norms


def test_ranks_send_one_dtype_where_only_some_held_gradients_back() -> None:
    first, second = run_processes(hold_back_a_part, 2)
    assert first == second and all(norm > 0 for norm in first)


def go_on_from_a_part(folder: str) -> list[float]:
    """As above by a changed accumulation, with a checkpoint in the middle of the step."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    config = config_of(0, unit_min_numel=0) | {"bf16": {"enabled": True}}
    x = torch.ones(2, 160, dtype=torch.bfloat16)
    norms = []
    for goes_on in (False, True):
        engine = xds.initialize(TwoHeads(), config)
        engine.set_train_batch_size(2 * engine.train_batch_size())
        if goes_on:
            engine.load_checkpoint(folder)
        else:
            engine.backward(engine(x, [0] if rank == 1 else [0, 1]))
            engine.step()
            engine.save_checkpoint(folder)
        engine.backward(engine(x, [0, 1]))
        engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    return norms


def test_a_step_goes_on_from_a_checkpoint_where_only_some_held_gradients(tmp_path: Path) -> None:
    for before, after in run_ranks(go_on_from_a_part, 2, str(tmp_path)):
        assert before == after and before > 0


# -- models that cannot train ---------------------------------------------------------------------------


def said(steps: Callable[..., None], *args: Any) -> str:
    """The message of the exception that `steps` raised; another text if it raised none."""
    try:
        steps(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "came through"


def one_step(engine: xds.Engine, x: torch.Tensor, route: Route) -> None:
    engine.backward(engine(x, route))
    engine.step()


def go_apart(kind: str, zero: dict[str, Any]) -> str:
    """Train at stage 3 with a different graph on each rank."""
    rank = dist.get_rank()
    engine = xds.initialize(build(kind), config_of(3, **zero))

    def steps() -> None:
        for step in range(NUM_STEPS):
            one_step(engine, samples(rank, step), route_of(kind, rank, step))

    return said(steps)


def raise_in_forward(stage: int) -> str:
    rank = dist.get_rank()
    engine = xds.initialize(build("early exit"), config_of(stage))

    def steps() -> None:
        one_step(engine, samples(rank, 0), (0, 1, 2))
        one_step(engine, samples(rank, 1), (0, 9) if rank == 1 else (0, 1))

    return said(steps)


def skip_a_step_and_evaluate(stage: int) -> str:
    """Rank 1 leaves out the last step; its evaluation runs at the same time as the others' step."""
    rank = dist.get_rank()
    engine = xds.initialize(build("early exit"), config_of(stage))

    def steps() -> None:
        for step in range(3 if rank != 1 else 2):
            one_step(engine, samples(rank, step), (0, 1, 2))
        engine.eval_batch(iter([(samples(rank, 9), (0, 1, 2))]), num_micro_batches=1)

    return said(steps)


def skip_an_access() -> str:
    """Rank 0 alone reads a parameter, as a script that saves on rank 0."""
    engine = xds.initialize(build("early exit"), config_of(3))

    def steps() -> None:
        engine.backward(engine(samples(dist.get_rank(), 0), (0, 1, 2)))
        if dist.get_rank() == 0:
            xds.zero.get_full_param(engine.module.head.weight)
        engine.step()

    return said(steps)


def leave(stage: int, path: str) -> None:
    """Rank 1 ends its process after two steps; rank 0 writes its error message to a file."""
    rank = dist.get_rank()
    engine = xds.initialize(build("early exit"), config_of(stage))

    def steps() -> None:
        for step in range(4):
            if rank == 1 and step == 2:
                os._exit(0)
            one_step(engine, samples(rank, step), (0, 1, 2))

    text = said(steps)
    Path(path).write_text(text)


# Every run waits for the same timeout, so they all run at once: name -> (function, ranks, arguments).
RUNS: dict[str, tuple[Callable[..., Any], int, tuple[Any, ...]]] = {
    "experts apart": (go_apart, 2, ("unused experts", {"units": ["Expert"]})),
    "reentrant": (go_apart, 2, ("unused experts, reentrant", {"stage3_max_reuse_distance": 0})),
    "exception": (raise_in_forward, 2, (3,)),
    "step skipped, evaluation": (skip_a_step_and_evaluate, 2, (2,)),
    "access skipped": (skip_an_access, 2, ()),
}


Runs = dict[str, "Future[list[str]]"]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with ThreadPoolExecutor(len(RUNS)) as threads:
        yield {
            name: threads.submit(
                run_new_ranks, function, world_size, *args, timeout_seconds=TIMEOUT_SECONDS
            )
            for name, (function, world_size, args) in RUNS.items()
        }


# The parts of every rank's message for each run: which rank waits in which call, and what differed.
GATHERS: dict[str, tuple[str, ...]] = {
    "experts apart": (
        "rank 0 waits in all_gather of unit 'blocks.0.experts.0', for the 1st time, which rank 1 never started",
        "the 2nd all_gather is the first that differs: unit 'blocks.0.experts.0' on rank 0, unit "
        "'blocks.0.experts.2' on rank 1",
    ),
    "reentrant": (
        "rank 0 waits in reduce_scatter of unit 'blocks.7', for the 2nd time, which rank 1 started only once",
        "rank 1 waits in all_gather of unit 'blocks.",
        "use_reentrant=False",
    ),
}


@pytest.mark.parametrize("name", GATHERS)
@pytest.mark.quick("reentrant")
def test_every_rank_names_the_ranks_and_units_that_differ(name: str, runs: Runs) -> None:
    for text in runs[name].result():
        assert text.startswith("PeerError: ")
        for part in (*GATHERS[name], "zero_optimization.units", "train at stage 2"):
            assert part in text, (part, text)


def test_an_exception_on_one_rank_is_named_on_the_others(runs: Runs) -> None:
    texts = runs["exception"].result()
    assert texts.pop(1) == "IndexError: index 9 is out of range"
    for text in texts:
        assert "rank 1 raised IndexError: index 9 is out of range in forward" in text
        assert "Look at the traceback of rank 1" in text


def test_a_step_beside_an_evaluation_is_named_and_aborts_no_rank(runs: Runs) -> None:
    for text in runs["step skipped, evaluation"].result():
        assert "rank 0 waits in reduce_scatter of unit 'blocks.2', for the 3rd time" in text
        assert "rank 1 waits in exchange of norms and flags" in text
        assert "Every rank must make the same calls" in text


def test_a_rank_that_does_not_take_part_in_an_access_is_named(runs: Runs) -> None:
    for other, text in zip((1, 0), runs["access skipped"].result(), strict=True):
        assert "get_full_param(head.weight)" in text and f"rank {other}" in text


def test_a_rank_that_ends_its_process_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 died with exit code 0"):
        run_new_ranks(leave, 2, 3, str(tmp_path / "said"), timeout_seconds=TIMEOUT_SECONDS)
    text = (tmp_path / "said").read_text()
    assert (
        "rank 1 did not report: it closed its connection" in text and "Look at the log of" in text
    )
