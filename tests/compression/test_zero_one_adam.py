"""0/1 Adam: numbers of a reference in float64, bytes, local steps, checkpoints between synchronisations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_one_bit_adam import (
    CHUNK,
    DECAY,
    LR,
    MARGIN,
    SLOW,
    Table,
    Vector,
    grad_of,
    tokens_of,
)
from torch import Tensor
from warm_ranks import warm
from zero_one_reference import ZeroOneReference

import xds
from xds.zero import get_full_grad, get_full_param

STEPS = 22
# exact steps 1, 2, 4, 6, 8; all synchronise until 11; synchronisations after 13, 17, 21
INTERVALS = {"var_freeze_step": 8, "var_update_scaler": 2, "local_step_scaler": 3}
EXACT = (1, 2, 4, 6, 8)


def config_of(stage: int, clipper: int, **more: Any) -> dict[str, Any]:
    params = {"lr": LR, "weight_decay": DECAY, **INTERVALS, "local_step_clipper": clipper}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "ZeroOneAdam", "params": params},
        "zero_optimization": {"stage": stage},
        **more,
    }


def train(stage: int, clipper: int, num_micro: int, seed: int) -> Any:
    """The parameter after each step, as forward reads it; and the bytes of each step, by kind."""
    numel = CHUNK * dist.get_world_size()
    more = {"gradient_accumulation_steps": num_micro}
    engine = xds.initialize(Vector(numel), config_of(stage, clipper, **more))
    values, sent = [], []
    for step in range(STEPS):
        before = engine.bytes_sent()
        for micro in range(num_micro):
            engine.backward(engine(grad_of(numel, step, dist.get_rank(), micro, seed)))
            engine.step()
        values.append(engine.module.weight.detach().clone())
        sent.append({k: v - before.get(k, 0) for k, v in engine.bytes_sent().items()})
    engine.destroy()
    return torch.stack(values), sent


def wanted(stage: int, clipper: int, num_ranks: int, num_micro: int) -> tuple[int, Tensor]:
    """A seed, and the parameter of each rank after each step [ranks, steps, n]: see test_one_bit_adam."""
    numel = CHUNK * num_ranks
    for seed in range(50):
        start = Vector(numel).weight.detach()
        reference = ZeroOneReference(start, num_ranks, 8, stage, LR, DECAY)
        reference.local_step_clipper = clipper
        values = []
        for step in range(STEPS):
            grads = [
                sum(grad_of(numel, step, rank, micro, seed) for micro in range(num_micro))
                / num_micro
                for rank in range(num_ranks)
            ]
            reference.step(grads)
            values.append(torch.stack(reference.copies))
        if reference.margin > MARGIN:
            return seed, torch.stack(values, dim=1)
    raise AssertionError("no seed with clear signs")


@pytest.mark.parametrize(
    ("stage", "clipper", "num_ranks", "num_micro"),
    [
        (0, 4, 2, 2),
        (2, 1, 3, 1),
        *(
            pytest.param(*case, marks=SLOW)
            for case in ((0, 4, 3, 1), (0, 1, 2, 1), (1, 1, 2, 2), (1, 1, 3, 1), (0, 4, 4, 1))
        ),
    ],
)
def test_steps_are_those_of_the_reference(
    stage: int, clipper: int, num_ranks: int, num_micro: int
) -> None:
    seed, expected = wanted(stage, clipper, num_ranks, num_micro)
    found = warm(num_ranks).run(train, stage, clipper, num_micro, seed)
    for rank, (values, _) in enumerate(found):
        error = (values - expected[rank]).norm(dim=1) / expected[rank].norm(dim=1)
        assert float(error.max()) <= 1e-5, error
        together = [12, 16, 20] if clipper == 4 else range(STEPS)
        for step in [*range(11), *together]:
            assert values[step].equal(found[0][0][step])


def test_steps_send_what_they_need() -> None:
    for stage, clipper in ((0, 4), (0, 1), (2, 1)):
        _, sent = warm(2).run(train, stage, clipper, 1, 0)[0]
        leg = CHUNK // 8 + 4 * CHUNK // 1024
        second = "one-bit sums" if stage == 0 else "one-bit parameters"
        is_local = stage == 0 and clipper == 4
        for step, one in enumerate(sent, start=1):
            one.pop("control")
            one.pop("elements that do not move", None)
            said = {k: v for k, v in one.items() if v}
            if step in EXACT:
                assert said == {"reduce_scatter": 4 * CHUNK, "all_gather": 4 * CHUNK}
            elif is_local and step > 11 and step not in (13, 17, 21):
                assert not said
            else:
                assert said == {"one-bit gradients": leg, second: leg}, step


def train_table(steps: int, start: int, more: dict[str, Any], load: str, save: str) -> Any:
    """Losses and norms, then the parameters. more: also the stage and the clipper."""
    options = {"gradient_clipping": 1.0, **more}
    engine = xds.initialize(
        Table(), config_of(options.pop("stage"), options.pop("clipper"), **options)
    )
    if load:
        engine.load_checkpoint(load)
    found = []
    for step in range(start, start + steps):
        loss = engine(*tokens_of(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    if save:
        engine.save_checkpoint(save)
        loss = engine(*tokens_of(start + steps, dist.get_rank()))
        found.append((loss.item(), 0.0))  # of the synchronised parameters
    params = torch.cat([param.detach().float().flatten() for param in engine.module.parameters()])
    engine.destroy()
    return found, params


@pytest.mark.parametrize(
    ("stage", "clipper", "precision", "at"),
    [
        (0, 4, "fp32", 12),  # between two synchronisations
        (2, 1, "bf16", 7),  # between two updates of the variance
        *(
            pytest.param(*case, marks=SLOW)
            for case in (
                (0, 4, "bf16", 14),
                (1, 1, "fp16", 10),
                (0, 4, "fp16", 6),
                (2, 1, "fp32", 5),
            )
        ),
    ],
)
def test_a_resumed_run_has_the_same_bits(
    stage: int, clipper: int, precision: str, at: int, tmp_path: Any
) -> None:
    more: dict[str, Any] = {"stage": stage, "clipper": clipper}
    if precision != "fp32":
        more[precision] = {"enabled": True}
    folder, other = str(tmp_path / "a"), str(tmp_path / "b")
    first = warm(2).run(train_table, at, 0, more, "", folder)
    resumed = warm(2).run(train_table, 6, at, more, folder, "")
    # the same save in a run that goes on
    whole = warm(2).run(train_and_save_between, at, 6, more, other)
    for before, one, two in zip(first, whole, resumed, strict=True):
        assert before[0][:at] == one[0][:at]
        assert one[0][at:] == two[0]
        assert one[1].equal(two[1])
        assert before[0][at][0] == two[0][0][0]
        assert all(loss < 5 for loss, _ in two[0])
    assert first[0][1].equal(first[1][1])


def train_and_save_between(at: int, more_steps: int, more: dict[str, Any], folder: str) -> Any:
    options = {"gradient_clipping": 1.0, **more}
    engine = xds.initialize(
        Table(), config_of(options.pop("stage"), options.pop("clipper"), **options)
    )
    found = []
    for step in range(at + more_steps):
        if step == at:
            engine.save_checkpoint(folder)
        loss = engine(*tokens_of(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    params = torch.cat([param.detach().float().flatten() for param in engine.module.parameters()])
    engine.destroy()
    return found, params


def engine_of(clipper: int = 4, **more: Any) -> xds.Engine:
    numel = CHUNK * dist.get_world_size()
    return xds.initialize(Vector(numel), config_of(0, clipper, **more))


def take(engine: xds.Engine, step: int, grad: Tensor | None = None) -> None:
    if grad is None:
        grad = grad_of(CHUNK * dist.get_world_size(), step, dist.get_rank())
    engine.backward(engine(grad.to(engine.module.weight.dtype)))
    engine.step()


def skip_alone() -> Any:
    """In a local step the gradients of rank 1 overflow: what each rank has before and after."""
    engine = engine_of(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    for step in range(14):
        take(engine, step)
    before = engine.module.weight.detach().clone()
    grad = grad_of(before.numel(), 14, dist.get_rank())
    if dist.get_rank() == 1:
        grad[3] = float("inf")
    take(engine, 14, grad)
    skipped, same = engine.skipped_steps, engine.module.weight.equal(before)
    for step in range(15, 18):  # steps 15 to 17 of those that were taken, and a synchronisation
        take(engine, step)
    found = engine.module.weight.detach().clone()
    engine.destroy()
    return skipped, same, before, found


def test_all_ranks_skip_a_local_step_that_overflows_on_one() -> None:
    (first, second) = warm(2).run(skip_alone)
    for skipped, same, _, found in (first, second):
        assert skipped == 1 and same and bool(found.isfinite().all())
    assert not first[2].equal(second[2])
    assert first[3].equal(second[3])


def edit_between(change: str) -> Any:
    engine = engine_of()
    for step in range(14):
        take(engine, step)
    weight = engine.module.weight
    before = weight.detach().clone()
    with torch.no_grad():
        if change == "scale":
            weight.mul_(0.5)
        else:
            weight[:7] = 3.0
    take(engine, 14)
    after = weight.detach().clone()
    full = get_full_param(weight).clone()
    still = weight.detach().clone()
    engine.destroy()
    return before, after, full, still


def test_a_write_between_two_synchronisations_is_kept() -> None:
    for change in ("scale", "some"):
        found = warm(2).run(edit_between, change)
        mean = (found[0][0] + found[1][0]) / 2
        written = mean * 0.5 if change == "scale" else torch.cat([torch.full((7,), 3.0), mean[7:]])
        assert not found[0][0].equal(found[1][0])
        for _, after, full, still in found:
            assert float((after - written).abs().max()) < 20 * LR  # one local step from there
            assert full.equal(found[0][2]) and still.equal(full)
        assert not found[0][1].equal(found[1][1])


class Two(torch.nn.Module):
    """Two vectors, of which a script freezes one."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(numel))
        self.second = torch.nn.Parameter(torch.ones(numel))

    def forward(self, grad: Tensor) -> Tensor:
        return (grad * (self.first + self.second)).sum()


def freeze_between(thawed: int) -> Any:
    """Freeze `second` where the ranks are apart: whether it moves, and both at the end, on each rank."""
    numel = CHUNK * dist.get_world_size()
    engine = xds.initialize(Two(numel), config_of(0, 4))
    second, values = engine.module.second, []
    for step in range(20):
        if step in (14, thawed):
            second.requires_grad_(step == thawed)
        engine.backward(engine(grad_of(numel, step, dist.get_rank())))
        engine.step()
        values.append(second.detach().clone())
    found = get_full_param(engine.module.first).clone(), get_full_param(second).clone()
    engine.destroy()
    return values, found


@pytest.mark.parametrize("thawed", [0, 15, 18])
def test_a_parameter_frozen_between_two_synchronisations_is_the_same_on_all_ranks(
    thawed: int,
) -> None:
    (one, found), (other, also) = warm(2).run(freeze_between, thawed)
    assert not one[13].equal(other[13]), "the ranks were apart"
    assert one[14].equal(other[14]), "all ranks take the common value"
    if not thawed:
        assert all(value.equal(one[14]) for value in one[15:])
    assert found[0].equal(also[0]) and found[1].equal(also[1])


def read_gradients() -> str:
    engine = engine_of()
    for step in range(14):
        take(engine, step)
    engine.backward(engine(grad_of(2 * CHUNK, 14, dist.get_rank())))
    with pytest.raises(xds.UsageError, match="local_step_clipper to 1") as caught:
        get_full_grad(engine.module.weight)
    engine.step()
    engine.destroy()
    return str(caught.value)


def test_a_local_step_has_no_reduced_gradient() -> None:
    assert "weight" in warm(2).run(read_gradients)[0]


def alone() -> Any:
    """One rank steps as Adam with a variance that sees few steps."""
    engine = engine_of()
    for step in range(STEPS):
        take(engine, step)
    found = engine.module.weight.detach().clone(), engine.bytes_sent()
    engine.destroy()
    return found


def test_one_rank_sends_nothing() -> None:
    ((found, sent),) = warm(1).run(alone)
    assert bool(found.isfinite().all()) and not any(sent.values())


def move_ranks(load: str) -> Any:
    """Steps from a checkpoint of another number of ranks."""
    engine = xds.initialize(Table(), config_of(0, 4))
    engine.load_checkpoint(load)
    losses = []
    for step in range(14, 24):
        loss = engine(*tokens_of(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = get_full_param(engine.module.embed.weight).clone()
    engine.destroy()
    return losses, found


@pytest.mark.parametrize("num_ranks", [3, pytest.param(1, marks=SLOW)])
def test_a_checkpoint_goes_to_another_number_of_ranks(num_ranks: int, tmp_path: Any) -> None:
    folder = str(tmp_path)
    warm(2).run(train_table, 14, 0, {"stage": 0, "clipper": 4}, "", folder)
    found = warm(num_ranks).run(move_ranks, folder)
    assert all(max(losses) < 4 and table.equal(found[0][1]) for losses, table in found)


REFUSED = [
    ({"zero_optimization": {"stage": 1}}, "local_step_clipper = 4: .* at stage 1 a rank has"),
    ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage = 3: ZeroOneAdam"),
    ({"tensor_parallel": {"tp_size": 2}}, "local_step_clipper = 4: .* 2 ranks train on one batch"),
    ({"sequence_parallel_size": 2}, "local_step_clipper = 4: .* 2 ranks train on one batch"),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}},
        "var_freeze_step = 8: the learning rate rises for 9 steps",
    ),
    (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        "offload_optimizer.device",
    ),
]


@pytest.mark.parametrize(("more", "says"), REFUSED)
def test_what_it_cannot_do_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(xds.ConfigError, match=says):
        xds.Config.load(config_of(0, 4, **more))
