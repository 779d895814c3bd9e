"""Optimizer states and parameters on the host or on a disk give the bits of a run without offload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from offload_runs import (
    AUTO,
    CPU,
    EVERYTHING,
    GUESS,
    HALF,
    OVERLAP,
    PARAMS,
    check,
    late_queues,
    nvme,
    params_on,
)
from runs import config, differing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import xds
from xds.offload.host import HostGradStore, RotatingBuffers
from xds.offload.interfaces import FinishedJob
from xds.offload.job_queues import JobQueues, PendingCopies

AUTO_LATER: dict[str, Any] = {
    "offload_optimizer": {**AUTO["offload_optimizer"], "overlap_step": True}
}
ON_DISK = "on a disk"  # stands for the folder of the test


def placed_in(folder: Path, offload: dict[str, Any]) -> dict[str, Any]:
    """`offload` with the folder of the test."""
    return {
        key: {**section, "nvme_path": str(folder)} if section["device"] == "nvme" else section
        for key, section in offload.items()
    }


DISK, HALF_DISK, LATER_DISK = (
    nvme(Path(ON_DISK), **more) for more in ({}, {"ratio": 0.5}, {"overlap_step": True})
)
GUESS_DISK = nvme(Path(ON_DISK), super_offload=True)
PARAMS_DISK, SOME_DISK = params_on(Path(ON_DISK)), params_on(Path(ON_DISK), keep=500)

# world_size, (stage, precision, accumulation, optimizer, model), offloads
CASES: list[tuple[int, tuple[Any, ...], list[dict[str, Any]]]] = [
    (1, (2, "fp32", 1), [OVERLAP, GUESS, AUTO_LATER]),
    (1, (3, "fp16", 1), [PARAMS | CPU, PARAMS_DISK | DISK]),
    (2, (0, "bf16", 2), [CPU, GUESS]),
    (2, (1, "fp16", 1), [HALF, OVERLAP, DISK]),
    (2, (2, "bf16", 1), [AUTO, GUESS_DISK]),
    (2, (3, "bf16", 2), [PARAMS | GUESS, SOME_DISK | CPU, PARAMS_DISK | HALF_DISK]),
    # whole tensors
    (2, (3, "bf16", 1, "Muon"), [CPU | PARAMS]),
    # parameters without gradients
    (2, (3, "bf16", 2, "AdamW", "frozen"), [PARAMS | GUESS]),
    (2, (1, "bf16", 2, "AdamW", "divergent"), [OVERLAP]),
]


@pytest.mark.parametrize(("world_size", "case", "offloads"), CASES)
@pytest.mark.quick(
    "1-case0-offloads0", "2-case2-offloads2", "2-case4-offloads4", "2-case7-offloads7"
)
def test_training_with_every_event_of_a_step(
    tmp_path: Path, world_size: int, case: tuple[Any, ...], offloads: list[dict[str, Any]]
) -> None:
    check(world_size, case, [placed_in(tmp_path, one) for one in offloads])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("world_size", "case", "offloads"),
    [
        (1, (2, "fp32", 2), [OVERLAP, HALF_DISK]),
        (2, (3, "bf16", 2), [GUESS | PARAMS, PARAMS_DISK | DISK]),
    ],
)
@pytest.mark.quick("1-case0-offloads0")
def test_copies_and_updates_that_are_as_late_as_they_may_be(
    tmp_path: Path, world_size: int, case: tuple[Any, ...], offloads: list[dict[str, Any]]
) -> None:
    check(world_size, case, [placed_in(tmp_path, one) for one in offloads], seed=0)


def test_masters_that_all_fit_the_device_leave_the_host_and_the_disk(tmp_path: Path) -> None:
    disk = nvme(tmp_path, ratio="auto")
    check(1, (2, "bf16", 2), [AUTO, AUTO_LATER, disk], spare_bytes=EVERYTHING)


class Skips(nn.Module):
    """Layers, of which some steps leave out one: its sum of zeros does not wait for the update."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: Tensor, left_out: int) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) if at != left_out else x
        return x.float().square().mean()


def values_with_skips(offload: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = xds.initialize(Skips(), config(2, "bf16", zero=offload))
    for step in range(6):
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x.bfloat16(), step % 4))
        engine.step()
    found = engine.full_state_dict(rank0_only=False, full_precision=True)
    engine.destroy()
    return found


def test_a_late_update_reads_its_sum_before_the_next_one_replaces_it() -> None:
    wanted = run_ranks(values_with_skips, 2, {})
    for offload in (CPU, OVERLAP):
        with late_queues(0):
            found = run_ranks(values_with_skips, 2, offload)
        assert not differing(found[0], wanted[0]), offload


# -- sums on the host ---------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Calls one block `n` times, recomputed by the reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor, n: int = 1) -> Tensor:
        x = self.first(x)
        for _ in range(n):
            x = x + checkpoint(self.block, x, use_reentrant=True)
        out: Tensor = self.last(x)
        return out.float().square().mean()


def engine_of_twice(
    precision: str, accumulation: int, *, offloads: bool, sums: str | None = None
) -> xds.Engine:
    torch.manual_seed(0)
    settings = config(
        2,
        precision,
        samples=4,
        accumulation=accumulation,
        optimizer="SGD",
        params={"lr": 0.1},
        zero={"offload_optimizer": {"device": "cpu"}} if offloads else {},
        data_types={"grad_accum_dtype": sums},
    )
    return xds.initialize(Twice(), settings)


def batch(precision: str) -> Tensor:
    return torch.randn(4, 8, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)


def norms(precision: str, calls: list[tuple[int, ...]], *, bare: bool, offloads: bool) -> list[Any]:
    """calls: for each micro-batch the calls of the block in each of its forwards."""
    engine = engine_of_twice(precision, len(calls), offloads=offloads)
    found = []
    for _ in range(3):
        for forwards in calls:
            loss = sum((engine(batch(precision), n) for n in forwards), torch.zeros(()))
            if bare:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
        found.append(engine.get_global_grad_norm())
    engine.destroy()
    return found


@pytest.mark.parametrize(("precision", "bare"), [("fp32", True), ("bf16", False)])
def test_gradients_that_arrive_twice(precision: str, bare: bool) -> None:
    for calls in ([(2,)], [(1, 1)], [(1,), (2,)], [(1, 1), (1,), (2,)], [(0,), (1,)]):
        one, other = (norms(precision, calls, bare=bare, offloads=on) for on in (False, True))
        assert one == other, calls


def results_of(case: tuple[Any, ...], script: Callable[[xds.Engine], None]) -> list[Any]:
    """Norms and values without offload and with it. case: precision, accumulation, dtype of sums."""
    precision, accumulation, sums = case
    found = []
    for offloads in (False, True):
        engine = engine_of_twice(precision, accumulation, offloads=offloads, sums=sums)
        script(engine)
        found.append((engine.get_global_grad_norm(), engine.full_state_dict(full_precision=True)))
        engine.destroy()
    return found


def steps_with_no_sync(engine: xds.Engine) -> None:
    for _ in range(3):
        engine.backward(engine(batch("fp32")))
        engine.step()
        with engine.no_sync():
            engine.backward(engine(batch("fp32")) / 2)
        engine.backward(engine(batch("fp32")) / 2)
        engine.step()


def plain_steps(engine: xds.Engine) -> None:
    dtype = next(engine.module.parameters()).dtype
    for _ in range(2 * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randn(4, 8, dtype=dtype)))
        engine.step()


def step_with_a_written_gradient(engine: xds.Engine) -> None:
    engine.backward(engine(batch("bf16")))
    weight, value = engine.module.first.weight, torch.randn(8, 8) / 3  # type: ignore[union-attr]
    xds.zero.set_full_grad(weight, value)
    assert torch.equal(xds.zero.get_full_grad(weight), value)  # it keeps its precision
    engine.step()


@pytest.mark.parametrize(
    ("script", "case"),
    [
        (steps_with_no_sync, ("fp32", 2, None)),
        (plain_steps, ("fp32", 2, "bf16")),  # sums of fewer bits
        (plain_steps, ("bf16", 2, "bf16")),
        (step_with_a_written_gradient, ("bf16", 1, None)),
    ],
)
def test_sums_on_one_rank_have_the_order_of_arrival(
    script: Callable[[xds.Engine], None], case: tuple[Any, ...]
) -> None:
    (norm, values), (other_norm, others) = results_of(case, script)
    assert norm == other_norm and not differing(values, others)


class Reading(FinishedJob):
    """An update that reads a sum as late as it may: when somebody waits for it."""

    def __init__(self, total: Tensor) -> None:
        self.total, self.seen = total, list[list[float]]()

    def wait(self) -> None:
        self.seen.append(self.total.tolist())


def test_the_memory_of_a_sum_is_not_written_while_an_update_reads_it() -> None:
    queues, pending = JobQueues.of(torch.device("cpu")), PendingCopies()
    for replaces in (False, True):
        sums = HostGradStore(
            queues,
            pending,
            RotatingBuffers(1, pin=False),
            torch.float32,
            accumulates=False,
            pin=False,
        )
        sums.add(torch.ones(3), lambda: None)
        total = sums.total()
        assert total is not None
        update = Reading(total)
        sums.set_reader(update)
        sums.reset()
        if replaces:
            sums.replace(torch.full((3,), 2.0))
        else:
            sums.add(torch.full((3,), 2.0), lambda: None)
        later = sums.total()
        assert later is not None and later.tolist() == total.tolist() == [2.0] * 3
        assert update.seen == [[1.0] * 3], replaces
    for queue in (queues.to_host, queues.to_device, queues.updates):
        queue.close()


def two_steps_with_late_gradients() -> int:
    """The number of sums."""
    torch.manual_seed(0)
    engine = xds.initialize(Twice(), config(0, zero=CPU))
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8), 2))
        engine.step()
    num_sums = len(engine._parts.updater.masters)
    engine.destroy()
    return num_sums


def test_sums_with_late_gradients_leave_for_the_host_once() -> None:
    """At stage 0 sums are gathered anew where a gradient was late: those of the first gather stay away."""
    leaving, replace = [], HostGradStore.replace

    def noted(sums: HostGradStore, total: Tensor) -> None:
        leaving.append(dist.get_rank())
        replace(sums, total)

    with mock.patch.object(HostGradStore, "replace", noted):
        found = run_ranks(two_steps_with_late_gradients, 2)
    assert [leaving.count(rank) for rank in (0, 1)] == [2 * num_sums for num_sums in found]
