"""Tests of a ResNet with BatchNorm: its buffers start as those of rank 0 and are then separate on each rank.

Synchronising the statistics is the user's choice: a custom BatchNorm that communicates with the other ranks
works at every stage, and torch's SyncBatchNorm is for GPUs only.
"""

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
STAGES, CLIP, LR, DECAY = (0, 1, 2, 3), 1.0, 3e-3, 0.1
FP32_TOLERANCE = 5e-6
BF16_TOLERANCE = 2e-3


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(_: Any, mine: Tensor) -> Tensor:
        total = mine.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class SyncedBatchNorm(nn.BatchNorm2d):
    """A user's own: mean and variance over the samples of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        count = x.numel() / x.shape[1] * dist.get_world_size()
        mean = SumOverRanks.apply(x.sum((0, 2, 3))) / count
        centred = x - mean.view(1, -1, 1, 1)
        variance = SumOverRanks.apply(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        normed = centred * (variance + self.eps).rsqrt().view(1, -1, 1, 1)
        return normed * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int, out_width: int, stride: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out_width, 3, stride, 1, bias=False)
        self.norm1 = norm(out_width)
        self.conv2 = nn.Conv2d(out_width, out_width, 3, 1, 1, bias=False)
        self.norm2 = norm(out_width)
        self.around: nn.Module = nn.Identity()
        if stride > 1 or width != out_width:
            conv = nn.Conv2d(width, out_width, 1, stride, bias=False)
            self.around = nn.Sequential(conv, norm(out_width))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.around(x))


class ResNet(nn.Module):
    """Stem, two stages of two blocks, head; returns the loss."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = norm(8)
        self.layer1 = nn.Sequential(Block(8, 8, 1, norm), Block(8, 8, 1, norm))
        self.layer2 = nn.Sequential(Block(8, 14, 2, norm), Block(14, 14, 1, norm))
        self.fc = nn.Linear(14, CLASSES)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        h = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(pictures)))))
        return F.cross_entropy(self.fc(h.mean((2, 3))).float(), labels)


def build(norm: type[nn.Module] = nn.BatchNorm2d) -> ResNet:
    torch.manual_seed(1234)
    return ResNet(norm)


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    pictures = torch.randn(SAMPLES, 3, 10, 10, generator=generator).to(dtype)
    return pictures, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def part_of(inputs: tuple[Tensor, Tensor], rank: int) -> list[Tensor]:
    return [tensor.chunk(WORLD_SIZE)[rank] for tensor in inputs]


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def engine_run(norm: type[nn.Module], stage: int, precision: str) -> dict[str, Any]:
    rank = dist.get_rank()
    model = build(norm)
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


def rank_main() -> dict[tuple[str, int, str], dict[str, Any]]:
    found = {("own", s, "fp32"): engine_run(nn.BatchNorm2d, s, "fp32") for s in STAGES}
    found |= {("own", s, "bf16"): engine_run(nn.BatchNorm2d, s, "bf16") for s in (1, 3)}
    return found | {("synced", s, "fp32"): engine_run(SyncedBatchNorm, s, "fp32") for s in (0, 3)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, int, str], dict[str, Any]]]:
    return run_ranks(rank_main, WORLD_SIZE)


def plain_run(precision: str, *, by_parts: bool) -> dict[str, Any]:
    """One process. `by_parts`: each rank's samples apart, with statistics of their own."""
    model = build()
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model.to(dtype)
    params = list(model.parameters())
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=DECAY)
    parts = WORLD_SIZE if by_parts else 1
    statistics = [buffers_of(model) for _ in range(parts)]
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        sums = [torch.zeros_like(master) for master in masters]
        for part in range(parts):
            model.load_state_dict(statistics[part], strict=False)
            inputs = batch(step, dtype)
            loss = model(*(part_of(inputs, part) if by_parts else inputs))
            loss.backward()
            statistics[part] = buffers_of(model)
            total += loss.item() / parts
            for summed, param in zip(sums, params, strict=True):
                summed += param.grad
                param.grad = None
        for master, summed in zip(masters, sums, strict=True):
            master.grad = summed / parts
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
        if case[2] == "fp32":
            assert run["at_start"].keys() == buffers_of(build()).keys()
            check_buffers(run["at_start"], buffers_of(build()), 0.0)
        check_buffers(second[case]["at_start"], run["at_start"], 0.0)


def test_training_equals_plain_pytorch_with_buffers_of_each_ranks_own(ranks: Any) -> None:
    for precision, stages in (("fp32", STAGES), ("bf16", (1, 3))):
        plain = plain_run(precision, by_parts=True)
        loss, buffer = (FP32_TOLERANCE, 1e-5) if precision == "fp32" else (BF16_TOLERANCE, 2e-2)
        for stage in stages:
            for rank, found in enumerate(ranks):
                run = found["own", stage, precision]
                check_close(run, plain, loss)
                check_buffers(run["at_end"], plain["statistics"][rank], buffer)
            one, two = (found["own", stage, precision]["at_end"] for found in ranks)
            assert not torch.equal(one["bn1.running_mean"], two["bn1.running_mean"])


def test_stages_are_bit_equal_with_their_buffers(ranks: Any) -> None:
    for found in ranks:
        for kind, stages in (("own", (1, 2, 3)), ("synced", (3,))):
            for stage in stages:
                one, two = found[kind, 0, "fp32"], found[kind, stage, "fp32"]
                assert (one["losses"], one["norms"]) == (two["losses"], two["norms"])
                for part in ("params", "at_end"):
                    assert all(value.equal(two[part][name]) for name, value in one[part].items())


def test_a_users_synchronised_batchnorm_equals_plain_pytorch_on_the_whole_batch(ranks: Any) -> None:
    plain = plain_run("fp32", by_parts=False)
    wanted = plain["statistics"][0].items()
    kept = {name: value for name, value in wanted if not name.endswith("tracked")}
    for found in ranks:
        check_close(found["synced", 0, "fp32"], plain, FP32_TOLERANCE)
        check_buffers(found["synced", 0, "fp32"]["at_end"], kept, 1e-5)
