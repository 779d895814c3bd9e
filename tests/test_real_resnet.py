"""Tests of a ResNet with BatchNorm: its buffers start as those of rank 0 and are then separate on each rank.

Synchronising the statistics is the user's choice: a custom BatchNorm that communicates with the other ranks
works at every stage, and torch's SyncBatchNorm is for GPUs only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes
from real_runs import CLIP, DECAY, FP32_TOLERANCE, LR, STAGES, STEPS, add_gradients, values_of
from torch import Tensor, nn
from torch.nn import functional as F

import xds

SAMPLES, CLASSES, WORLD_SIZE = 8, 5, 2
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
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // WORLD_SIZE,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": {
            "stage": stage,
            "unit_min_numel": 0,
            "stage3_param_persistence_threshold": 0,
        },
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    engine = xds.initialize(model, config)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    at_start = buffers_of(model)
    losses, norms = [], []
    for step in range(STEPS):
        loss = engine(*part_of(batch(step, dtype), rank))
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / WORLD_SIZE)
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return {
        "losses": losses,
        "norms": norms,
        "params": values_of(model),
        "at_start": at_start,
        "at_end": buffers_of(model),
    }


def rank_main() -> dict[tuple[str, int, str], dict[str, Any]]:
    runs = {
        ("own", stage, precision): engine_run(nn.BatchNorm2d, stage, precision)
        for stage in STAGES
        for precision in ("fp32", "bf16")
    }
    for stage in STAGES:
        runs["synced", stage, "fp32"] = engine_run(SyncedBatchNorm, stage, "fp32")
    return runs


@cache
def runs_by_rank() -> list[dict[tuple[str, int, str], dict[str, Any]]]:
    return run_processes(rank_main, WORLD_SIZE)


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
            add_gradients(sums, params)
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


def test_buffers_are_those_of_rank_0_at_the_start() -> None:
    first, second = runs_by_rank()
    for case, run in first.items():
        if case[2] == "fp32":
            assert run["at_start"].keys() == buffers_of(build()).keys()
            check_buffers(run["at_start"], buffers_of(build()), 0.0)
        check_buffers(second[case]["at_start"], run["at_start"], 0.0)


@pytest.mark.parametrize("stage", STAGES)
def test_training_equals_plain_pytorch_with_buffers_of_each_ranks_own(stage: int) -> None:
    plain = plain_run("fp32", by_parts=True)
    for rank, runs in enumerate(runs_by_rank()):
        run = runs["own", stage, "fp32"]
        check_close(run, plain, FP32_TOLERANCE)
        check_buffers(run["at_end"], plain["statistics"][rank], 1e-5)
    one, two = (runs["own", stage, "fp32"]["at_end"] for runs in runs_by_rank())
    assert not torch.equal(one["bn1.running_mean"], two["bn1.running_mean"])


@pytest.mark.parametrize("kind", ["own", "synced"])
def test_stages_are_bit_equal_with_their_buffers(kind: str) -> None:
    for runs in runs_by_rank():
        for stage in STAGES[1:]:
            one, two = runs[kind, 0, "fp32"], runs[kind, stage, "fp32"]
            assert (one["losses"], one["norms"]) == (two["losses"], two["norms"])
            for part in ("params", "at_end"):
                for name, value in one[part].items():
                    assert torch.equal(value, two[part][name]), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_training_equals_plain_bf16_with_buffers_of_each_ranks_own(stage: int) -> None:
    plain = plain_run("bf16", by_parts=True)
    for rank, runs in enumerate(runs_by_rank()):
        check_close(runs["own", stage, "bf16"], plain, BF16_TOLERANCE)
        check_buffers(runs["own", stage, "bf16"]["at_end"], plain["statistics"][rank], 2e-2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_users_synchronised_batchnorm_equals_plain_pytorch_on_the_whole_batch(stage: int) -> None:
    plain = plain_run("fp32", by_parts=False)
    for runs in runs_by_rank():
        run = runs["synced", stage, "fp32"]
        check_close(run, plain, FP32_TOLERANCE)
        wanted = plain["statistics"][0]
        kept = {name: value for name, value in wanted.items() if not name.endswith("tracked")}
        check_buffers(run["at_end"], kept, 1e-5)


def torchs_own_error() -> str:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(build())
    with pytest.raises(ValueError) as error:
        model(*part_of(batch(0), dist.get_rank()))
    return str(error.value)


def test_torchs_own_sync_batchnorm_does_not_run_on_cpu() -> None:
    for message in run_processes(torchs_own_error, WORLD_SIZE):
        assert message.startswith("SyncBatchNorm expected input tensor to be on")
