"""An engine against plain PyTorch: optimizers of scripts and configs, schedules, data, precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from models import TinyModel, build, micro_batch
from runs import config, differing, of_rank, train

import xds

LR = 1e-2  # of runs.config


def part(step: int, micro_step: int = 0) -> torch.Tensor:
    return of_rank(micro_batch(step, micro_step, 4))


def losses_of(engine: Any, steps: int) -> list[float]:
    return [step.loss for step in train(engine, steps, part)]


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    engine.destroy()
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


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
        engine = xds.initialize(model, {**config(stage), "optimizer": None}, **make(model))
        losses_of(engine, 3)

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
        engine = xds.initialize(build("plain"), config(stage, optimizer=name, params=params))
        losses_of(engine, 3)
        got, want = values_of(engine), plain(reference)
        for key, value in want.items():
            assert (got[key] - value).norm() <= 2e-5 * max(value.norm().item(), LR), (name, key)


def bits_at_one_rank() -> None:
    """Without clipping, one rank is torch.optim.AdamW(fused=True) bit for bit."""
    for stage in (0, 1, 2, 3):
        params = {"lr": LR, "weight_decay": 0.1}
        engine = xds.initialize(build("plain"), config(stage, params=params))
        losses_of(engine, 5)
        want = plain(
            lambda m: torch.optim.AdamW(m.parameters(), lr=LR, weight_decay=0.1, fused=True), 5
        )
        assert not differing(values_of(engine), want)


def schedules(stage: int) -> None:
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    engine = xds.initialize(build("plain"), config(stage, scheduler=section))
    rates = []
    for step in range(5):
        engine.backward(engine(part(step)))
        engine.step()
        rates.append(engine.get_lr()[0])
    assert rates == pytest.approx([0.0, LR / 4, LR / 2, 3 * LR / 4, LR])
    engine.destroy()
    made = xds.initialize(
        build("plain"),
        config(stage),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    losses_of(made, 2)
    assert made.get_lr() == [LR / 4]
    made.destroy()


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> torch.Tensor:
        return micro_batch(at, 0, 1)[0]


def data(stage: int) -> None:
    engine = xds.initialize(build("plain"), config(stage, accumulation=2), training_data=Rows())
    losses = [float(engine.train_batch()) for _ in range(3)]
    assert engine.global_steps == 3 and losses[2] < losses[0] + 0.5
    tables = [torch.zeros(3) for _ in range(dist.get_world_size())]
    dist.all_gather(tables, torch.tensor(losses))
    assert all(table.tolist() == tables[0].tolist() for table in tables)  # averaged over ranks
    before = {n: p.detach().clone() for n, p in engine.module.named_parameters() if p.numel()}
    held = engine.eval_batch(iter(engine.training_dataloader))
    assert torch.isfinite(held) and engine.module.training
    engine.module.eval()
    held = engine.eval_batch(iter(engine.training_dataloader))
    assert torch.isfinite(held) and not engine.module.training
    assert not differing(dict(engine.module.named_parameters()), before)
    engine.destroy()


def optimizers_at_the_ends() -> None:
    client_optimizers(3)
    named_optimizers(2)
    schedules(1)
    data(2)


def test_optimizers_schedules_and_data_do_as_plain_torch() -> None:
    run_ranks(optimizers_at_the_ends, 2)


def test_one_rank_equals_fused_adamw_bit_for_bit() -> None:
    run_ranks(bits_at_one_rank, 1)


# -- precision ------------------------------------------------------------------------------------------


def overflow(stage: int) -> None:
    """fp16: an overflow is skipped on every rank and halves the scale; the schedule waits."""
    section = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}
    engine = xds.initialize(build("plain"), config(stage, fp16=section))
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
    rate = {"lr": 0.5}
    engine = xds.initialize(
        build("plain"), config(stage, optimizer="SGD", params=rate, fp16=section)
    )
    fixed = {"enabled": True, "loss_scale": 64}
    static = xds.initialize(build("plain"), config(stage, optimizer="SGD", params=rate, fp16=fixed))
    for step in range(3):
        for one in (engine, static):
            one.backward(one(part(step)))
            one.step()
        assert engine.get_global_grad_norm() == pytest.approx(
            static.get_global_grad_norm(), rel=5e-3
        )
    assert engine.loss_scale > 64
    assert not differing(values_of(engine), values_of(static), 5e-3)


def autocast(stage: int) -> None:
    section = {"enabled": True, "dtype": "bf16"}
    engine = xds.initialize(build("plain"), config(stage, torch_autocast=section))
    assert all(p.dtype == torch.float32 for p in engine.module.parameters())
    losses = losses_of(engine, 3)
    full = xds.initialize(build("plain"), config(stage))
    assert losses == pytest.approx(losses_of(full, 3), rel=2e-2)
    assert losses != losses_of(full, 3)
    engine.destroy()
    full.destroy()


def autocast_of_half(stage: int) -> None:
    """Parameters are 16 bits as without autocast. The loss of the model is in fp32 either way."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        half = {name: {"enabled": True, **({"loss_scale": 64} if name == "fp16" else {})}}
        section = {"enabled": True, "dtype": name}
        engine = xds.initialize(build("plain"), config(stage, **half, torch_autocast=section))
        assert {p.dtype for p in engine.module.parameters()} == {dtype}
        alone = xds.initialize(build("plain"), config(stage, **half))
        assert losses_of(engine, 2) == losses_of(alone, 2)
        engine.destroy()
        alone.destroy()


def dtypes(stage: int) -> None:
    """Communication and accumulation dtypes as configured; parameters of several dtypes."""
    for sent, scale in (("bf16", 2), ("fp32", 4)):
        engine = xds.initialize(build("plain"), config(stage, communication_data_type=sent))
        losses_of(engine, 2)
        if dist.get_world_size() > 1:
            numel = sum(flat.layout.numel for unit in engine._sharded.units for flat in unit.params)
            want = 2 * scale * numel * (dist.get_world_size() - 1) // dist.get_world_size()
            assert engine.bytes_sent()["reduce_scatter"] == want
        engine.destroy()
    for held in ("fp32", "bf16"):
        engine = xds.initialize(
            build("plain"),
            config(stage, bf16={"enabled": True}, data_types={"grad_accum_dtype": held}),
        )
        assert all(loss < 10 for loss in losses_of(engine, 2))
        engine.destroy()
    mixed = build("plain")
    mixed.head.to(torch.float64)
    mixed.head.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    engine = xds.initialize(mixed, config(stage))
    assert losses_of(engine, 2)[0] == pytest.approx(4.2, abs=1.0)
    assert mixed.head.weight.dtype == torch.float64
    engine.destroy()


def precisions() -> None:
    for stage in (0, 2, 3):
        overflow(stage)
    for stage in (1, 3):
        dtypes(stage)
    growth_step_is_right(1)
    autocast(3)
    autocast_of_half(3)


def test_precision_of_steps() -> None:
    run_ranks(precisions, 2)
