"""The engine's semantics: accumulation, no_sync, counters, optimizers, several engines, precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from models import TinyModel, build, micro_batch

import xds

LR = 1e-2


def config_of(stage: int = 0, **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {
            "stage": stage,
            "unit_min_numel": 0,
            "stage3_param_persistence_threshold": 0,
        },
    }
    return {**base, **more}


def part(step: int, micro_step: int = 0) -> torch.Tensor:
    world = dist.get_world_size()
    return micro_batch(step, micro_step, 6 if world == 3 else 4).chunk(world)[dist.get_rank()]


def train(engine: Any, steps: int, accumulation: int = 1) -> list[float]:
    losses = []
    for step in range(steps):
        for micro_step in range(accumulation):
            loss = engine(part(step, micro_step))
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    return losses


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    engine.destroy()
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def same(
    one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float = 0.0
) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=0, atol=tolerance)


# -- accumulation ---------------------------------------------------------------------------------------


def accumulate(stage: int) -> None:
    engine = xds.initialize(build("plain"), config_of(stage, gradient_accumulation_steps=3))
    seen = []
    for micro_step in range(6):
        seen.append(engine.is_gradient_accumulation_boundary())
        engine.backward(engine(part(0, micro_step)))
        engine.step()
        assert engine.was_step_applied() == seen[-1]
    assert seen == [False, False, True] * 2
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (2, 6, 0)
    assert engine.global_samples == 6 * 2 * dist.get_world_size()
    assert engine.train_batch_size() == 2 * 3 * dist.get_world_size()
    engine.destroy()


def no_sync_equals_sync(stage: int) -> None:
    """Three micro-batches in one step: reduced once at the end, whatever the stage."""
    results = []
    for in_context in (False, True):
        engine = xds.initialize(
            build("plain"), config_of(stage, gradient_accumulation_steps=3, gradient_clipping=0.1)
        )
        for step in range(2):
            for micro_step in range(3):
                loss = engine(part(step, micro_step))
                if in_context and micro_step < 2:
                    sent = engine.bytes_sent().get("reduce_scatter", 0)
                    with engine.no_sync():
                        engine.backward(loss)
                    assert engine.bytes_sent().get("reduce_scatter", 0) == sent
                else:
                    engine.backward(loss)
                engine.step()
        norm = engine.get_global_grad_norm()
        results.append((norm, values_of(engine)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    same(results[0][1], results[1][1], 1e-5)


def only_no_sync(stage: int) -> None:
    """All micro-batches inside no_sync: step() reduces what they left."""
    engine = xds.initialize(build("plain"), config_of(stage))
    with engine.no_sync():
        engine.backward(engine(part(0)))
    engine.step()
    want = xds.initialize(build("plain"), config_of(stage))
    want.backward(want(part(0)))
    want.step()
    assert engine.get_global_grad_norm() == want.get_global_grad_norm()
    same(values_of(engine), values_of(want))


def two_losses(stage: int) -> None:
    """Two backward passes of one step, through a retained graph: the sum of both gradients."""
    both = xds.initialize(build("plain"), config_of(stage))
    loss = both(part(0))
    both.backward(loss * 0.25, retain_graph=True)
    both.backward(loss * 0.75)
    both.step()
    one = xds.initialize(build("plain"), config_of(stage))
    one.backward(one(part(0)))
    one.step()
    assert both.get_global_grad_norm() == pytest.approx(one.get_global_grad_norm(), rel=1e-6)
    same(values_of(both), values_of(one), 1e-5)


def own_backward(stage: int) -> None:
    """loss.backward() instead of engine.backward(loss)."""
    mine = xds.initialize(build("plain"), config_of(stage))
    mine.scale(mine(part(0))).backward()
    mine.step()
    one = xds.initialize(build("plain"), config_of(stage))
    one.backward(one(part(0)))
    one.step()
    assert mine.get_global_grad_norm() == one.get_global_grad_norm()
    same(values_of(mine), values_of(one))


def forced_boundary(stage: int) -> None:
    engine = xds.initialize(build("plain"), config_of(stage))
    for micro_step in range(4):
        engine.set_gradient_accumulation_boundary(micro_step == 3)
        engine.backward(engine(part(0, micro_step)))
        engine.step()
        assert engine.was_step_applied() == (micro_step == 3)
    unmanaged = xds.initialize(
        build("plain"), config_of(stage, managed_gradient_accumulation=False)
    )
    for micro_step in range(4):
        unmanaged.backward(unmanaged(part(0, micro_step)))
    unmanaged.step()
    assert unmanaged.was_step_applied()
    assert engine.get_global_grad_norm() == pytest.approx(
        unmanaged.get_global_grad_norm(), rel=1e-6
    )
    same(values_of(engine), values_of(unmanaged), 1e-5)


def zero_grad_drops(stage: int) -> None:
    engine = xds.initialize(build("plain"), config_of(stage))
    engine.backward(engine(part(7)))
    engine.zero_grad()
    train(engine, 1)
    clean = xds.initialize(build("plain"), config_of(stage))
    train(clean, 1)
    assert engine.get_global_grad_norm() == clean.get_global_grad_norm()
    same(values_of(engine), values_of(clean))


def batch_sizes(stage: int) -> None:
    world = dist.get_world_size()
    engine = xds.initialize(build("plain"), config_of(stage))
    engine.set_train_batch_size(2 * world * 4)
    assert engine.gradient_accumulation_steps() == 4
    with pytest.raises(xds.UsageError, match="must be a multiple of micro-batch"):
        engine.set_train_batch_size(2 * world * 4 + 1)
    train(engine, 2, accumulation=4)
    assert engine.global_steps == 2
    engine.set_train_micro_batch_size(1)
    assert engine.train_batch_size() == world * 4
    engine.destroy()


ACCUMULATION = [
    accumulate,
    no_sync_equals_sync,
    only_no_sync,
    two_losses,
    own_backward,
    forced_boundary,
    zero_grad_drops,
    batch_sizes,
]


def run_all(names: list[str]) -> None:
    for name in names:
        for stage in (0, 1, 2, 3):
            globals()[name](stage)


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_accumulation_at_every_stage(world: int) -> None:
    run_ranks(run_all, world, [function.__name__ for function in ACCUMULATION])


# -- optimizers, schedules, data ------------------------------------------------------------------------


def plain(optimizer: Any, steps: int = 3) -> dict[str, torch.Tensor]:
    model = build("plain")
    made = optimizer(model)
    for step in range(steps):
        model(micro_batch(step, 0, 4)).backward()
        made.step()
        made.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def client_optimizers(stage: int) -> None:
    options = {"lr": LR, "weight_decay": 0.1}
    makes = {
        "object": lambda m: {"optimizer": torch.optim.AdamW(m.parameters(), **options)},
        "class": lambda m: {"optimizer": torch.optim.AdamW, "model_parameters": m.parameters()},
        "callable": lambda m: {"optimizer": lambda groups: torch.optim.AdamW(groups, **options)},
        "momentum": lambda m: {"optimizer": torch.optim.SGD(m.parameters(), lr=LR, momentum=0.9)},
        "groups": lambda m: {
            "optimizer": torch.optim.AdamW(
                [
                    {"params": [p for p in m.parameters() if p.ndim > 1], "weight_decay": 0.5},
                    {"params": [p for p in m.parameters() if p.ndim <= 1], "lr": LR / 10},
                ],
                lr=LR,
            )
        },
    }
    for name, make in makes.items():
        model = build("plain")
        engine = xds.initialize(model, config_of(stage, optimizer=None), **make(model))
        train(engine, 3)

        def reference(m: TinyModel, name: str = name, make: Any = make) -> Any:
            if name in ("object", "momentum", "groups"):
                return make(m)["optimizer"]
            return torch.optim.AdamW(m.parameters(), **(options if name == "callable" else {}))

        got, want = values_of(engine), plain(reference)
        for key, value in want.items():
            assert (got[key] - value).norm() <= 1e-5 * max(value.norm().item(), LR), (name, key)


NAMED = {
    "Adam": (lambda m: torch.optim.AdamW(m.parameters(), lr=LR, weight_decay=0.1)),
    "SGD": (lambda m: torch.optim.SGD(m.parameters(), lr=LR, weight_decay=0.1)),
    "Adagrad": (lambda m: torch.optim.Adagrad(m.parameters(), lr=LR, weight_decay=0.1)),
    "RMSprop": (lambda m: torch.optim.RMSprop(m.parameters(), lr=LR, weight_decay=0.1)),
    "NAdam": (lambda m: torch.optim.NAdam(m.parameters(), lr=LR, weight_decay=0.1)),
}


def named_optimizers(stage: int) -> None:
    for name, reference in NAMED.items():
        params = {"lr": LR, "weight_decay": 0.1}
        engine = xds.initialize(
            build("plain"), config_of(stage, optimizer={"type": name, "params": params})
        )
        train(engine, 3)
        got, want = values_of(engine), plain(reference)
        for key, value in want.items():
            assert (got[key] - value).norm() <= 2e-5 * max(value.norm().item(), LR), (name, key)


def bits_at_one_rank() -> None:
    """Without clipping, one rank is torch.optim.AdamW(fused=True) bit for bit."""
    for stage in (0, 1, 2, 3):
        params = {"lr": LR, "weight_decay": 0.1}
        engine = xds.initialize(
            build("plain"), config_of(stage, optimizer={"type": "AdamW", "params": params})
        )
        train(engine, 5)
        want = plain(
            lambda m: torch.optim.AdamW(m.parameters(), lr=LR, weight_decay=0.1, fused=True), 5
        )
        same(values_of(engine), want)


def schedules(stage: int) -> None:
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    engine = xds.initialize(build("plain"), config_of(stage, scheduler=section))
    rates = []
    for step in range(5):
        engine.backward(engine(part(step)))
        engine.step()
        rates.append(engine.get_lr()[0])
    assert rates == pytest.approx([0.0, LR / 4, LR / 2, 3 * LR / 4, LR])
    engine.destroy()
    made = xds.initialize(
        build("plain"),
        config_of(stage),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    train(made, 2)
    assert made.get_lr() == [LR / 4]
    made.destroy()


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> torch.Tensor:
        return micro_batch(at, 0, 1)[0]


def data(stage: int) -> None:
    config = config_of(stage, gradient_accumulation_steps=2)
    engine = xds.initialize(build("plain"), config, training_data=Rows())
    losses = [float(engine.train_batch()) for _ in range(3)]
    assert engine.global_steps == 3 and losses[2] < losses[0] + 0.5
    tables = [torch.zeros(3) for _ in range(dist.get_world_size())]
    dist.all_gather(tables, torch.tensor(losses))
    assert all(table.tolist() == tables[0].tolist() for table in tables)  # averaged over ranks
    before = {n: p.detach().clone() for n, p in engine.module.named_parameters() if p.numel()}
    held = engine.eval_batch(iter(engine.training_dataloader))
    assert torch.isfinite(held) and engine.module.training
    if stage < 3:
        same(dict(engine.module.named_parameters()), before)
    engine.destroy()


class PlainSide:
    """One network of the game below, trained by plain torch on all ranks."""

    def __init__(self, net: Any) -> None:
        self.net, self.optimizer = net, torch.optim.SGD(net.parameters(), lr=0.1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def learn(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        for param in self.net.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        self.optimizer.step()

    def forget(self) -> None:
        self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.net.parameters()]


class DrivenSide:
    """The same, trained by an engine."""

    def __init__(self, net: Any, stage: int) -> None:
        section = {"type": "SGD", "params": {"lr": 0.1}}
        self.engine = xds.initialize(net, config_of(stage, optimizer=section))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.engine(x)

    def learn(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)
        self.engine.step()

    def forget(self) -> None:
        self.engine.zero_grad()

    def values(self) -> list[torch.Tensor]:
        self.engine.destroy()
        return [p.detach() for p in self.engine.module.parameters()]


def play(make: Any) -> list[torch.Tensor]:
    """A maker and a critic, stepped in turn."""
    torch.manual_seed(3)
    nets = [torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(3)]) for _ in range(2)]
    maker, critic = (make(net) for net in nets)
    for step in range(3):
        noise = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        noise = noise.chunk(dist.get_world_size())[dist.get_rank()]
        critic.learn(critic(maker(noise).detach()).square().mean())
        maker.learn(critic(maker(noise)).mean())
        critic.forget()
    return [p for side in (maker, critic) for p in side.values()]


def several_engines(stage: int) -> None:
    """Two engines in one process, of which one learns through the other, equal to plain torch."""
    driven = play(lambda net: DrivenSide(net, stage))
    for got, want in zip(driven, play(PlainSide), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


OPTIMIZING = [client_optimizers, named_optimizers, schedules, data, several_engines]


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_optimizers_schedules_and_data_at_every_stage(world: int) -> None:
    run_ranks(run_all, world, [function.__name__ for function in OPTIMIZING])


def test_one_rank_equals_fused_adamw_bit_for_bit() -> None:
    run_ranks(bits_at_one_rank, 1)


# -- precision ------------------------------------------------------------------------------------------


def overflow(stage: int) -> None:
    """fp16: an overflow is skipped on every rank and halves the scale; the schedule waits."""
    section = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}
    engine = xds.initialize(build("plain"), config_of(stage, fp16=section))
    scales = []
    for step in range(6):
        loss = engine(part(step))
        if step == 1 and dist.get_rank() == 0:
            loss = loss * float("inf")
        engine.backward(loss)
        engine.step()
        assert engine.was_step_applied() == (step != 1)
        scales.append(engine.loss_scale)
    assert scales == [16.0, 8.0, 8.0, 8.0, 16.0, 16.0]
    assert engine.skipped_steps == 1
    engine.destroy()


def growth_step_is_right(stage: int) -> None:
    """On the step after which the scale doubles, the update has its right size (SGD shows it)."""
    section = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 1}
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    engine = xds.initialize(build("plain"), config_of(stage, fp16=section, optimizer=sgd))
    fixed = {"enabled": True, "loss_scale": 64}
    static = xds.initialize(build("plain"), config_of(stage, fp16=fixed, optimizer=sgd))
    for step in range(3):
        for one in (engine, static):
            one.backward(one(part(step)))
            one.step()
        assert engine.get_global_grad_norm() == pytest.approx(
            static.get_global_grad_norm(), rel=5e-3
        )
    assert engine.loss_scale > 64
    same(values_of(engine), values_of(static), 5e-3)


def autocast(stage: int) -> None:
    section = {"enabled": True, "dtype": "bf16"}
    engine = xds.initialize(build("plain"), config_of(stage, torch_autocast=section))
    assert all(p.dtype == torch.float32 for p in engine.module.parameters())
    losses = train(engine, 3)
    full = xds.initialize(build("plain"), config_of(stage))
    assert losses == pytest.approx(train(full, 3), rel=2e-2)
    assert losses != train(full, 3)
    engine.destroy()
    full.destroy()


def autocast_of_half(stage: int) -> None:
    """Parameters are 16 bits as without autocast. The loss of the model is in fp32 either way."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        half = {name: {"enabled": True, **({"loss_scale": 64} if name == "fp16" else {})}}
        section = {"enabled": True, "dtype": name}
        engine = xds.initialize(build("plain"), config_of(stage, **half, torch_autocast=section))
        assert {p.dtype for p in engine.module.parameters()} == {dtype}
        alone = xds.initialize(build("plain"), config_of(stage, **half))
        assert train(engine, 2) == train(alone, 2)
        engine.destroy()
        alone.destroy()


def dtypes(stage: int) -> None:
    """Communication and accumulation dtypes as configured; parameters of several dtypes."""
    for sent, scale in (("bf16", 2), ("fp32", 4)):
        engine = xds.initialize(build("plain"), config_of(stage, communication_data_type=sent))
        train(engine, 2)
        if dist.get_world_size() > 1:
            numel = sum(flat.layout.numel for unit in engine._sharded.units for flat in unit.params)
            want = 2 * scale * numel * (dist.get_world_size() - 1) // dist.get_world_size()
            assert engine.bytes_sent()["reduce_scatter"] == want
        engine.destroy()
    for held in ("fp32", "bf16"):
        engine = xds.initialize(
            build("plain"),
            config_of(stage, bf16={"enabled": True}, data_types={"grad_accum_dtype": held}),
        )
        assert all(loss < 10 for loss in train(engine, 2))
        engine.destroy()
    mixed = build("plain")
    mixed.head.to(torch.float64)
    mixed.head.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    engine = xds.initialize(mixed, config_of(stage))
    assert train(engine, 2)[0] == pytest.approx(4.2, abs=1.0)
    assert mixed.head.weight.dtype == torch.float64
    engine.destroy()


def config_checkpointing(stage: int) -> None:
    """The config section alone recomputes the blocks, with the same numbers."""
    section: dict[str, Any] = {}
    calls: list[int] = []
    model = build("plain")
    model.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    engine = xds.initialize(model, config_of(stage, activation_checkpointing=section))
    losses = train(engine, 2)
    assert len(calls) == 4  # each step ran the block's forward twice
    off = xds.initialize(build("plain"), config_of(stage))
    assert losses == train(off, 2)
    engine.destroy()
    assert "forward" not in model.blocks[0].__dict__
    off.destroy()


PRECISION = [
    *(overflow, growth_step_is_right, autocast, autocast_of_half, dtypes),
    config_checkpointing,
]


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_precision_at_every_stage(world: int) -> None:
    run_ranks(run_all, world, [function.__name__ for function in PRECISION])
