"""The engine on a CUDA device that is host memory: numbers, streams, and waits of the host. See stand_in.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_ranks import ranks
from helpers import run_processes
from torch import Tensor, nn

STEPS, FIRST = (
    4,
    2,
)  # waits are counted after the first steps: the clock of samples a second starts then


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(24, 48),
        nn.GELU(),
        nn.LayerNorm(48),
        nn.Linear(48, 40),
        nn.GELU(),
        nn.Linear(40, 7),
    )


def config_of(stage: int, precision: str, accumulation: int, **zero: Any) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "steps_per_print": 10**6,
        "ops": {"native": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "unit_min_numel": 0,
            **zero,
        },
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = 8
    return config


def batch(step: int, device: Any, dtype: Any) -> Tensor:
    seed = 10 * step + dist.get_rank()
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def waits() -> dict[str, int]:
    if not hasattr(torch.ops.host_cuda, "counts"):
        return {}
    from stand_in import waits_of_host

    return waits_of_host()


def train(config: dict[str, Any]) -> tuple[list[float], list[float], int, int]:
    """Losses, norms, and how often the host waited in micro-batches and in steps, after the first ones."""
    import xds

    engine = xds.initialize(build(), config)
    dtype = next(engine.module.parameters()).dtype
    assert next(engine.module.parameters()).device.type == engine.device.type
    losses, norms, in_micro_batches, in_steps = [], [], 0, 0
    for step in range(STEPS):
        total: list[Tensor] = []
        for micro in range(config["gradient_accumulation_steps"]):
            inputs = batch(step * 5 + micro, engine.device, dtype)
            before = sum(waits().values())
            loss = engine(inputs).float().square().mean()
            engine.backward(loss)
            after = sum(waits().values())
            engine.step()
            in_micro_batches += after - before if step >= FIRST else 0
            in_steps += sum(waits().values()) - after if step >= FIRST else 0
            total.append(loss.detach())
        losses.append(torch.stack(total).sum().item())
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    engine.destroy()
    return losses, norms, in_micro_batches, in_steps


CASES = [
    *((2, stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")),
    (2, 2, "fp16"),
    pytest.param(1, 3, "bf16", marks=pytest.mark.slow),
    pytest.param(4, 3, "bf16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world_size", "stage", "precision"), CASES)
def test_training_has_the_numbers_of_the_cpu_and_no_race(
    world_size: int, stage: int, precision: str
) -> None:
    config = config_of(stage, precision, 2)
    found = ranks(world_size).run(train, config)
    plain = run_processes(train, world_size, config)
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    for (losses, norms, in_micro_batches, in_steps), expected in zip(found, plain, strict=True):
        assert losses == pytest.approx(expected[0], rel=tolerance, abs=tolerance / 10)
        assert norms == pytest.approx(expected[1], rel=tolerance)
        assert in_micro_batches == 0
        assert in_steps <= STEPS - FIRST  # the norm, once a step


def race() -> None:
    x = torch.ones(8, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)  # does not wait for the stream that made x


def test_a_missing_wait_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="aten::add on stream 3 writes what stream 0 wrote"):
        ranks(1).run(race)


def freed_early() -> None:
    x = torch.ones(8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    side.synchronize()
    with torch.cuda.stream(side):
        y.mul_(x)
    del x


def test_memory_that_is_freed_in_flight_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="is freed on stream 0 while stream . uses it"):
        ranks(1).run(freed_early)


def late_copies() -> list[Any]:
    target = torch.zeros(4, pin_memory=True)
    target.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    early = target.isnan().all().item()
    torch.cuda.synchronize()
    return [early, target.tolist()]


def test_a_copy_to_page_locked_memory_arrives_when_the_host_waits() -> None:
    assert ranks(1).run(late_copies) == [[True, [1.0] * 4]]


def mixed() -> None:
    torch.ones(4, device="cuda") + torch.ones(4)


def test_a_tensor_on_the_wrong_device_raises() -> None:
    with pytest.raises(AssertionError, match="on the same device, but found at least two"):
        ranks(1).run(mixed)
