"""Several engines in one process: a GAN, an actor with its reference, engines that come and go."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from helpers import run_new_ranks, run_ranks
from models import build, micro_batch
from runs import config, of_rank
from torch import Tensor, nn
from torch.nn import functional as F

import xds
from xds import zero
from xds.zero.core.param_bucket import ParamBucket

ADAM: dict[str, Any] = {"optimizer": "Adam", "params": {"adam_w_mode": False}}


def mlp(*widths: int) -> nn.Sequential:
    blocks = [
        nn.Sequential(nn.Linear(a, b), nn.LeakyReLU(0.2))
        for a, b in zip(widths[:-2], widths[1:-1], strict=True)
    ]
    return nn.Sequential(*blocks, nn.Linear(widths[-2], widths[-1]))


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(7)
    return mlp(6, 20, 20, 10), mlp(10, 20, 20, 1)


def draw(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 10, generator=generator) + 2


def real(scores: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))


def fake(scores: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores))


def gan(stage: int, freezes: bool) -> None:
    maker, critic = pair()
    engines = (
        xds.initialize(maker, config(stage, samples=4, **ADAM)),
        xds.initialize(critic, config(stage, samples=4, **ADAM)),
    )
    plain = pair()
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in plain]
    for step in range(5):
        noise, data = draw(step)
        # the critic
        loss = real(plain[1](data)) + fake(plain[1](plain[0](noise).detach()))
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        made = engines[0](of_rank(noise)).detach()
        mine = real(engines[1](of_rank(data))) + fake(engines[1](made))
        engines[1].backward(mine)
        engines[1].step()
        check(engines[1], mine, loss)
        # the maker: its loss goes through the critic
        loss = real(plain[1](plain[0](noise)))
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        critic.requires_grad_(not freezes)
        mine = real(engines[1](engines[0](of_rank(noise))))
        engines[0].backward(mine)
        engines[0].step()
        critic.requires_grad_(True)
        if not freezes:
            engines[1].zero_grad()
        check(engines[0], mine, loss)
    for model, other in zip((maker, critic), plain, strict=True):
        for param, want in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(
                zero.get_full_param(param), want.detach(), rtol=1e-4, atol=1e-6
            )


def check(engine: xds.Engine, mine: Tensor, plain: Tensor) -> None:
    mean = engine._batches.average(mine.detach().double())
    torch.testing.assert_close(mean, plain.detach(), rtol=1e-5, atol=1e-6)


def gans() -> None:
    for stage in (0, 1, 3):
        gan(stage, freezes=stage in (1, 3))


def test_a_gan_with_two_engines_equals_plain_torch() -> None:
    run_ranks(gans, 2)


def actor_and_reference() -> None:
    for stage in (1, 3):
        actor, reference = build("plain"), build("plain").requires_grad_(False)
        settings = config(stage, samples=4, **ADAM)
        engine = xds.initialize(actor, settings)
        del settings["optimizer"]
        frozen = xds.initialize(reference, settings)
        plain, still = build("plain"), build("plain").requires_grad_(False)
        optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
        for step in range(4):
            batch = micro_batch(step, 0, 8)
            with torch.no_grad():
                anchor, mine_anchor = still(batch), frozen.eval()(of_rank(batch))
            loss = plain(batch) + 0.1 * (plain(batch) - anchor).square()
            optimizer.zero_grad()
            # each rank has its own part's anchor: the plain side takes the parts as well
            parts = [plain(p) + 0.1 * (plain(p) - still(p)).square() for p in batch.chunk(2)]
            loss = (parts[0] + parts[1]) / 2
            loss.backward()
            optimizer.step()
            mine = engine(of_rank(batch))
            mine = mine + 0.1 * (engine(of_rank(batch)) - mine_anchor).square()
            engine.backward(mine)
            engine.step()
            check(engine, mine, loss)
        for param, other in zip(reference.parameters(), still.parameters(), strict=True):
            assert zero.get_full_param(param).equal(other)
        engine.destroy()
        frozen.destroy()


def test_an_actor_and_its_frozen_reference_equal_plain_torch() -> None:
    run_ranks(actor_and_reference, 2)


def trained(
    stage: int, precision: str, zero_keys: dict[str, Any], found: list[Any]
) -> Iterator[None]:
    """Trains an engine; others may go on at each yield."""
    changes = {"accumulation": 2, "clip": 0.5, "zero": zero_keys}
    if precision == "fp16":  # the first steps overflow
        changes["fp16"] = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    engine = xds.initialize(build("tied"), runs.config(stage, precision, **changes))
    yield
    for step in range(3):
        for micro_step in range(2):
            loss = engine(micro_batch(step, micro_step, 2))
            yield
            engine.backward(loss)
            yield
            engine.step()
            found.append(loss.item())
            yield
        found.append((engine.get_global_grad_norm(), engine.loss_scale))
    found += [zero.safe_get_full_fp32_param(p).tolist() for p in engine.module.parameters()]


KINDS = (
    (3, "fp16", {}),
    (1, "fp32", {"offload_optimizer": {"device": "cpu"}}),
    (2, "bf16", {}),
    (0, "fp32", {}),
)


def in_turns() -> None:
    alone: list[list[Any]] = [[] for _ in KINDS]
    for kind, found in zip(KINDS, alone, strict=True):
        list(trained(*kind, found))
    mixed: list[list[Any]] = [[] for _ in KINDS]
    engines = [trained(*kind, found) for kind, found in zip(KINDS, mixed, strict=True)]
    for turn in range(100):
        if turn == 8:
            engines.pop().close()  # between backward and step, without destroy
            gc.collect()
        for engine in engines[turn % 2 :]:
            next(engine, None)
    assert mixed[:-1] == alone[:-1]


def test_engines_that_train_in_turns_have_the_bits_of_each_alone() -> None:
    run_ranks(in_turns, 2)


class Fails(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError


def beside_a_failure(stage: int, fails: bool) -> tuple[float | None, list[Any]]:
    """A step of an fp32 engine by loss.backward(), after a backward of an fp16 engine."""
    halves = xds.initialize(build("plain"), runs.config(stage, "fp16"))
    engine = xds.initialize(build("plain"), runs.config(stage))
    batch = micro_batch(0, 0, 2)
    other, loss = halves(batch), engine(batch)
    if fails:
        with pytest.raises(ArithmeticError):
            halves.scale(Fails.apply(other)).backward()
    loss.backward()
    engine.step()
    return engine.get_global_grad_norm(), [
        p.tolist() for p in map(zero.get_full_param, engine.module.parameters())
    ]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_that_raised_leaves_no_loss_scale_behind(stage: int) -> None:
    assert run_ranks(beside_a_failure, 2, stage, True) == run_ranks(
        beside_a_failure, 2, stage, False
    )


def dropped_after_backward(stage: int) -> list[float]:
    """Rank 1 begins its backward when the engine of rank 0 is gone already. Then both build another one."""
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    losses = []
    for name in ("first", "second", "last"):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)  # few gradients: backward waits for none of them
        engine = xds.initialize(model, config(stage, samples=4, **ADAM))
        loss = engine(torch.ones(4, 6)).square().mean()
        losses.append(loss.item())
        if dist.get_rank() == 1 and name != "last":
            store.get(name)  # waits until it is set
        engine.backward(loss)
        if name == "last":
            engine.step()
        del engine, loss, model
        gc.collect()
        assert not [held for held in gc.get_objects() if type(held) is ParamBucket]
        store.set(name, "")
    return losses


def test_an_engine_dropped_between_backward_and_step_does_not_stop_the_next() -> None:
    for losses in run_new_ranks(dropped_after_backward, 2, 2, timeout_seconds=30):
        assert losses == losses[:1] * 3


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def come_and_go(stage: int) -> list[tuple[int, int, int]]:
    """Memory, threads and open files after each of 20 engines."""
    seen = []
    for _ in range(20):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(16)])
        engine = xds.initialize(model, config(stage, samples=4, **ADAM))
        for _ in range(2):
            engine.backward(engine(torch.ones(4, 256)).square().mean())
            engine.step()
        engine.destroy()
        del engine, model
        gc.collect()
        assert not [held for held in gc.get_objects() if type(held) is ParamBucket]
        threads, files = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")
        seen.append((resident_bytes(), len(threads), len(files)))
    return seen


@pytest.mark.slow
def test_engines_come_and_go_without_a_trace() -> None:
    for seen in run_new_ranks(come_and_go, 2, 3):
        early, late = seen[5], seen[-1]
        model_bytes = 16 * 257 * 256 * 4
        assert late[0] - early[0] < 2 * model_bytes, seen  # 14 engines hold 56 times that
        assert late[1:] == early[1:], seen
