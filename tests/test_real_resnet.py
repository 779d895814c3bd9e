"""A ResNet with BatchNorm: its buffers start as those of rank 0 and are then separate on each rank."""

from __future__ import annotations

from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from helpers import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import xds

SAMPLES, CLASSES, WORLD_SIZE, STEPS = 8, 5, 2, 4
CLIP, LR, DECAY = 1.0, 3e-3, 0.1
FP32_TOLERANCE = 5e-6
BF16_TOLERANCE = 2e-3


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int, out_width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out_width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_width)
        self.conv2 = nn.Conv2d(out_width, out_width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_width)
        self.around: nn.Module = nn.Identity()
        if stride > 1 or width != out_width:
            conv = nn.Conv2d(width, out_width, 1, stride, bias=False)
            self.around = nn.Sequential(conv, nn.BatchNorm2d(out_width))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.around(x))


class ResNet(nn.Module):
    """Stem, two stages of two blocks, head; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Block(8, 8, 1), Block(8, 8, 1))
        self.layer2 = nn.Sequential(Block(8, 14, 2), Block(14, 14, 1))
        self.fc = nn.Linear(14, CLASSES)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        h = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(pictures)))))
        return F.cross_entropy(self.fc(h.mean((2, 3))).float(), labels)


def build() -> ResNet:
    torch.manual_seed(1234)
    return ResNet()


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    pictures = torch.randn(SAMPLES, 3, 10, 10, generator=generator).to(dtype)
    return pictures, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def part_of(inputs: tuple[Tensor, Tensor], rank: int) -> list[Tensor]:
    return [tensor.chunk(WORLD_SIZE)[rank] for tensor in inputs]


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def engine_run(stage: int, precision: str) -> dict[str, Any]:
    rank = dist.get_rank()
    model = build()
    for buffer in model.buffers():
        buffer.add_(rank)  # the ranks disagree before initialize
    params, samples = {"lr": LR, "weight_decay": DECAY}, SAMPLES // WORLD_SIZE
    config = runs.config(stage, precision, samples=samples, params=params, clip=CLIP)
    engine = xds.initialize(model, config)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    at_start = buffers_of(model)
    losses, norms = [], []
    for step in range(STEPS):
        loss = engine(*part_of(batch(step, dtype), rank))
        engine.backward(loss)
        engine.step()
        losses.append(runs.mean_over_ranks(loss))
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return {
        "losses": losses,
        "norms": norms,
        "params": {name: param.detach().clone() for name, param in model.named_parameters()},
        "at_start": at_start,
        "at_end": buffers_of(model),
    }


CASES = [*((stage, "fp32") for stage in (0, 1, 2, 3)), (1, "bf16"), (3, "bf16")]


def rank_main() -> dict[tuple[int, str], dict[str, Any]]:
    return {case: engine_run(*case) for case in CASES}


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[int, str], dict[str, Any]]]:
    return run_ranks(rank_main, WORLD_SIZE)


def plain_run(precision: str) -> dict[str, Any]:
    """One process. Each rank's samples apart, with statistics of their own."""
    model = build()
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model.to(dtype)
    params = list(model.parameters())
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=DECAY)
    statistics = [buffers_of(model) for _ in range(WORLD_SIZE)]
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for master in masters:
            master.grad = torch.zeros_like(master)
        for part in range(WORLD_SIZE):
            model.load_state_dict(statistics[part], strict=False)
            loss = model(*part_of(batch(step, dtype), part))
            loss.backward()
            statistics[part] = buffers_of(model)
            total += loss.item() / WORLD_SIZE
            for master, param in zip(masters, params, strict=True):
                master.grad += param.grad / WORLD_SIZE
                param.grad = None
        norms.append(nn.utils.clip_grad_norm_(masters, CLIP).item())
        optimizer.step()
        for master, param in zip(masters, params, strict=True):
            param.data.copy_(master.data)
        losses.append(total)
    return {"losses": losses, "norms": norms, "statistics": statistics}


def check_close(got: dict[str, Any], plain: dict[str, Any], tolerance: float) -> None:
    assert got["losses"] == pytest.approx(plain["losses"], rel=tolerance)
    assert got["norms"] == pytest.approx(plain["norms"], rel=tolerance)


def check_buffers(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance)


def test_buffers_are_those_of_rank_0_at_the_start(ranks: Any) -> None:
    first, second = ranks
    for case, run in first.items():
        if case[1] == "fp32":
            assert run["at_start"].keys() == buffers_of(build()).keys()
            check_buffers(run["at_start"], buffers_of(build()), 0.0)
        check_buffers(second[case]["at_start"], run["at_start"], 0.0)


def test_training_equals_plain_pytorch_with_buffers_of_each_ranks_own(ranks: Any) -> None:
    plain = {precision: plain_run(precision) for precision in ("fp32", "bf16")}
    for case in CASES:
        loss, buffer = (FP32_TOLERANCE, 1e-5) if case[1] == "fp32" else (BF16_TOLERANCE, 2e-2)
        for rank, found in enumerate(ranks):
            check_close(found[case], plain[case[1]], loss)
            check_buffers(found[case]["at_end"], plain[case[1]]["statistics"][rank], buffer)
        one, two = (found[case]["at_end"]["bn1.running_mean"] for found in ranks)
        assert not one.equal(two)


def test_stages_are_bit_equal_with_their_buffers(ranks: Any) -> None:
    for found in ranks:
        one = found[0, "fp32"]
        for stage in (1, 2, 3):
            two = found[stage, "fp32"]
            assert (one["losses"], one["norms"]) == (two["losses"], two["norms"])
            for part in ("params", "at_end"):
                assert all(value.equal(two[part][name]) for name, value in one[part].items())
