"""States and parameters on the host or a disk, on a CUDA device that is host memory: numbers, races, waits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_ranks import ranks
from helpers import run_processes
from test_rehearsal import batch, build, config_of, waits
from torch import Tensor, nn

STEPS, FIRST = 4, 2  # waits are counted after the first steps


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


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


CASES = [
    # world_size, stage, precision, accumulation, optimizer, params, waits in two steps
    (2, 0, "bf16", 1, "cpu", "none", 2),
    (2, 2, "bf16", 3, "cpu", "none", 2),
    (2, 3, "fp32", 1, "nvme", "nvme", 6),
    (2, 3, "bf16", 1, "none", "cpu", 2),
    slow(2, 1, "fp32", 3, "cpu", "none", 2),
    slow(2, 3, "fp16", 3, "cpu", "cpu", 2),
    slow(1, 3, "bf16", 3, "nvme", "nvme", 6),
]


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "accumulation", "optimizer", "params", "in_steps"), CASES
)
def test_training_has_the_numbers_of_the_cpu_and_no_race(
    world_size: int,
    stage: int,
    precision: str,
    accumulation: int,
    optimizer: str,
    params: str,
    in_steps: int,
    tmp_path: Path,
) -> None:
    zero = offloaded(optimizer, params, tmp_path)
    for in_micro_batches, found, locks in check(world_size, stage, precision, accumulation, zero):
        assert (in_micro_batches, locks) == (0, 0)
        assert found <= in_steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "precision", "accumulation", "more"),
    [
        (2, "bf16", 1, {"overlap_step": True}),
        (3, "fp32", 1, {"super_offload": True}),
        (2, "bf16", 3, {"ratio": 0.5}),
        (1, "fp32", 1, {"ratio": "auto"}),
    ],
)
def test_choices_of_the_update(
    stage: int, precision: str, accumulation: int, more: dict[str, Any], tmp_path: Path
) -> None:
    zero = offloaded("cpu", "none", tmp_path, **more)
    for in_micro_batches, in_steps, locks in check(2, stage, precision, accumulation, zero):
        assert in_micro_batches == locks == 0 and in_steps <= 2


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "place"), [(2, "cpu"), (3, "nvme")])
def test_pageable_memory_has_the_same_numbers(stage: int, place: str, tmp_path: Path) -> None:
    zero = offloaded(place, place if stage == 3 else "none", tmp_path, pin=False)
    for _, _, locks in check(2, stage, "bf16", 3, zero):
        assert locks == 0


def check(
    world_size: int, stage: int, precision: str, accumulation: int, zero: dict[str, Any]
) -> list[Any]:
    """Compare with the CPU; returns for each rank what it counted."""
    config = config_of(stage, precision, accumulation, **zero)
    found = ranks(world_size).run(train, config)
    plain = run_processes(train, world_size, config)
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    for one, other in zip(found, plain, strict=True):
        for mine, expected in zip(one[:3], other[:3], strict=True):
            assert mine == pytest.approx(expected, rel=tolerance, abs=tolerance / 10)
    return [counted for *_, counted in found]


# -- steps that are skipped, checkpoints, accesses ----------------------------------------------------------


def run_steps(engine: Any, first: int, last: int, *, bad: int = -1) -> list[float]:
    """Losses of the steps [first, last); step `bad` overflows."""
    losses = []
    for step in range(first, last):
        for micro in range(engine.gradient_accumulation_steps()):
            inputs = batch(step * 5 + micro, engine.device, next(engine.module.parameters()).dtype)
            loss = engine(inputs * (torch.inf if step == bad else 1)).float().square().mean()
            engine.backward(loss)
            engine.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def state_of(engine: Any) -> list[float]:
    """Sums of each parameter, its master and a moment."""
    import xds

    found = []
    for param in engine.module.parameters():
        moment = xds.zero.get_full_optimizer_state(param, "exp_avg")
        found += [sum_of(param), float(moment.double().abs().sum())]
    return found


def overflowed(config: dict[str, Any]) -> tuple[list[float], list[float], Any]:
    import xds

    engine = xds.initialize(build(), config)
    losses = run_steps(engine, 0, 5, bad=2)
    found = losses[:2] + losses[3:], state_of(engine), (engine.skipped_steps, engine.loss_scale)
    engine.destroy()
    return found


PLACES = [
    (2, "bf16", 1, "cpu", "none"),
    slow(3, "bf16", 3, "nvme", "nvme"),
]


@pytest.mark.parametrize(("stage", "_", "accumulation", "optimizer", "params"), PLACES)
def test_an_overflow_is_skipped_as_on_the_cpu(
    stage: int, _: str, accumulation: int, optimizer: str, params: str, tmp_path: Path
) -> None:
    config = config_of(stage, "fp16", accumulation, **offloaded(optimizer, params, tmp_path))
    for mine, expected in zip(
        ranks(2).run(overflowed, config), run_processes(overflowed, 2, config), strict=True
    ):
        assert mine[2] == expected[2] and mine[2][0] == 1
        assert mine[0] == pytest.approx(expected[0], rel=2e-2)
        assert mine[1] == pytest.approx(expected[1], rel=5e-2)


def resumed(config: dict[str, Any], folder: str) -> tuple[Any, Any]:
    """Losses and states at the end, of one run, and of another one from its checkpoint."""
    import xds

    engine = xds.initialize(build(), config)
    run_steps(engine, 0, 2)
    engine.save_checkpoint(folder)
    ends = [(run_steps(engine, 2, 5), state_of(engine))]
    engine.destroy()
    engine = xds.initialize(build(), config)
    run_steps(engine, 0, 1)
    engine.load_checkpoint(folder)
    ends.append((run_steps(engine, 2, 5), state_of(engine)))
    engine.destroy()
    return ends[0], ends[1]


@pytest.mark.parametrize(("stage", "precision", "accumulation", "optimizer", "params"), PLACES)
def test_a_checkpoint_continues_with_the_same_bits(
    stage: int, precision: str, accumulation: int, optimizer: str, params: str, tmp_path: Path
) -> None:
    config = config_of(stage, precision, accumulation, **offloaded(optimizer, params, tmp_path))
    for plain, again in ranks(2).run(resumed, config, str(tmp_path / "out")):
        assert plain == again


def accessed(config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """A model that is built in shards; a script reads and writes its parameters between steps."""
    import xds

    torch.manual_seed(3)
    with xds.zero.Init(config=config):
        model = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 40), nn.Linear(40, 7))
    with xds.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for at, param in enumerate(model.parameters()):
            values = torch.linspace(-0.2, 0.1 + at / 10, param.numel()).view(param.shape)
            if dist.get_rank() == 0:
                param.data.copy_(values)
    engine = xds.initialize(model, config)
    losses = []
    for step in range(3):
        losses += run_steps(engine, step, step + 1)
        with xds.zero.GatheredParameters([model[0].weight], modifier_rank=0):
            if dist.get_rank() == 0:
                model[0].weight.data.mul_(1.25)
        full = xds.zero.get_full_param(model[2].weight)
        xds.zero.set_full_param(model[2].weight, full * 0.75)
    found = losses, state_of(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("precision", "optimizer", "params"),
    [
        ("bf16", "cpu", "cpu"),
        slow("fp16", "nvme", "nvme"),
    ],
)
def test_what_a_script_writes_counts(
    precision: str, optimizer: str, params: str, tmp_path: Path
) -> None:
    config = config_of(3, precision, 1, **offloaded(optimizer, params, tmp_path))
    for mine, expected in zip(
        ranks(2).run(accessed, config), run_processes(accessed, 2, config), strict=True
    ):
        tolerance = 1e-5 if precision == "fp32" else 3e-2
        assert mine[0] == pytest.approx(expected[0], rel=tolerance)
        assert mine[1] == pytest.approx(expected[1], rel=tolerance, abs=tolerance)


# -- inputs of recomputed blocks ----------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


def recomputed(config: dict[str, Any], *, offloads: bool) -> tuple[list[float], tuple[int, int]]:
    """Losses, and waits in micro-batches and page locks after the first steps. Some graphs are dropped."""
    import xds

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), *(Block() for _ in range(4)), nn.Linear(64, 3))
    section = {"activation_checkpointing": {"cpu_checkpointing": offloads}}
    engine = xds.initialize(model, config | section)
    losses, waited, locked = [], 0, 0
    for step in range(5):
        seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
        # later batches are shorter, and their inputs fit into the memory of the first ones
        inputs = torch.randn(1024 - 64 * step, 64, generator=seed)
        inputs = inputs.to(engine.device, engine.module[0].weight.dtype)
        before = counts()
        if step == 3:
            engine(inputs)
        loss = engine(inputs).float().square().mean()
        engine.backward(loss)
        after = counts()
        engine.step()
        waited += after[0] - before[0] if step >= FIRST else 0
        locked += after[1] - before[1] if step >= FIRST else 0
        losses.append(loss.detach())
    engine.destroy()
    return [loss.item() for loss in losses], (waited, locked)


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(2, "bf16"), *(slow(stage, precision) for stage, precision in ((0, "fp32"), (3, "fp16")))],
)
def test_inputs_of_blocks_leave_and_come_back_without_a_wait(stage: int, precision: str) -> None:
    here = ranks(2)
    config = config_of(stage, precision, 1)
    kept = here.run(partial(recomputed, offloads=False), config)
    moved = here.run(partial(recomputed, offloads=True), config)
    for (losses, _), (expected, _) in zip(moved, kept, strict=True):
        assert losses == expected
    assert [counted for _, counted in moved] == [(0, 0)] * 2


def fetched_in_vain() -> list[bool]:
    """The input before the one that is wanted is fetched too, and then nobody wants it."""
    from xds.offload.activations import Activations

    moves = Activations(torch.device("cuda"), pin=True)
    values = [torch.full((1 << 15,), float(at), device="cuda") for at in range(3)]
    first, second = (moves.move(value) for value in values[:2])
    back = [moves.bring(second)]
    del first, second
    third = moves.move(values[2])  # into the memory of one of them
    back.append(moves.bring(third))
    same = [bool(one.equal(value)) for one, value in zip(back, values[1:], strict=True)]
    moves.close()
    return same


def test_an_input_that_is_fetched_in_vain_is_freed_after_its_copy() -> None:
    assert ranks(2).run(fetched_in_vain) == [[True, True]] * 2


# -- the stand-in -------------------------------------------------------------------------------------------


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
