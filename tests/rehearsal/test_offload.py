"""States and parameters on the host or a disk, on a CUDA device that is host memory: numbers, races, waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device_ranks import ranks, stop_ranks
from helpers import run_ranks
from test_rehearsal import batch, build, config_of, waits
from torch import nn

STEPS, FIRST = 4, 2  # waits are counted after the first steps


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    yield
    stop_ranks()


def offloaded(
    optimizer: str, params: str, folder: Path, *, pin: bool = True, **more: Any
) -> dict[str, Any]:
    """Keys of `zero_optimization`. optimizer, params: "none", "cpu" or "nvme". more: of offload_optimizer."""
    where = {"nvme_path": str(folder), "pin_memory": pin}
    sections: dict[str, Any] = {}
    if optimizer != "none":
        sections["offload_optimizer"] = {"device": optimizer, **where, **more}
    if params != "none":
        sections["offload_param"] = {"device": params, "max_in_cpu": 0, **where}
    return sections


def train(config: dict[str, Any]) -> tuple[list[float], list[float], list[float], list[int]]:
    """Losses, norms, sums of parameters; waits in micro-batches and steps, and page locks, after the first."""
    import xds

    engine = xds.initialize(build(), config)
    dtype = next(engine.module.parameters()).dtype
    losses, norms, counted = [], [], [0, 0, 0]
    for step in range(STEPS):
        total = []
        for micro in range(config["gradient_accumulation_steps"]):
            inputs = batch(step * 5 + micro, engine.device, dtype)
            before = counts()
            loss = engine(inputs).float().square().mean()
            engine.backward(loss)
            after = counts()
            engine.step()
            end = counts()
            if step >= FIRST:
                counted[0] += after[0] - before[0]
                counted[1] += end[0] - after[0]
                counted[2] += end[1] - before[1]
            total.append(loss.detach())
        losses.append(torch.stack(total).sum().item())
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    sums = [sum_of(param) for param in engine.module.parameters()]
    engine.destroy()
    return losses, norms, sums, counted


def counts() -> tuple[int, int]:
    """Waits of the host, without those of worker threads, and page locks."""
    if not hasattr(torch.ops.host_cuda, "counts"):
        return 0, 0
    from stand_in import num_page_locks

    return sum(waits().values()), num_page_locks()


def sum_of(param: nn.Parameter) -> float:
    import xds

    return float(xds.zero.get_full_param(param).double().abs().sum())


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "accumulation", "optimizer", "params"),
    [
        (2, 3, "bf16", 1, "none", "cpu"),
    ],
)
def test_training_has_the_numbers_of_the_cpu_and_no_race(
    world_size: int,
    stage: int,
    precision: str,
    accumulation: int,
    optimizer: str,
    params: str,
    tmp_path: Path,
) -> None:
    check(world_size, stage, precision, accumulation, offloaded(optimizer, params, tmp_path))


def check(
    world_size: int, stage: int, precision: str, accumulation: int, zero: dict[str, Any]
) -> list[Any]:
    """Compare with the CPU; returns for each rank what it counted."""
    config = config_of(stage, precision, accumulation, **zero)
    found = ranks(world_size).run(train, config)
    plain = run_ranks(train, world_size, config)
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    for one, other in zip(found, plain, strict=True):
        for mine, expected in zip(one[:3], other[:3], strict=True):
            assert mine == pytest.approx(expected, rel=tolerance, abs=tolerance / 10)
    return [counted for *_, counted in found]


def reads_too_early() -> float:
    """A copy to the host, and from there to the device on a stream that does not wait for it."""
    kept = torch.zeros(4, pin_memory=True)
    there, back = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    kept.copy_(there, non_blocking=True)
    with torch.cuda.stream(side):
        back.copy_(kept, non_blocking=True)
    torch.cuda.synchronize()
    return back.sum().item()


def test_page_locked_memory_that_is_read_before_a_copy_has_arrived_is_a_fault() -> None:
    with pytest.raises(
        AssertionError, match="a copy of stream 0 still uses its page-locked memory"
    ):
        ranks(2).run(reads_too_early)


def chained() -> list[float]:
    """The same on one stream; the page-locked memory is freed meanwhile, which torch's allocator allows."""
    kept = torch.zeros(4, pin_memory=True)
    kept.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    back = torch.zeros(4, device="cuda").copy_(kept, non_blocking=True)
    del kept
    return back.tolist()


def test_copies_of_one_stream_come_one_after_the_other() -> None:
    assert ranks(2).run(chained) == [[1.0] * 4] * 2
